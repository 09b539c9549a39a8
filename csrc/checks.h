// Checks: what the operators accept. An error is one sentence with the values in it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/ScalarType.h>

#include <cmath>
#include <optional>

#include "attention.h"

namespace pyattn {

using at::Tensor;
using c10::SymInt;
using std::optional;

inline DType dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kDouble: return DType::kFloat64;
    case at::kFloat: return DType::kFloat32;
    case at::kBFloat16: return DType::kBFloat16;
    case at::kHalf: return DType::kFloat16;
    default:
      TORCH_CHECK_TYPE(false, "pyattn: dtype must be float64, float32, bfloat16 or float16, got ",
                       c10::getDtypeNames(type).first);
  }
}

// dtype of lse, row_max and row_sum.
inline at::ScalarType row_dtype(at::ScalarType type) { return type == at::kDouble ? at::kDouble : at::kFloat; }

inline void check_tensor(const char* name, const Tensor& t, at::Device device, at::ScalarType type,
                         c10::SymIntArrayRef sizes) {
  TORCH_CHECK_TYPE(t.defined(), "pyattn: ", name, " must be a Tensor, got None");
  TORCH_CHECK_TYPE(t.scalar_type() == type, "pyattn: ", name, " must have dtype ", c10::getDtypeNames(type).first,
                   ", got ", c10::getDtypeNames(t.scalar_type()).first);
  TORCH_CHECK_VALUE(t.device() == device, "pyattn: ", name, " must be on q's device, got ", t.device(), " and ",
                    device);
  TORCH_CHECK_VALUE(t.sym_sizes() == sizes, "pyattn: ", name, " must have shape ", sizes, ", got ", t.sym_sizes());
}

// The options of both operators, from their arguments to the params, by the names that users know.
struct Options {
  optional<double> softmax_scale;
  bool causal;
  optional<SymInt> q_offset;
  optional<Tensor> q_offsets;  // (batch), int64, in place of q_offset
  double dropout_p;
  optional<Tensor> dropout_seed;  // (), int64
};

inline void check_inputs(const Tensor& q, const Tensor& k, const Tensor& v, const Options& options) {
  TORCH_CHECK_TYPE(q.defined() && k.defined() && v.defined(), "pyattn: q, k and v must be Tensors, got None");
  TORCH_CHECK_VALUE(q.dim() == 4 && k.dim() == 4 && v.dim() == 4,
                    "pyattn: q, k and v must have 4 dimensions (batch, num_heads, seqlen, head_dim), got q ",
                    q.sym_sizes(), ", k ", k.sym_sizes(), " and v ", v.sym_sizes());
  dtype_of(q.scalar_type());
  const auto qs = q.sym_sizes(), ks = k.sym_sizes(), vs = v.sym_sizes();
  TORCH_CHECK_VALUE(ks[0] == qs[0], "pyattn: q and k must have the same batch, got ", qs[0], " and ", ks[0]);
  TORCH_CHECK_VALUE(ks[3] == qs[3], "pyattn: q and k must have the same head_dim, got ", qs[3], " and ", ks[3]);
  TORCH_CHECK_VALUE(ks[1] == 0 ? qs[1] == 0 : qs[1] % ks[1] == 0,
                    "pyattn: num_heads_q must be a multiple of num_heads_kv, got ", qs[1], " and ", ks[1]);
  check_tensor("k", k, q.device(), q.scalar_type(), ks);
  check_tensor("v", v, q.device(), q.scalar_type(), {ks[0], ks[1], ks[2], vs[3]});
  TORCH_CHECK_VALUE(std::isfinite(options.softmax_scale.value_or(1)), "pyattn: softmax_scale must be finite, got ",
                    *options.softmax_scale);
  if (options.q_offsets) check_tensor("q_offset", *options.q_offsets, q.device(), at::kLong, {qs[0]});
  const double p = options.dropout_p;
  TORCH_CHECK_VALUE(0 <= p && p < 1, "pyattn: dropout_p must be at least 0 and below 1, got ", p);
  TORCH_CHECK_VALUE(p == 0 || options.dropout_seed, "pyattn: dropout_p ", p, " needs a dropout_seed, got None");
  if (options.dropout_seed) check_tensor("dropout_seed", *options.dropout_seed, q.device(), at::kLong, {});
}

// The kernel of every backend without kernels: sparse, nested and quantized
// tensors, and devices that are not built in.
inline void refuse(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto values = torch::jit::last(*stack, arguments.size());
  for (size_t i = 0; i < values.size(); ++i) {
    if (!values[i].isTensor()) continue;
    const Tensor& t = values[i].toTensor();
    TORCH_CHECK_TYPE(t.defined(), "pyattn: ", arguments[i].name(), " must be a Tensor, got None");
    const bool plain = t.layout() == at::kStrided && !t.is_nested() && !t.is_quantized();
    TORCH_CHECK_NOT_IMPLEMENTED(plain && (t.is_cpu() || t.is_cuda() || t.is_meta()), "pyattn: ", arguments[i].name(),
                                " must be a dense tensor on the CPU or a CUDA device, got layout ", t.layout(),
                                t.is_nested() ? " (nested)" : "", ", dtype ", c10::getDtypeNames(t.scalar_type()).first,
                                ", device ", t.device());
  }
  TORCH_CHECK_NOT_IMPLEMENTED(false, "pyattn: ", op.schema().name(), " has no kernels for tensors of this kind");
}

}  // namespace pyattn
