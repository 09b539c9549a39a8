// Gradients of the sinks, the ALiBi slopes and the relative bias, computed after backward.
#pragma once

#include "cpu/passes/stopwatch.h"
#include "cpu/plan/shares.h"
#include "cpu/products/pack.h"
#include "cpu/products/scratch.h"
#include "cpu/simd/simd.h"
#include "cpu/tiles/relative_bias.h"
#include "cpu/tiles/softmax_gradient.h"
#include "shared/mask.h"

namespace pyattn::PYATTN_ISA {
namespace {

inline Plan plan_head_gradients(const BackwardParams& p) { return {p.dsinks || p.dslopes ? p.num_heads_q : 0, 0, 0}; }

// The gradient of a head's sink, summed over the rows that the sink joins:
//
//   dsink = sum of exp(sink - row_max) / row_sum * (dlse - delta)      delta = rowsum(dO * O)
template <class S, class Score>
double sink_gradient(const BackwardParams& p, int64_t h, Score score) {
  using T = Compute<S>;
  double sum = 0;
  const int64_t group = group_size(p);
  const int64_t each = sequences_each(p);
  for (int64_t n = 0; n < p.batch * each; ++n) {
    const Head head(p, (n / each * p.num_heads_kv + h / group) * each + n % each);
    const Mask mask(p, head);
    for (int64_t r = h % group; r < head.count; r += group) {
      const T weight = sink_weight<T>(p, head, r, score);
      if (weight == 0) continue;
      const T dlse = p.dlse ? static_cast<const T*>(p.dlse)[head.index(p, r)] : T(0);
      const bool sees_any = p.part || !mask.exact_keys_of<S>(r).empty();
      const T delta =
          sees_any ? dot_row(head.row<const S>(p.dout, r), head.row<const S>(p.out, r), p.head_dim_v) : T(0);
      sum += static_cast<double>(weight) * (static_cast<double>(dlse) - delta);
    }
  }
  return sum;
}

// Adds up the shares that the work items of backward left for the slope of head h, over the given sequences.
template <class S>
double slope_gradient(const BackwardParams& p, int64_t h, Range sequences) {
  const int64_t group = group_size(p);
  double sum = 0;
  for (int64_t b = sequences.begin; b < sequences.end; ++b) {
    const Head head(p, b * p.num_heads_kv + h / group);
    const int64_t splits = splits_of(p, head.seqlen_q, head.seqlen_k).count;
    for (int64_t split = 0; split < splits; ++split) sum += sums_of<S>(p, head, split).slopes[h % group];
  }
  return sum;
}

// Each work item is one query head.
template <class S, template <class> class Score>
void head_gradients(const BackwardParams& p, int64_t begin, int64_t end, void*) {
  using T = Compute<S>;
  const Score<S> score(p);
  Stopwatch watch(p.cpu.counts);
  for (int64_t h = begin; h < end; ++h) {
    if (p.dsinks) static_cast<T*>(p.dsinks)[h] = static_cast<T>(sink_gradient<S>(p, h, score));
    if (!p.dslopes) continue;
    T* dslopes = static_cast<T*>(p.dslopes) + h;
    if (p.score.slopes_stride_b == 0)
      *dslopes = static_cast<T>(slope_gradient<S>(p, h, {0, p.batch}));
    else
      for (int64_t b = 0; b < p.batch; ++b)
        dslopes[b * p.score.slopes_stride_b] = static_cast<T>(slope_gradient<S>(p, h, {b, b + 1}));
  }
  watch.lap(Phase::kStore);
}

// Each work item is one row of the relative bias, of a sequence and a query head, or of all that share it.
inline Plan plan_relative_gradient(const BackwardParams& p) {
  if (!p.drelative) return {};
  const int64_t rows = (p.score.relative_stride_b ? p.batch : 1) * (p.score.relative_stride_h ? p.num_heads_q : 1);
  return {rows, (2 * p.score.reach + 1) * static_cast<int64_t>(sizeof(double)), 0};
}

// Adds up the shares that the work items of backward left, in one order.
template <class S>
void relative_gradient(const BackwardParams& p, int64_t begin, int64_t end, void* scratch) {
  using T = Compute<S>;
  const int64_t reach = p.score.reach, count = 2 * reach + 1, group = group_size(p);
  const int64_t heads = p.score.relative_stride_h ? p.num_heads_q : 1;
  auto* const sums = static_cast<double*>(scratch);
  Stopwatch watch(p.cpu.counts);
  for (int64_t i = begin; i < end; ++i) {
    const Range sequences = p.score.relative_stride_b ? Range{i / heads, i / heads + 1} : Range{0, p.batch};
    const Range own = p.score.relative_stride_h ? Range{i % heads, i % heads + 1} : Range{0, p.num_heads_q};
    fill_zero(sums, count);
    for (int64_t b = sequences.begin; b < sequences.end; ++b)
      for (int64_t h = own.begin; h < own.end; ++h) {
        const Head head(p, b * p.num_heads_kv + h / group);
        const DistanceRange range(p, head);
        const int64_t each = count_distances(p, head.seqlen_q, head.seqlen_k);
        const int64_t shares = splits_of(p, head.seqlen_q, head.seqlen_k).count;
        for (int64_t i_share = 0; i_share < shares; ++i_share) {
          const double* const share = sums_of<S>(p, head, i_share).relative + h % group * each;
          for (int64_t n = 0; n < min(each, range.last - range.first + 1); ++n)
            sums[range.first + reach + n] += share[n];
        }
      }
    T* const values = static_cast<T*>(p.drelative) + i * count;
    for (int64_t n = 0; n < count; ++n) values[n] = static_cast<T>(sums[n]);
  }
  watch.lap(Phase::kStore);
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
