// Softmax: the elementwise passes between the two products, and what follows the second one. They run over tiles
// S[keys][queries] with queries on the lanes, so a reduction over keys needs no shuffle. Scores and row terms are passed
// by value: after every store, members of a reference would be loaded again.
#pragma once

#include "cpu/products/matrix.h"
#include "cpu/products/register_product.h"
#include "cpu/simd/math.h"
#include "cpu/tiles/strips.h"
#include "shared/mask.h"

namespace pyattn::PYATTN_ISA {
namespace {

// The state of online softmax (Milakov and Gimelshein 2018) for a block of queries. After each
// key block, row_max is the largest entry of S so far, row_sum is the sum of exp(S - row_max),
// and decay is the factor that rescales earlier sums to the new row_max.
template <class T>
struct SoftmaxState {
  alignas(kScratchAlign) T row_max[kBlockQ<T>], row_sum[kBlockQ<T>], decay[kBlockQ<T>];  // [queries]

  SoftmaxState() {
    for (int64_t i = 0; i < kBlockQ<T>; ++i) row_max[i] = kNegInf<T>, row_sum[i] = 0;
  }
};

// Returns the shift that exp subtracts: x, or 0 where x is -inf because no key was visible yet.
// -inf - -inf would be NaN; with 0, exp(-inf) is 0.
template <class T>
PYATTN_INLINE vec<T> finite_shift(vec<T> x) {
  return x == kNegInf<T> ? vec<T>{} : x;
}

// Joins the sums over two ranges of keys, before and after, which each range has divided by its largest weight. Invariant
// rows join their ranges one after another, so a range of masked keys changes nothing.
template <class T>
struct Join {
  vec<T> row_max, before, after;  // the larger maximum, and the factors of the sums

  template <class Score>
  PYATTN_MEMBER_INLINE Join(vec<T> max_before, vec<T> max_after, Score score) : row_max(max(max_after, max_before)) {
    const vec<T> shift = finite_shift<T>(row_max);
    before = score.exp(max_before - shift), after = score.exp(max_after - shift);
  }

  PYATTN_MEMBER_INLINE vec<T> sum(vec<T> x, vec<T> y) const { return fma(after, y, x * before); }
};

// Adds the sink to a row's maximum and sum, like one more key, and returns the factor that
// rescales earlier sums. It is not inlined, because most calls have no sinks.
template <class T, class Score>
[[gnu::noinline]] T add_sink(T sink, Score score, T& row_max, T& row_sum) {
  const T old_max = row_max;
  row_max = sink > old_max ? sink : old_max;
  const vec<T> shift = finite_shift<T>(set1(row_max));
  const T decay = score.exp(set1(old_max) - shift)[0];
  row_sum = row_sum * decay + score.exp(set1(sink) - shift)[0];
  return decay;
}

// Finishes `rows` rows, starting at r0, for forward and for merge: adds their sinks and writes
// row_max, row_sum and lse. scale[rows] returns the factor by which each row of O must still be
// multiplied. A row whose visible keys all score -inf divides 0 by 0, as softmax does. A row that
// sees no key gets factor 0; its lse is its sink if there are sinks. The arrays hold whole vectors.
template <class S, class T, class Score>
void finish_rows(const ForwardParams& p, const Mask& mask, int64_t r0, int64_t rows, T* row_max, T* row_sum, T* scale,
                 Score score) {
  constexpr int L = kLanes<T>;
  alignas(kScratchAlign) T lse[kBlockQ<T>];
  const T* sinks = static_cast<const T*>(p.score.sinks);
  for (int64_t i = 0; i < rows; ++i)
    scale[i] =
        sinks ? add_sink(score.from_score(sinks[mask.head.query_head(r0 + i)]), score, row_max[i], row_sum[i]) : T(1);
  for (int64_t i = 0; i < rows; i += L) {
    const vec<T> sum = load(row_sum + i);
    store(lse + i, score.to_score(load(row_max + i)) + log<T>(sum));
    store(scale + i, load(scale + i) / sum);
  }
  const bool all_see = !mask.keys_of_all(r0, rows, 0).empty() && !mask.any_holes(r0, rows);
  for (int64_t i = 0; i < rows && !all_see; ++i) {
    if (mask.sees_any<S>(r0 + i)) continue;
    scale[i] = 0;
    if (sinks) lse[i] = sinks[mask.head.query_head(r0 + i)];
  }
  const auto write = [&](void* statistics, const T* values) {
    T* to = static_cast<T*>(statistics);
    if (mask.head.group == 1)
      __builtin_memcpy(to + mask.head.index(p, r0), values, rows * sizeof(T));
    else
      for (int64_t i = 0; i < rows; ++i) to[mask.head.index(p, r0 + i)] = values[i];
  };
  write(p.row_max, row_max), write(p.row_sum, row_sum), write(p.lse, lse);
}

// Combines a head's parts, part(0) to part(splits - 1), each a DecodePart (plan/units.h), into out and the row statistics.
// The statistics of the parts become factors.
template <class S, class Score, class Parts>
[[gnu::noinline]] void merge_parts(const ForwardParams& p, const Head& head, const Score& score, int64_t splits,
                                   Parts part) {
  using T = Compute<S>;
  alignas(kScratchAlign) T row_max[kBlockQ<T>] = {}, row_sum[kBlockQ<T>] = {}, scale[kBlockQ<T>];
  for (int64_t r = 0; r < head.count; ++r) {
    row_max[r] = kNegInf<T>, row_sum[r] = 0;
    if (p.cpu.row_invariant) {
      for (int64_t split = 0; split < splits; ++split) {
        T &after = part(split).row_max[r], &before = part(split).row_sum[r];
        const Join<T> join(set1(row_max[r]), set1(after), score);
        row_max[r] = join.row_max[0], row_sum[r] = join.sum(set1(row_sum[r]), set1(before))[0];
        after = join.after[0], before = join.before[0];
      }
      continue;
    }
    for (int64_t split = 0; split < splits; ++split)
      row_max[r] = part(split).row_max[r] > row_max[r] ? part(split).row_max[r] : row_max[r];
    const vec<T> shift = finite_shift<T>(set1(row_max[r]));
    for (int64_t split = 0; split < splits; ++split) {
      T& weight = part(split).row_max[r];
      weight = score.exp(set1(weight) - shift)[0];
      row_sum[r] += weight * part(split).row_sum[r];
    }
  }
  finish_rows<S>(p, Mask(p, head), 0, head.count, row_max, row_sum, scale, score);
  for (int64_t r = 0; r < head.count; ++r) {
    S* out = head.row<S>(p.out, r);
    for (int64_t d = 0; d < p.head_dim_v; d += kLanes<T>) {
      vec<T> sum = {};
      for (int64_t split = 0; split < splits; ++split) {
        if (p.cpu.row_invariant) sum *= set1(part(split).row_sum[r]);
        sum = fma(set1(part(split).row_max[r]), load(part(split).O.from(r).data + d), sum);
      }
      if (p.cpu.row_invariant) sum += vec<T>{};  // as ForwardItem::clear_negative_zeros
      store(out + min(d, p.head_dim_v - kLanes<T>), sum * scale[r]);
    }
  }
}

// Where softmax leaves P: in place of S, or as pairs of keys, which begin with an even one, for the product with V.
struct InPlace {};
struct AsPairs {
  Matrix<bf16_pair> pairs;  // [terms(keys)][queries]
};

// S[keys][queries] -> P = exp(S - row_max), for kNV vectors
// of lanes starting at strip.j0. Updates the state of these lanes.
template <int kNV, bool kMasked, class T, class Score, class Weights>
void softmax_panel(Matrix<T> S, Strip strip, const LaneMask<T>& seen, Score score, SoftmaxState<T>& state,
                   [[maybe_unused]] Weights weights) {
  constexpr int L = kLanes<T>;
  const int64_t j0 = strip.j0;
  vec<T> old_max[kNV], new_max[kNV], shift[kNV], sum[kNV] = {};
  PYATTN_UNROLL(16)
  for (int v = 0; v < kNV; ++v) {
    new_max[v] = old_max[v] = load(state.row_max + j0 + v * L);
  }
  for (int64_t k = strip.begin; k < strip.end; ++k) {
    PYATTN_UNROLL(16)
    for (int v = 0; v < kNV; ++v) {
      vec<T> s = load(S.data + k * S.row + j0 + v * L);
      if constexpr (kMasked) s = seen.sees(k, j0 + v * L) ? s : set1(kNegInf<T>);
      new_max[v] = max(s, new_max[v]);  // max ignores a NaN, but its P and the sum still become NaN
    }
  }
  PYATTN_UNROLL(16)
  for (int v = 0; v < kNV; ++v) shift[v] = finite_shift<T>(new_max[v]);
  const auto weigh = [&](int64_t k, int v) PYATTN_MEMBER_INLINE {
    vec<T> p = score.exp(load(S.data + k * S.row + j0 + v * L) - shift[v]);
    if constexpr (kMasked) p = seen.sees(k, j0 + v * L) ? p : vec<T>{};
    sum[v] += p;
    return p;
  };
  if constexpr (std::is_same_v<Weights, InPlace>) {
    for (int64_t k = strip.begin; k < strip.end; ++k) {
      PYATTN_UNROLL(16)
      for (int v = 0; v < kNV; ++v) store(S.data + k * S.row + j0 + v * L, weigh(k, v));
    }
  } else {
    int64_t k = strip.begin;
    for (; k + 2 <= strip.end; k += 2) {
      keep_awake(k);
      PYATTN_UNROLL(16)
      for (int v = 0; v < kNV; ++v) {
        const vec<T> low = weigh(k, v), high = weigh(k + 1, v);
        store(weights.pairs.at(k / 2) + j0 + v * L, make_pairs(low, high));
      }
    }
    for (int v = 0; k < strip.end && v < kNV; ++v)
      store(weights.pairs.at(k / 2) + j0 + v * L, make_pairs(weigh(k, v), vec<T>{}));
  }
  PYATTN_UNROLL(16)
  for (int v = 0; v < kNV; ++v) {
    const int64_t j = j0 + v * L;
    const vec<T> decay = score.exp(old_max[v] - shift[v]);
    store(state.row_max + j, new_max[v]);
    store(state.row_sum + j, fma(load(state.row_sum + j), decay, sum[v]));
    store(state.decay + j, decay);
  }
}

// softmax_panel for all lanes of a strip.
template <bool kMasked, class T, class Score, class Weights = InPlace, int kNV = kMaxNV>
void softmax_strip(Matrix<T> S, Strip strip, const LaneMask<T>& seen, Score score, SoftmaxState<T>& state,
                   Weights weights = {}) {
  constexpr int64_t width = kNV * kLanes<T>;
  for (; strip.j0 + width <= strip.j1; strip.j0 += width)
    softmax_panel<kNV, kMasked>(S, strip, seen, score, state, weights);
  if constexpr (kNV > 1)
    if (strip.j0 < strip.j1) softmax_strip<kMasked, T, Score, Weights, kNV - 1>(S, strip, seen, score, state, weights);
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
