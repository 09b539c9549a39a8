// Softmax of a warp's rows, elementwise between the products of forward.
#pragma once

#include "cuda/plan/forward_splits.h"
#include "cuda/products/fragment.h"
#include "cuda/ptx/primitives.h"
#include "cuda/products/product.h"
#include "cuda/tiles/score.h"
#include "shared/mask.h"

namespace pyattn::cuda {
namespace {

// Reduces x by f over the four lanes that share a row of sums.
template <class F>
PYATTN_DEVICE float reduce_row(float x, F f) {
  x = f(x, shuffle_xor(x, 1));
  return f(x, shuffle_xor(x, 2));
}

// Includes the sink in a row's maximum and sum; the lane that `writes` stores them with lse. Returns the
// factor that the row's output is still to be multiplied by: 0 / 0 where all visible keys score -inf, as in
// softmax, but 0 where no key is visible.
template <class Score>
PYATTN_DEVICE float finish_row(const ForwardParams& p, const Head& head, const Score& score, int64_t r, bool sees,
                               float row_max, float row_sum, bool writes) {
  float most = row_max, sum = row_sum, decay = 1, sink = kNegInf;
  bool largest = false;  // whether the sink is the largest score
  if (p.score.sinks) {
    sink = static_cast<const float*>(p.score.sinks)[head.query_head(r)];
    const float at_sink = score.from_sink(sink);
    largest = at_sink >= most;
    if (at_sink > most) decay = score.exp(most, score.shift(at_sink)), most = at_sink;
    sum = sum * decay + score.weight_of_sink(at_sink, most);
  }
  if (writes) {
    const int64_t at = head.index(p, r);
    static_cast<float*>(p.row_max)[at] = most, static_cast<float*>(p.row_sum)[at] = sum;
    static_cast<float*>(p.lse)[at] = !sees ? sink : largest ? sink + logf(sum) : score.lse(most, sum);
  }
  return sees ? decay / sum : 0;
}

// Online softmax (Milakov and Gimelshein 2018) of the lane's
// rows: [m][half] is row 16 m + 8 half + lane / 4 of the warp.
template <int kM>
struct SoftmaxState {
  float row_max[kM][2];
  float row_sum[kM][2];  // over the lane's own columns, until finish
  float decay[kM][2];

  PYATTN_DEVICE SoftmaxState() {
#pragma unroll
    for (int m = 0; m < kM; ++m)
      for (int half = 0; half < 2; ++half) row_max[m][half] = kNegInf, row_sum[m][half] = 0;
  }

  // S[rows][keys] -> P = exp(S - row_max) in place. Rescales row_sum to the new row maximum, and leaves the factors that O
  // is to be multiplied by.
  template <class Score, int kN>
  PYATTN_DEVICE void update(const Score& score, Sums<kM, kN>& S) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float most = row_max[m][half];  // fmaxf skips a NaN, but its P, and so the sum, is NaN
#pragma unroll
        for (int n = 0; n < kN; ++n) most = fmaxf(fmaxf(most, S[m][n][2 * half]), S[m][n][2 * half + 1]);
        most = reduce_row(most, [](float x, float y) { return fmaxf(x, y); });
        const float shift = score.shift(most);
        decay[m][half] = score.exp(row_max[m][half], shift);
        float sum = 0;
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) sum += S[m][n][i] = score.exp(S[m][n][i], shift);
        row_max[m][half] = most, row_sum[m][half] = row_sum[m][half] * decay[m][half] + sum;
      }
  }

  // Multiplies O[rows][columns] by the last update's factors.
  template <int kCols>
  PYATTN_DEVICE void rescale(Sums<kM, kCols>& O) const {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kCols; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) O[m][n][i] *= decay[m][i / 2];
  }

  // Finishes the rows from r0 on: row_sum becomes the factor that their output is still to be multiplied by.
  template <class S, class Score>
  PYATTN_DEVICE void finish(const ForwardParams& p, const Mask& mask, const Score& score, int r0) {
    unsigned sees_any = 0;  // a bit for each of the lane's rows
#pragma unroll 1
    for (int at = 0; at < 2 * kM; ++at) {
      const int64_t r = min(r0 + 8 * at + lane() / 4, mask.head.count - 1);
      sees_any |= static_cast<unsigned>(!mask.exact_keys_of<S>(r).empty()) << at;
    }
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float sum = reduce_row(row_sum[m][half], [](float x, float y) { return x + y; });
        const int r = r0 + 16 * m + 8 * half + lane() / 4;
        if (r >= mask.head.count) continue;
        const bool sees = sees_any >> (2 * m + half) & 1;
        row_sum[m][half] = finish_row(p, mask.head, score, r, sees, row_max[m][half], sum, lane() % 4 == 0);
      }
  }

  // Stores maximum and sum of the rows from r0 on for merge_splits.
  PYATTN_DEVICE void leave(const SplitResults& results, int64_t split, int r0) const {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float sum = reduce_row(row_sum[m][half], [](float x, float y) { return x + y; });
        const int r = r0 + 16 * m + 8 * half + lane() / 4;
        if (r < results.rows && lane() % 4 == 0) results.stats_of(split, r) = {row_max[m][half], sum};
      }
  }
};

}  // namespace
}  // namespace pyattn::cuda
