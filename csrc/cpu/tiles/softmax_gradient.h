// The gradient of softmax: dS = P (dP - delta + dlse), over tiles [keys][queries] with
// queries on the lanes. Scores and row terms are passed by value, as in softmax.h.
#pragma once

#include "cpu/products/matrix.h"
#include "cpu/products/pack.h"
#include "cpu/products/register_product.h"
#include "cpu/simd/simd.h"
#include "cpu/tiles/strips.h"
#include "shared/heads.h"

namespace pyattn::PYATTN_ISA {
namespace {

// Row statistics of forward, and the terms that backward derives from them, of a block of rows: [queries] each.
template <class T>
struct BlockTerms {
  const T *row_max, *inverse_sum;  // largest entry of S; 1 / row_sum, 0 for rows whose weights are all 0
  const T* one_block;              // 1 for rows whose keys all lie in one key block, else 0
  const T* sink;                   // weight of the sink: it and the keys' weights add up to 1
  T *delta, *dlse;                 // rowsum(P * dP); gradient of lse
};

// The weight of a row's sink: exp(sink - row_max) / row_sum.
template <class T, class Score>
T sink_weight(const ForwardParams& p, const Head& head, int64_t r, Score score) {
  if (!p.score.sinks) return 0;
  const T sink = static_cast<const T*>(p.score.sinks)[head.query_head(r)];
  if (sink == kNegInf<T>) return 0;
  const int64_t at = head.index(p, r);
  const T row_max = static_cast<const T*>(p.row_max)[at], row_sum = static_cast<const T*>(p.row_sum)[at];
  return score.exp(set1(score.from_score(sink) - row_max))[0] / row_sum;
}

// The terms of a row, as in BlockTerms; all 0 if it adds nothing to any gradient.
template <class T>
struct RowTerms {
  T row_max, inverse_sum, sink, delta, dlse;
  bool adds;     // anything to a gradient
  bool at_once;  // delta comes from its weights
};

// Whether row r adds 0 to every gradient although its weights are 0 / 0, because all its visible keys score -inf: its
// out and lse have gradients of 0, as those of a row that was merged with weight 0. Any other such row adds NaN.
template <class S>
[[gnu::noinline]] bool adds_nothing(const BackwardParams& p, const Head& head, int64_t r) {
  using T = Compute<S>;
  return !(p.dlse && static_cast<const T*>(p.dlse)[head.index(p, r)] != 0) &&
         all_zero(head.row<const S>(p.dout, r), p.head_dim_v);
}

// The terms of row r, which sees some key. at_once: all its weights are at hand in one tile.
template <class S, class Score>
RowTerms<Compute<S>> terms_of_row(const BackwardParams& p, const Head& head, int64_t r, bool at_once,
                                  const Score& score) {
  using T = Compute<S>;
  const int64_t at = head.index(p, r);
  const T row_max = static_cast<const T*>(p.row_max)[at], row_sum = static_cast<const T*>(p.row_sum)[at];
  const bool defined = row_sum != 0 && row_max != kNegInf<T>;
  if (!defined && adds_nothing<S>(p, head, r)) return {};
  return {row_max,
          1 / row_sum,
          at_once ? sink_weight<T>(p, head, r, score) : T(0),
          at_once ? T(0) : dot_row(head.row<const S>(p.dout, r), head.row<const S>(p.out, r), p.head_dim_v),
          p.dlse ? static_cast<const T*>(p.dlse)[at] : T(0),
          true,
          at_once};
}

// Whether some row of the strip has all its keys in one key block.
template <class T>
bool any_one_block(Strip strip, BlockTerms<T> rows) {
  bool any = false;
  for (int64_t j = strip.j0; j < strip.j1; ++j) any |= rows.one_block[j] != 0;
  return any;
}

// S -> P = exp(S - row_max) * inverse_sum in place. Rows whose keys all lie in the tile get
//
//   delta = rowsum(P * dP) / rowsum(P)      dlse -= rowsum(P * (dP - delta)) / rowsum(P)
//
// as in softmax's own gradient, with the sink as one more key, whose dP is 0. This keeps the
// rounding errors of row_sum, of O and of delta itself, which rowsum(dO * O) carries, out of dS.
// The other rows keep their delta.
template <bool kMasked, class T, class Score>
void center(Matrix<T> S, Matrix<T> dP, Strip strip, const LaneMask<T>& seen, Score score, BlockTerms<T> rows) {
  for (int64_t j = strip.j0; j < strip.j1; j += kLanes<T>) {
    vec<T> weighted = {}, total = load(rows.sink + j);
    for (int64_t k = strip.begin; k < strip.end; ++k) {
      keep_awake(k);
      T* s = S.from(k).data + j;
      vec<T> p = score.exp(load(s) - load(rows.row_max + j)) * load(rows.inverse_sum + j);
      vec<T> dp = load(dP.from(k).data + j);
      if constexpr (kMasked) {
        const auto sees = seen.sees(k, j);
        p = sees ? p : vec<T>{}, dp = sees ? dp : vec<T>{};
      }
      weighted = fma(p, dp, weighted), total += p;
      store(s, p);
    }
    auto chosen = load(rows.one_block + j) != vec<T>{};
    if constexpr (kMasked) chosen = chosen & seen.sees_any(j);
    const vec<T> delta = chosen ? weighted / total : load(rows.delta + j);
    vec<T> rest = -load(rows.sink + j) * delta;
    for (int64_t k = strip.begin; k < strip.end; ++k) {
      const vec<T> more = fma(load(S.from(k).data + j), load(dP.from(k).data + j) - delta, rest);
      if constexpr (kMasked)
        rest = seen.sees(k, j) ? more : rest;
      else
        rest = more;
    }
    store(rows.delta + j, delta);
    store(rows.dlse + j, load(rows.dlse + j) - (chosen ? rest / total : vec<T>{}));
  }
}

// dP -> dS = P (dP - delta + dlse) in place.
template <bool kMasked, class T>
void scale_centered(Matrix<T> P, Matrix<T> dP, Strip strip, const LaneMask<T>& seen, BlockTerms<T> rows) {
  for (int64_t k = strip.begin; k < strip.end; ++k)
    for (int64_t j = strip.j0; j < strip.j1; j += kLanes<T>) {
      T* ds = dP.data + k * dP.row + j;
      vec<T> d = load(P.data + k * P.row + j) * (load(ds) - load(rows.delta + j) + load(rows.dlse + j));
      if constexpr (kMasked) d = seen.sees(k, j) ? d : vec<T>{};
      store(ds, d);
    }
}

// S -> P = exp(S - row_max) * inverse_sum and dP -> dS = P (dP - delta + dlse), both in place.
template <bool kMasked, class T, class Score>
void softmax_gradient(Matrix<T> S, Matrix<T> dP, Strip strip, const LaneMask<T>& seen, Score score,
                      BlockTerms<T> rows) {
  if (any_one_block(strip, rows)) {
    center<kMasked>(S, dP, strip, seen, score, rows);
    scale_centered<kMasked>(S, dP, strip, seen, rows);
    return;
  }
  for (int64_t k = strip.begin; k < strip.end; ++k) {
    keep_awake(k);
    for (int64_t j = strip.j0; j < strip.j1; j += kLanes<T>) {
      T *s = S.data + k * S.row + j, *ds = dP.data + k * dP.row + j;
      vec<T> p = score.exp(load(s) - load(rows.row_max + j)) * load(rows.inverse_sum + j);
      vec<T> d = p * (load(ds) - load(rows.delta + j) + load(rows.dlse + j));
      if constexpr (kMasked) {
        const auto sees = seen.sees(k, j);
        p = sees ? p : vec<T>{}, d = sees ? d : vec<T>{};
      }
      store(s, p);
      store(ds, d);
    }
  }
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
