// The operators pyattn::attention_varlen_forward and _backward: those of dense.cpp for packed sequences, each of
// which has its own length.
#include "ops/autograd.h"
#include "ops/calls.h"
#include "ops/operators.h"
#include "ops/options.h"
#include "ops/packing.h"
#include "ops/params.h"
#include "ops/results.h"

namespace pyattn {
namespace {

auto fill_from(const Packing& packing, const Options& options) {
  return [&](ForwardParams& p, const Tensor& q, const Tensor& k, const Tensor& v, Kept& kept) {
    fill_packed(p, q, k, v, packing, options, kept);
  };
}

ForwardTensors attention_varlen_forward(const Tensor& q, const Tensor& k, const Tensor& v, const Packing& packing,
                                        const Options& options) {
  check_packed(q, k, v, packing, options);
  return call_forward(q, k, v, fill_from(packing, options));
}

BackwardTensors attention_varlen_backward(const Tensor& dout, const Saved& saved, const Packing& packing,
                                          const Options& options, const Flags& flags) {
  check_packed(saved.q, saved.k, saved.v, packing, options);
  return call_backward(dout, saved, options, flags, fill_from(packing, options));
}

struct PackedAttention : AttentionNode<PackedAttention, attention_varlen_forward, attention_varlen_backward> {
  static constexpr const char* kName = "pyattn::attention_varlen";
};

TORCH_LIBRARY_FRAGMENT(pyattn, m) {
  define_attention<attention_varlen_forward>(
      m, kOnCPUAndCUDA,
      "attention_varlen_forward(Tensor q, Tensor k, Tensor v" PYATTN_PACKING_SCHEMA PYATTN_OPTIONS_SCHEMA
      ") -> " PYATTN_FORWARD_RESULTS);
  define_attention<attention_varlen_backward>(
      m, kOnCPUAndCUDA,
      "attention_varlen_backward(Tensor dout" PYATTN_SCHEMA(PYATTN_SAVED)
          PYATTN_PACKING_SCHEMA PYATTN_OPTIONS_SCHEMA PYATTN_SCHEMA(PYATTN_FLAGS) ") -> " PYATTN_BACKWARD_RESULTS);
  m.def("attention_varlen_recorded_backward(Tensor dout" PYATTN_SCHEMA(PYATTN_SAVED)
            PYATTN_PACKING_SCHEMA PYATTN_OPTIONS_SCHEMA PYATTN_SCHEMA(PYATTN_FLAGS) ") -> " PYATTN_BACKWARD_RESULTS);
  define_differentiable<&PackedAttention::attend>(
      m, "attention_varlen(Tensor q, Tensor k, Tensor v" PYATTN_PACKING_SCHEMA PYATTN_OPTIONS_SCHEMA
         ") -> " PYATTN_FORWARD_RESULTS);
}

}  // namespace
}  // namespace pyattn
