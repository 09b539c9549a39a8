// Results: the tensors that kernels write.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty_strided.h>

#include <limits>
#include <tuple>
#include <utility>

#include "attention.h"
#include "ops/checks.h"
#include "ops/devices/huge_pages.h"
#include "ops/options.h"
#include "ops/params.h"

namespace pyattn {

// An uninitialized tensor on the device of `like`. CPU tensors bypass the dispatcher, which takes as long as the kernel
// of a small call.
inline Tensor empty_on_device_of(const Tensor& like, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides,
                                 at::ScalarType type) {
  if (like.is_cpu())
    return Tensor(
        at::detail::empty_strided_cpu(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), type));
  return at::empty_strided_symint(sizes, strides, like.options().dtype(type));
}

// A contiguous tensor on the device of `like`.
inline Tensor empty_contiguous(const Tensor& like, c10::SymIntArrayRef sizes, at::ScalarType type) {
  c10::SymDimVector strides(sizes.size(), 1);
  for (size_t d = sizes.size(); d-- > 1;) strides[d - 1] = strides[d] * sizes[d].max(1);
  return empty_on_device_of(like, sizes, strides, type);
}

// A dense tensor like `like`, but with `cols` columns of `type`. Columns are innermost, because kernels write
// rows; the other dimensions keep the memory order that they have in `like`, as in empty_like.
inline Tensor empty_ordered_as(const Tensor& like, const SymInt& cols, at::ScalarType type) {
  const auto strides = like.sym_strides(), sizes = like.sym_sizes();
  const int outer = static_cast<int>(like.dim()) - 1;
  c10::SmallVector<int, 3> order(outer);  // innermost first
  for (int i = 0; i < outer; ++i) order[i] = outer - 1 - i;
  for (int i = 1; i < outer; ++i)
    for (int at = i, j = i - 1; j >= 0; --j) {
      // An expanded dimension has stride 0, which gives no order: it stays in its place.
      if (strides[order[at]] == 0 || strides[order[j]] == 0) continue;
      if (strides[order[j]] <= strides[order[at]]) break;
      std::swap(order[j], order[at]);
      at = j;
    }
  c10::SymDimVector shape(sizes.begin(), sizes.end()), dense(sizes.size(), 1);
  shape[outer] = cols;
  SymInt stride = cols.max(1);
  for (const int d : order) {
    dense[d] = stride;
    stride *= shape[d].max(1);
  }
  return empty_on_device_of(like, shape, dense, type);
}

// The shape of row statistics: (batch, num_heads_q, seqlen_q), packed (num_heads_q, total_q).
inline c10::SymDimVector sizes_of_rows(const Tensor& q) {
  if (is_packed(q)) return {q.sym_size(1), q.sym_size(0)};
  return {q.sym_size(0), q.sym_size(1), q.sym_size(2)};
}

// In the order of the schemas.
using ForwardTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using BackwardTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// Fills a dimension from position `end` on: tokens of no sequence. GPU kernels fill theirs.
inline void fill_rest(const Tensor& t, int64_t dim, int64_t end, double value) {
  if (end < t.size(dim)) t.narrow(dim, end, t.size(dim) - end).fill_(value);
}

// Zeroes the gradients of tokens of no sequence; with seqused_k, all of dk and dv, because unused keys lie
// between used ones.
inline void fill_unused(const BackwardParams& p, const Tensor& dq, const Tensor& dk, const Tensor& dv) {
  const Sequence& end = p.packed.sequences[p.batch];
  fill_rest(dq, 0, end.first_q, 0);
  for (const Tensor& t : {dk, dv}) fill_rest(t, 0, p.packed.seqused_k ? 0 : end.first_k, 0);
}

// The results of forward: out and the row statistics.
struct ForwardResults {
  Tensor out, lse, row_max, row_sum;

  ForwardResults(const Tensor& q, const SymInt& head_dim_v) : out(empty_ordered_as(q, head_dim_v, q.scalar_type())) {
    const c10::SymDimVector rows = sizes_of_rows(q);
    for (Tensor* t : {&lse, &row_max, &row_sum}) *t = empty_contiguous(q, rows, row_dtype(q.scalar_type()));
  }

  void fill_rows(ForwardParams& p) const {
    p.lse = lse.mutable_data_ptr(), p.row_max = row_max.mutable_data_ptr(), p.row_sum = row_sum.mutable_data_ptr();
  }

  // Packed queries after the last sequence see no key: out 0, lse -inf.
  void fill_unused(const ForwardParams& p) const {
    const int64_t end = p.packed.sequences[p.batch].first_q;
    fill_rest(out, 0, end, 0), fill_rest(row_sum, 1, end, 0);
    for (const Tensor& t : {lse, row_max}) fill_rest(t, 1, end, -std::numeric_limits<double>::infinity());
  }

  ForwardTensors all() const { return {out, lse, row_max, row_sum}; }
};

// The results of backward beside dq, dk and dv; undefined where not wanted. Kernels write all but dbias in
// row_sum's dtype.
struct OptionGradients {
  optional<Tensor> slopes, sinks, relative;  // as given
  Tensor dbias, dslopes, dsinks, drelative;

  OptionGradients(const Options& options, const Wanted& wanted, at::ScalarType rows)
      : slopes(options.alibi_slopes), sinks(options.sinks), relative(options.relative_bias) {
    if (wanted[0]) dbias = empty_contiguous(*options.bias, options.bias->sym_sizes(), options.bias->scalar_type());
    if (wanted[1]) dslopes = empty_contiguous(*options.alibi_slopes, options.alibi_slopes->sym_sizes(), rows);
    if (wanted[2]) dsinks = empty_contiguous(*options.sinks, options.sinks->sym_sizes(), rows);
    if (wanted[3]) drelative = empty_contiguous(*options.relative_bias, options.relative_bias->sym_sizes(), rows);
  }

  void fill_rows(BackwardParams& p) const {
    if (dslopes.defined()) p.dslopes = dslopes.mutable_data_ptr();
    if (dsinks.defined()) p.dsinks = dsinks.mutable_data_ptr();
    if (drelative.defined()) p.drelative = drelative.mutable_data_ptr();
  }

  BackwardTensors with(Tensor dq, Tensor dk, Tensor dv) const {
    return {std::move(dq),
            std::move(dk),
            std::move(dv),
            dbias,
            dslopes.defined() ? dslopes.to(slopes->scalar_type()) : dslopes,
            dsinks.defined() ? dsinks.to(sinks->scalar_type()) : dsinks,
            drelative.defined() ? drelative.to(relative->scalar_type()) : drelative};
  }
};

}  // namespace pyattn
