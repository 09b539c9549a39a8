// The operators pyattn::attention_forward and pyattn::attention_backward: check, allocate,
// fill the params, run the kernels in parallel, or hand over to cuda/. The same functions
// serve the CPU, CUDA and, stopping before the kernels, the Meta key, so that shapes,
// strides and errors can't differ between them.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <sys/mman.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <tuple>
#include <utility>

#include "attention.h"
#include "checks.h"
#include "cuda/ops_cuda.h"
#include "options.h"
#include "params.h"
#include "passes.h"

namespace pyattn {
namespace {

// ---- Results ----

// A dense tensor like `like` but with cols columns. Columns are innermost, because
// kernels write rows; the other dimensions lie in memory in the order that they have
// in like, as empty_like would have them.
Tensor empty_ordered_as(const Tensor& like, const SymInt& cols) {
  const auto strides = like.sym_strides(), sizes = like.sym_sizes();
  std::array<int, 3> order{2, 1, 0};  // innermost first
  for (int i = 1; i < 3; ++i)
    for (int at = i, j = i - 1; j >= 0; --j) {
      // The stride of an expanded dimension, 0, does not say where it lies: it stays in its place.
      if (strides[order[at]] == 0 || strides[order[j]] == 0) continue;
      if (strides[order[j]] <= strides[order[at]]) break;
      std::swap(order[j], order[at]);
      at = j;
    }
  const std::array<SymInt, 4> shape{sizes[0], sizes[1], sizes[2], cols};
  std::array<SymInt, 4> dense;
  SymInt stride = cols.max(1);
  dense[3] = 1;
  for (const int d : order) {
    dense[d] = stride;
    stride *= shape[d].max(1);
  }
  return at::empty_strided_symint(shape, dense, like.options());
}

Tensor empty_dense(const Tensor& like, at::ScalarType type) {
  return at::empty_symint(like.sym_sizes(), like.options().dtype(type));
}

// The memory of a gradient as large as a bias comes fresh from the system, and one fault for each
// small page takes five times as long as writing it. A hint: where it does not hold, nothing changes.
void prefer_huge_pages([[maybe_unused]] const Tensor& t) {
#ifdef MADV_HUGEPAGE
  if (!t.is_cpu()) return;
  constexpr uintptr_t kHugePage = uintptr_t{1} << 21;
  const auto first = reinterpret_cast<uintptr_t>(t.mutable_data_ptr());
  const uintptr_t begin = (first + kHugePage - 1) / kHugePage * kHugePage,
                  end = (first + t.nbytes()) / kHugePage * kHugePage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

// ---- Operators ----

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_forward(
    const Tensor& q, const Tensor& k, const Tensor& v, optional<double> softmax_scale, bool causal,
    optional<SymInt> q_offset, const optional<Tensor>& q_offsets, c10::SymIntArrayRef window,
    const optional<Tensor>& key_ranges, double softcap, const optional<Tensor>& bias,
    const optional<Tensor>& alibi_slopes, const optional<Tensor>& sinks, double dropout_p,
    const optional<Tensor>& dropout_seed) {
  Options options{softmax_scale, causal, q_offset,     q_offsets, window,    key_ranges,
                  softcap,       bias,   alibi_slopes, sinks,     dropout_p, dropout_seed};
  check_inputs(q, k, v, options);
  Tensor out = empty_ordered_as(q, v.sym_size(3));
  Tensor lse =
      at::empty_symint({q.sym_size(0), q.sym_size(1), q.sym_size(2)}, q.options().dtype(row_dtype(q.scalar_type())));
  Tensor row_max = at::empty_like(lse), row_sum = at::empty_like(lse);
  if (q.is_meta()) return {out, lse, row_max, row_sum};

  const Tensor q_ = with_contiguous_columns(q), k_ = with_contiguous_columns(k), v_ = with_contiguous_columns(v);
  ForwardParams p{};
  fill_inputs(p, q_, k_, v_, options);
  p.out = result(out);
  p.lse = lse.mutable_data_ptr(), p.row_max = row_max.mutable_data_ptr(), p.row_sum = row_sum.mutable_data_ptr();
  if (q.is_cuda()) {
    cuda::forward(q, p);
  } else {
    const Kernels& table = kernels(dtype_of(q.scalar_type()), p.score);
    const auto summary = summarize_mask(table, p);
    run(table.forward, p, table.merge_out);
  }
  return {out, lse, row_max, row_sum};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& dout, const optional<Tensor>& dlse, const Tensor& q, const Tensor& k, const Tensor& v,
    const Tensor& out, const Tensor& row_max, const Tensor& row_sum, optional<double> softmax_scale, bool causal,
    optional<SymInt> q_offset, const optional<Tensor>& q_offsets, c10::SymIntArrayRef window,
    const optional<Tensor>& key_ranges, double softcap, const optional<Tensor>& bias,
    const optional<Tensor>& alibi_slopes, const optional<Tensor>& sinks, double dropout_p,
    const optional<Tensor>& dropout_seed, bool deterministic, std::array<bool, 3> output_mask) {
  Options options{softmax_scale, causal, q_offset,     q_offsets, window,    key_ranges,
                  softcap,       bias,   alibi_slopes, sinks,     dropout_p, dropout_seed};
  check_inputs(q, k, v, options);
  const std::array<SymInt, 4> out_sizes{q.sym_size(0), q.sym_size(1), q.sym_size(2), v.sym_size(3)};
  const c10::SymIntArrayRef row_sizes(out_sizes.data(), 3);
  const at::ScalarType type = q.scalar_type();
  check_tensor("dout", dout, q.device(), type, out_sizes);
  check_tensor("out", out, q.device(), type, out_sizes);
  check_tensor("row_max", row_max, q.device(), row_dtype(type), row_sizes);
  check_tensor("row_sum", row_sum, q.device(), row_dtype(type), row_sizes);
  if (dlse) check_tensor("dlse", *dlse, q.device(), row_dtype(type), row_sizes);
  Tensor dq = empty_ordered_as(q, q.sym_size(3)), dk = empty_ordered_as(k, k.sym_size(3)),
         dv = empty_ordered_as(v, v.sym_size(3));
  check_wanted(options, output_mask);
  const auto [with_dbias, with_dslopes, with_dsinks] = output_mask;
  Tensor dbias = with_dbias ? empty_dense(*bias, bias->scalar_type()) : Tensor();
  Tensor dslopes = with_dslopes ? empty_dense(*alibi_slopes, row_dtype(type)) : Tensor();
  Tensor dsinks = with_dsinks ? empty_dense(*sinks, row_dtype(type)) : Tensor();
  const auto results = [&] {
    return std::tuple{dq,
                      dk,
                      dv,
                      dbias,
                      with_dslopes ? dslopes.to(alibi_slopes->scalar_type()) : dslopes,
                      with_dsinks ? dsinks.to(sinks->scalar_type()) : dsinks};
  };
  if (q.is_meta()) return results();

  const Tensor q_ = with_contiguous_columns(q), k_ = with_contiguous_columns(k), v_ = with_contiguous_columns(v);
  const Tensor dout_ = with_contiguous_columns(dout), out_ = with_contiguous_columns(out);
  const Tensor row_max_ = row_max.contiguous(), row_sum_ = row_sum.contiguous();
  const optional<Tensor> dlse_ = contiguous(dlse);
  BackwardParams p{};
  fill_inputs(p, q_, k_, v_, options);
  p.out = input(out_), p.dout = input(dout_);
  p.row_max = input_data(row_max_), p.row_sum = input_data(row_sum_), p.dlse = dlse_ ? input_data(*dlse_) : nullptr;
  p.dq = result(dq), p.dk = result(dk), p.dv = result(dv);
  if (with_dbias && row_max.numel() > 0 && k.size(2) > 0)
    prefer_huge_pages(dbias), p.dbias = bias_view(dbias, type, dbias.mutable_data_ptr());
  else if (with_dbias)
    dbias.zero_();  // no score has it, so no kernel writes it
  if (with_dslopes) p.dslopes = dslopes.mutable_data_ptr();
  if (with_dsinks) p.dsinks = dsinks.mutable_data_ptr();
  if (q.is_cuda()) {
    cuda::backward(q, p, deterministic);
  } else {
    const Kernels& table = kernels(dtype_of(type), p.score);
    const auto summary = summarize_mask(table, p);
    run(table.backward, p, table.reduce_dq, table.bias_gradient, table.head_gradients);
  }
  return results();
}

}  // namespace

#define PYATTN_OPTIONS                                                                           \
  "float? softmax_scale=None, bool causal=True, SymInt? q_offset=None, Tensor? q_offsets=None, " \
  "SymInt[2] window=[-1, -1], Tensor? key_ranges=None, float softcap=0.0, Tensor? bias=None, "   \
  "Tensor? alibi_slopes=None, Tensor? sinks=None, float dropout_p=0.0, Tensor? dropout_seed=None"

TORCH_LIBRARY(pyattn, m) {
  m.def("attention_forward(Tensor q, Tensor k, Tensor v, " PYATTN_OPTIONS
        ") -> (Tensor out, Tensor lse, Tensor row_max, Tensor row_sum)");
  m.def(
      "attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor row_max, "
      "Tensor row_sum, " PYATTN_OPTIONS
      ", bool deterministic=True, bool[3] output_mask=[False, False, False]) "
      "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dalibi_slopes, Tensor dsinks)");
}

TORCH_LIBRARY_IMPL(pyattn, CPU, m) {
  m.impl("attention_forward", attention_forward);
  m.impl("attention_backward", attention_backward);
}

TORCH_LIBRARY_IMPL(pyattn, CUDA, m) {
  m.impl("attention_forward", attention_forward);
  m.impl("attention_backward", attention_backward);
}

TORCH_LIBRARY_IMPL(pyattn, Meta, m) {
  m.impl("attention_forward", attention_forward);
  m.impl("attention_backward", attention_backward);
}

// Every other backend. CompositeExplicitAutograd does not cover nested tensors.
TORCH_LIBRARY_IMPL(pyattn, CompositeExplicitAutograd, m) {
  m.impl("attention_forward", torch::CppFunction::makeFromBoxedFunction<&refuse>());
  m.impl("attention_backward", torch::CppFunction::makeFromBoxedFunction<&refuse>());
}

TORCH_LIBRARY_IMPL(pyattn, NestedTensorCPU, m) {
  m.impl("attention_forward", torch::CppFunction::makeFromBoxedFunction<&refuse>());
  m.impl("attention_backward", torch::CppFunction::makeFromBoxedFunction<&refuse>());
}

TORCH_LIBRARY_IMPL(pyattn, NestedTensorCUDA, m) {
  m.impl("attention_forward", torch::CppFunction::makeFromBoxedFunction<&refuse>());
  m.impl("attention_backward", torch::CppFunction::makeFromBoxedFunction<&refuse>());
}

// Derivatives come from pyattn/autograd.py. Those that it does not define, double backward and
// forward mode, raise here instead of being silently zero.
TORCH_LIBRARY_IMPL(pyattn, Autograd, m) {
  m.impl("attention_forward", torch::autograd::autogradNotImplementedFallback());
  m.impl("attention_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace pyattn
