// float64, for checks of gradients, where speed does not matter: a warp takes a row, or a key,
// and computes one dot product after the other, with the columns on its lanes. (The kernels are
// templates over a type that is always double, so other dtypes do not compile them.)
#pragma once

#include "cuda/plan/bias_items.h"
#include "cuda/tiles/dropout.h"
#include "cuda/products/fragment.h"
#include "cuda/ptx/primitives.h"
#include "cuda/tiles/relative_bias.h"
#include "cuda/passes/relative_gradient.h"
#include "cuda/passes/row_terms.h"
#include "cuda/tiles/score.h"
#include "cuda/plan/sequences.h"
#include "cuda/tiles/softmax_gradient.h"
#include "cuda/plan/workspace.h"
#include "shared/mask.h"

namespace pyattn::cuda {
namespace {

inline constexpr int kFloat64Warps = 4, kFloat64Threads = kFloat64Warps * kWarpLanes;

// A lane's part of a row of up to 256 columns: columns lane, lane + 32, ...
inline constexpr int kLaneColumns = 256 / kWarpLanes;
struct LaneRow {
  double column[kLaneColumns] = {};

  PYATTN_DEVICE LaneRow() {}
  PYATTN_DEVICE LaneRow(const double* row, int64_t cols) {
    for (int i = 0; i < kLaneColumns; ++i)
      if (lane() + i * kWarpLanes < cols) column[i] = row[lane() + i * kWarpLanes];
  }

  PYATTN_DEVICE void store(double* row, int64_t cols, double scale) const {
    for (int i = 0; i < kLaneColumns; ++i)
      if (lane() + i * kWarpLanes < cols) row[lane() + i * kWarpLanes] = column[i] * scale;
  }

  PYATTN_DEVICE void add(double factor, const LaneRow& other) {
    for (int i = 0; i < kLaneColumns; ++i) column[i] += factor * other.column[i];
  }

  PYATTN_DEVICE double dot(const LaneRow& other) const {
    double sum = 0;
    for (int i = 0; i < kLaneColumns; ++i) sum += column[i] * other.column[i];
    return sum_lanes(sum);
  }
};

// A key and its value.
struct LaneKey {
  LaneRow k, v;

  PYATTN_DEVICE LaneKey(const ForwardParams& p, const Head& head, int64_t j)
      : k(head.key<const double>(p.k, j), p.head_dim), v(head.key<const double>(p.v, j), p.head_dim_v) {}
};

// The number of this warp's row, or key, among all of them.
PYATTN_DEVICE int64_t item_of_warp() { return block_index() * kFloat64Warps + warp(); }

// The dropout factor of row r and key j.
PYATTN_DEVICE double dropout_factor(const ForwardParams& p, const Head& head, int64_t r, int64_t j) {
  if (!p.dropout.threshold) return 1;
  const bool kept = draw_kept(p, {p, head.b}, head, r, j) >> j % kDrawKeys & 1;
  return kept ? 65536.0 / (65536 - p.dropout.threshold) : 0;
}

template <class S, class Score>
PYATTN_KERNEL(kFloat64Threads)
float64_forward(const __grid_constant__ ForwardParams p) {
  const Item item = row_at(p, item_of_warp());
  if (!item.there) return;
  const Head head(p, item.head);
  const int64_t r = item.place;
  const Mask mask(p, head);
  const Range visible = mask.exact_keys_of<S>(r);
  const Score score(p);
  const LaneRow q(head.row<const double>(p.q, r), p.head_dim);
  LaneRow out;
  double row_max = kNegInf, row_sum = 0;
  for (int64_t j = visible.begin; j < visible.end; ++j) {
    if (!mask.sees<S>(r, j)) continue;
    const double s = score.at(head, r, j, q.dot({head.key<const double>(p.k, j), p.head_dim})).score;
    const double most = s > row_max ? s : row_max, shift = most == kNegInf ? 0 : most;
    const double decay = exp(row_max - shift), weight = exp(s - shift);
    row_max = most, row_sum = row_sum * decay + weight;
    for (double& x : out.column) x *= decay;
    out.add(weight * dropout_factor(p, head, r, j), {head.key<const double>(p.v, j), p.head_dim_v});
  }
  double decay = 1, sink = kNegInf;
  if (p.score.sinks) {
    sink = static_cast<const double*>(p.score.sinks)[head.query_head(r)];
    const double most = sink > row_max ? sink : row_max, shift = most == kNegInf ? 0 : most;
    decay = exp(row_max - shift), row_max = most, row_sum = row_sum * decay + exp(sink - shift);
  }
  out.store(head.row<double>(p.out, r), p.head_dim_v, visible.empty() ? 0 : decay / row_sum);
  if (lane() != 0) return;
  const int64_t at = head.index(p, r);
  static_cast<double*>(p.row_max)[at] = row_max, static_cast<double*>(p.row_sum)[at] = row_sum;
  static_cast<double*>(p.lse)[at] = visible.empty() ? sink : row_max + log(row_sum);
}

// A row in backward, and its weight and gradients for one key.
struct RowGradient {
  const BackwardParams& p;
  Head head;
  int64_t r;
  LaneRow q, dout;
  double row_max, row_sum, delta;  // delta = rowsum(dO * O) - dlse
  double weight, dscore, dproduct;

  PYATTN_DEVICE RowGradient(const BackwardParams& p, const Head& head, int64_t r)
      : p(p),
        head(head),
        r(r),
        q(head.row<const double>(p.q, r), p.head_dim),
        dout(head.row<const double>(p.dout, r), p.head_dim_v) {
    const int64_t at = head.index(p, r);
    row_max = static_cast<const double*>(p.row_max)[at], row_sum = static_cast<const double*>(p.row_sum)[at];
    const double dlse = p.dlse ? static_cast<const double*>(p.dlse)[at] : 0;
    delta = dout.dot({head.row<const double>(p.out, r), p.head_dim_v}) - dlse;
    if (adds_nothing<double>(p, head, r, row_max, row_sum, dlse)) row_max = 0, row_sum = 1, delta = 0;
  }

  template <class Score>
  PYATTN_DEVICE void meet(const Score& score, int64_t j, const LaneKey& key) {
    const auto s = score.at(head, r, j, q.dot(key.k));
    const double p_ij = exp(s.score - row_max) / row_sum, factor = dropout_factor(p, head, r, j);
    weight = p_ij * factor, dscore = p_ij * (dout.dot(key.v) * factor - delta), dproduct = dscore * s.derivative;
  }

  PYATTN_DEVICE double sink_term() const {
    const double sink = static_cast<const double*>(p.score.sinks)[head.query_head(r)];
    return sink == kNegInf ? 0 : exp(sink - row_max) / row_sum * -delta;
  }
};

template <class S, class Score>
PYATTN_KERNEL(kFloat64Threads)
float64_backward_queries(const __grid_constant__ BackwardParams p) {
  const Item item = row_at(p, item_of_warp());
  if (!item.there) return;
  const Head head(p, item.head);
  const int64_t r = item.place;
  const Mask mask(p, head);
  const Range visible = mask.keys_of(r);
  const Score score(p);
  RowGradient row(p, head, r);
  LaneRow dq;
  double slope_term = 0, end_terms[2] = {};
  for (int64_t j = visible.begin; j < visible.end; ++j) {
    if (!mask.sees<S>(r, j)) continue;
    const LaneKey key(p, head, j);
    row.meet(score, j, key);
    dq.add(row.dproduct, key.k);
    slope_term += row.dscore * minus_distance(p, head, r, j);
    if (!p.drelative) continue;
    const RelativeRow<double> bias(p, head, r, j);
    if (bias.at_first(0))
      end_terms[0] += row.dscore;
    else if (bias.at_last(0))
      end_terms[1] += row.dscore;
  }
  dq.store(head.row<double>(p.dq, r), p.head_dim, score.dscale());
  if (lane() != 0) return;
  if (p.dslopes) slope_terms_of<double>(p)[head.index(p, r)] = slope_term;
  if (p.dsinks) sink_terms_of<double>(p)[head.index(p, r)] = row.sink_term();
  if (p.drelative)
    for (int end = 0; end < 2; ++end) end_terms_of<double>(p, end)[head.index(p, r)] = end_terms[end];
}

template <class S, class Score>
PYATTN_KERNEL(kFloat64Threads)
float64_backward_keys(const __grid_constant__ BackwardParams p) {
  const Item item = key_at(p, item_of_warp());
  if (!item.there) return;
  const Head head(p, item.head);
  const int64_t j = item.place;
  const LaneKey key(p, head, j);
  const Mask mask(p, head);
  const Range rows = mask.rows_of_any(j, 1);
  const Score score(p);
  LaneRow dk, dv;
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    if (!mask.sees<S>(r, j)) continue;
    RowGradient row(p, head, r);
    row.meet(score, j, key);
    dk.add(row.dproduct, row.q), dv.add(row.weight, row.dout);
  }
  dk.store(head.key<double>(p.dk, j), p.head_dim, score.dscale());
  dv.store(head.key<double>(p.dv, j), p.head_dim_v, 1);
}

// A warp computes an element of dbias, a sum over all scores that it stands for.
template <class S, class Score>
PYATTN_KERNEL(kFloat64Threads)
float64_backward_bias(const __grid_constant__ BackwardParams p) {
  const int64_t at = block_index() * kFloat64Warps + warp();
  const BiasItems<1, 1> elements(p);
  if (at >= elements.count()) return;
  const BiasItem own(p, elements, at);
  const Score score(p);
  double sum = 0;
  for (int64_t b = own.sequences.begin; b < own.sequences.end; ++b)
    for (int64_t h = own.heads.begin; h < own.heads.end; ++h) {
      const int64_t group = group_size(p);
      const Head head(p, b * p.num_heads_kv + h / group);
      const Mask mask(p, head);
      for (int64_t i = own.queries.begin; i < own.queries.end; ++i)
        for (int64_t j = own.keys.begin; j < own.keys.end; ++j) {
          const int64_t r = i * group + h % group;
          if (!mask.sees<S>(r, j)) continue;
          RowGradient row(p, head, r);
          row.meet(score, j, {p, head, j});
          sum += row.dscore;
        }
    }
  if (lane() == 0) with_gradients<S>(p.dbias, [&](auto* to) { to[own.offset(p.dbias)] = sum; });
}

// A warp computes the sum on a diagonal of a query head.
template <class S, class Score>
PYATTN_KERNEL(kFloat64Threads)
float64_backward_relative(const __grid_constant__ BackwardParams p) {
  const int64_t at = item_of_warp();
  const Bands<1> all(p);
  if (at >= all.count(p)) return;
  const Band<1> own(p, all, at);
  const int64_t group = group_size(p);
  const Head head(p, own.b * p.num_heads_kv + own.h / group);
  const Mask mask(p, head);
  const Range band = own.diagonals(mask), queries = queries_on(band, head);
  if (band.empty()) return;
  const Score score(p);
  double sum = 0;
  for (int64_t i = queries.begin; i < queries.end; ++i) {
    const int64_t r = i * group + own.h % group, j = i + band.begin;
    if (!mask.sees<S>(r, j)) continue;
    RowGradient row(p, head, r);
    row.meet(score, j, {p, head, j});
    sum += row.dscore;
  }
  if (lane() == 0) diagonals_of<double>(p, head, own.h)[band.begin] = sum;
}

}  // namespace
}  // namespace pyattn::cuda
