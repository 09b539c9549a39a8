// The operators pyattn::attention_forward and pyattn::attention_backward. The same functions serve the CPU,
// CUDA and, stopping before the kernels, the Meta key, so shapes, strides and errors can't differ.
#include "ops/autograd.h"
#include "ops/calls.h"
#include "ops/operators.h"
#include "ops/options.h"
#include "ops/params.h"
#include "ops/results.h"
#include "ops/selected/call.h"

namespace pyattn {
namespace {

auto fill_from(const Options& options) {
  return [&](ForwardParams& p, const Tensor& q, const Tensor& k, const Tensor& v, Kept& kept) {
    fill_inputs(p, q, k, v, k.size(2), options, kept);
  };
}

ForwardTensors attention_forward(const Tensor& q, const Tensor& k, const Tensor& v, const Options& options) {
  check_inputs(q, k, v, options);
  if (options.selected && !q.is_meta()) return SelectedCall(q, k, options).forward(q, k, v);
  return call_forward(q, k, v, fill_from(options));
}

BackwardTensors attention_backward(const Tensor& dout, const Saved& saved, const Options& options, const Flags& flags) {
  check_inputs(saved.q, saved.k, saved.v, options);
  if (options.selected && !saved.q.is_meta()) {
    check_saved(dout, saved);
    check_wanted(options, flags.output_mask);
    return SelectedCall(saved.q, saved.k, options).backward(dout, saved, flags);
  }
  return call_backward(dout, saved, options, flags, fill_from(options));
}

struct Attention : AttentionNode<Attention, attention_forward, attention_backward> {
  static constexpr const char* kName = "pyattn::attention";
};

// The first result of the operator attention, for calls from Python: torch looks up each argument that is left out by
// its name, and makes an object of each result, which together take as long as a small call's kernel.
Tensor attention_of_few_options(const Tensor& q, const Tensor& k, const Tensor& v, optional<double> softmax_scale,
                                bool causal, optional<SymInt> q_offset) {
  return std::get<0>(Attention::attend(q, k, v, few_options(softmax_scale, causal, std::move(q_offset))));
}

TORCH_LIBRARY(pyattn, m) {
  define_attention<attention_forward>(m, kOnCPUAndCUDA,
                                      "attention_forward(Tensor q, Tensor k, Tensor v" PYATTN_OPTIONS_SCHEMA
                                      ") -> " PYATTN_FORWARD_RESULTS);
  define_attention<attention_backward>(
      m, kOnCPUAndCUDA,
      "attention_backward(Tensor dout" PYATTN_SCHEMA(PYATTN_SAVED)
          PYATTN_OPTIONS_SCHEMA PYATTN_SCHEMA(PYATTN_FLAGS) ") -> " PYATTN_BACKWARD_RESULTS);
  m.def("attention_recorded_backward(Tensor dout" PYATTN_SCHEMA(PYATTN_SAVED)
            PYATTN_OPTIONS_SCHEMA PYATTN_SCHEMA(PYATTN_FLAGS) ") -> " PYATTN_BACKWARD_RESULTS);
  m.def("set_deterministic(bool deterministic) -> ()", [](bool deterministic) { is_deterministic = deterministic; });
  m.def("set_row_invariant(bool row_invariant) -> ()", [](bool row_invariant) { is_row_invariant = row_invariant; });
  define_differentiable<&attention_of_few_options>(
      m,
      "attention_of_few_options(Tensor q, Tensor k, Tensor v, float? softmax_scale=None, bool causal=True, "
      "SymInt? q_offset=None) -> Tensor");
  define_differentiable<&Attention::attend>(
      m, "attention(Tensor q, Tensor k, Tensor v" PYATTN_OPTIONS_SCHEMA ") -> " PYATTN_FORWARD_RESULTS);
}

}  // namespace
}  // namespace pyattn
