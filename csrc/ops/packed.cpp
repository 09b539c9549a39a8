// The operators pyattn::attention_varlen_forward and _backward: as those of dense.cpp, for sequences one
// behind the other, each of its own length.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <array>
#include <optional>

#include "attention.h"
#include "ops/checks.h"
#include "ops/cuda.h"
#include "ops/operators.h"
#include "ops/options.h"
#include "ops/packing.h"
#include "ops/params.h"
#include "ops/passes.h"
#include "ops/results.h"

namespace pyattn {
namespace {

ForwardTensors attention_varlen_forward(const Tensor& q, const Tensor& k, const Tensor& v, const Packing& packing,
                                        const Options& options) {
  check_packed(q, k, v, packing, options);
  const ForwardResults results(q, v.sym_size(2), {q.sym_size(1), q.sym_size(0)});
  if (q.is_meta()) return results.all();

  const Tensor q_ = with_contiguous_columns(q), k_ = with_contiguous_columns(k), v_ = with_contiguous_columns(v);
  Kept kept;
  ForwardParams p{};
  fill_packed(p, q_, k_, v_, packing, options, kept);
  prefer_huge_pages(results.out), p.out = packed_result(results.out), results.fill_rows(p);
  if (q.is_cuda()) {
    cuda::forward(q, p);
  } else {
    run_forward(dtype_of(q.scalar_type()), p);
    results.fill_unused(p);
  }
  return results.all();
}

BackwardTensors attention_varlen_backward(const Tensor& dout, const optional<Tensor>& dlse, const Tensor& q,
                                          const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& row_max,
                                          const Tensor& row_sum, const Packing& packing, const Options& options,
                                          bool deterministic, std::array<bool, 3> output_mask, bool part) {
  check_packed(q, k, v, packing, options);
  const at::ScalarType type = q.scalar_type();
  check_gradients(dout, dlse, out, row_max, row_sum, q, {q.sym_size(0), q.sym_size(1), v.sym_size(2)},
                  {q.sym_size(1), q.sym_size(0)});
  Tensor dq = empty_ordered_as(q, q.sym_size(2)), dk = empty_ordered_as(k, k.sym_size(2)),
         dv = empty_ordered_as(v, v.sym_size(2));
  check_wanted(options, output_mask);
  const OptionGradients more(options, output_mask, row_dtype(type));
  if (q.is_meta()) return more.with(dq, dk, dv);

  const Tensor q_ = with_contiguous_columns(q), k_ = with_contiguous_columns(k), v_ = with_contiguous_columns(v);
  const Tensor dout_ = with_contiguous_columns(dout), out_ = with_contiguous_columns(out);
  const Tensor row_max_ = row_max.contiguous(), row_sum_ = row_sum.contiguous();
  const optional<Tensor> dlse_ = contiguous(dlse);
  Kept kept;
  BackwardParams p{};
  fill_packed(p, q_, k_, v_, packing, options, kept);
  p.out = packed_input(out_), p.dout = packed_input(dout_);
  p.row_max = input_data(row_max_), p.row_sum = input_data(row_sum_), p.dlse = dlse_ ? input_data(*dlse_) : nullptr;
  p.part = part;
  for (const Tensor& t : {dq, dk, dv}) prefer_huge_pages(t);
  p.dq = packed_result(dq), p.dk = packed_result(dk), p.dv = packed_result(dv);
  more.fill_rows(p);
  if (q.is_cuda()) {
    cuda::backward(q, p, deterministic);
  } else {
    const Sequence& end = p.packed.sequences[p.batch];
    fill_rest(dq, 0, end.first_q, 0);
    // Keys that are not used lie between those that are.
    for (const Tensor& t : {dk, dv}) fill_rest(t, 0, packing.seqused_k ? 0 : end.first_k, 0);
    run_backward(dtype_of(type), p);
  }
  return more.with(dq, dk, dv);
}

TORCH_LIBRARY_FRAGMENT(pyattn, m) {
  define_attention<attention_varlen_forward>(
      m, kOnCPUAndCUDA,
      "attention_varlen_forward(Tensor q, Tensor k, Tensor v" PYATTN_PACKING_SCHEMA PYATTN_OPTIONS_SCHEMA
      ") -> " PYATTN_FORWARD_RESULTS);
  define_attention<attention_varlen_backward>(
      m, kOnCPUAndCUDA,
      "attention_varlen_backward(" PYATTN_BACKWARD_TENSORS PYATTN_PACKING_SCHEMA PYATTN_OPTIONS_SCHEMA
      ", " PYATTN_BACKWARD_FLAGS ") -> " PYATTN_BACKWARD_RESULTS);
}

}  // namespace
}  // namespace pyattn
