// The operators pyattn::attention_forward and pyattn::attention_backward: check, allocate,
// fill the params, run the kernels in parallel, or hand over to cuda/. The same functions
// serve the CPU, CUDA and, stopping before the kernels, the Meta key, so that shapes,
// strides and errors can't differ between them.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <array>
#include <optional>

#include "attention.h"
#include "ops/checks.h"
#include "ops/cuda.h"
#include "ops/operators.h"
#include "ops/options.h"
#include "ops/params.h"
#include "ops/passes.h"
#include "ops/results.h"

namespace pyattn {
namespace {

ForwardTensors attention_forward(const Tensor& q, const Tensor& k, const Tensor& v, const Options& options) {
  check_inputs(q, k, v, options);
  const ForwardResults results(q, v.sym_size(3), {q.sym_size(0), q.sym_size(1), q.sym_size(2)});
  if (q.is_meta()) return results.all();

  const Tensor q_ = with_contiguous_columns(q), k_ = with_contiguous_columns(k), v_ = with_contiguous_columns(v);
  Kept kept;
  ForwardParams p{};
  fill_inputs(p, q_, k_, v_, k.size(2), options, kept);
  p.out = result(results.out), results.fill_rows(p);
  if (q.is_cuda())
    cuda::forward(q, p);
  else
    run_forward(dtype_of(q.scalar_type()), p);
  return results.all();
}

BackwardTensors attention_backward(const Tensor& dout, const optional<Tensor>& dlse, const Tensor& q, const Tensor& k,
                                   const Tensor& v, const Tensor& out, const Tensor& row_max, const Tensor& row_sum,
                                   const Options& options, bool deterministic, std::array<bool, 3> output_mask,
                                   bool part) {
  check_inputs(q, k, v, options);
  const at::ScalarType type = q.scalar_type();
  check_gradients(dout, dlse, out, row_max, row_sum, q, {q.sym_size(0), q.sym_size(1), q.sym_size(2), v.sym_size(3)},
                  {q.sym_size(0), q.sym_size(1), q.sym_size(2)});
  Tensor dq = empty_ordered_as(q, q.sym_size(3)), dk = empty_ordered_as(k, k.sym_size(3)),
         dv = empty_ordered_as(v, v.sym_size(3));
  check_wanted(options, output_mask);
  const OptionGradients more(options, output_mask, row_dtype(type));
  if (q.is_meta()) return more.with(dq, dk, dv);

  const Tensor q_ = with_contiguous_columns(q), k_ = with_contiguous_columns(k), v_ = with_contiguous_columns(v);
  const Tensor dout_ = with_contiguous_columns(dout), out_ = with_contiguous_columns(out);
  const Tensor row_max_ = row_max.contiguous(), row_sum_ = row_sum.contiguous();
  const optional<Tensor> dlse_ = contiguous(dlse);
  Kept kept;
  BackwardParams p{};
  fill_inputs(p, q_, k_, v_, k.size(2), options, kept);
  p.out = input(out_), p.dout = input(dout_);
  p.row_max = input_data(row_max_), p.row_sum = input_data(row_sum_), p.dlse = dlse_ ? input_data(*dlse_) : nullptr;
  p.part = part;
  p.dq = result(dq), p.dk = result(dk), p.dv = result(dv);
  more.fill_rows(p);
  if (const Tensor& dbias = more.dbias; dbias.defined() && row_max.numel() > 0 && k.size(2) > 0)
    prefer_huge_pages(dbias), p.dbias = bias_view(dbias, type, dbias.mutable_data_ptr());
  else if (dbias.defined())
    dbias.zero_();  // no score has it, so no kernel writes it
  if (q.is_cuda())
    cuda::backward(q, p, deterministic);
  else
    run_backward(dtype_of(type), p);
  return more.with(dq, dk, dv);
}

TORCH_LIBRARY(pyattn, m) {
  define_attention<attention_forward>(m, kOnCPUAndCUDA,
                                      "attention_forward(Tensor q, Tensor k, Tensor v" PYATTN_OPTIONS_SCHEMA
                                      ") -> " PYATTN_FORWARD_RESULTS);
  define_attention<attention_backward>(m, kOnCPUAndCUDA,
                                       "attention_backward(" PYATTN_BACKWARD_TENSORS PYATTN_OPTIONS_SCHEMA
                                       ", " PYATTN_BACKWARD_FLAGS ") -> " PYATTN_BACKWARD_RESULTS);
}

}  // namespace
}  // namespace pyattn
