// dQ += dS K in the pass over keys, for calls that need not be deterministic: each block of keys
// adds its share atomically to float sums in global memory, in whatever order blocks run, and a last
// pass scales and rounds them. For 16-bit types only: whoever chooses float wants its accuracy.
#pragma once

#include "cuda/products/fragment.h"
#include "cuda/ptx/primitives.h"
#include "cuda/products/product.h"
#include "cuda/products/matrix.h"
#include "cuda/plan/workspace.h"
#include "shared/heads.h"

namespace pyattn::cuda {
namespace {

// T[row][key] = W[key][row], rounded to S, for the warp's 16 kM keys from warp_key on.
template <class S, int kM, int kN, int kRows, int kKeys>
PYATTN_DEVICE void store_transposed(SharedMatrix<S, kRows, kKeys> T, const Sums<kM, kN>& W, int warp_key) {
  each_sum<kM, kN>([&](int m, int n, int i, int key, int row) { narrow(T.at(row, warp_key + key), W[m][n][i]); });
}

// sums[i][col] += (dS K)[i][col] for i < rows and col < cols; the warps take squares of 16 x 16
// in turn. finite: all of K is; otherwise a key counts only in rows whose dS is not 0.
template <int kWarps, class S, int kRows, int kKeys, int kDim>
PYATTN_DEVICE void add_queries(float* sums, int rows, int cols, SharedMatrix<S, kRows, kKeys> dS,
                               SharedMatrix<S, kKeys, kDim> K, bool finite) {
  if (!finite) {
#pragma unroll 1
    for (int at = thread_index(); at < rows * cols; at += kWarps * kWarpLanes) {
      const int i = at / cols, col = at % cols;
      float sum = 0;
#pragma unroll 1
      for (int j = 0; j < kKeys; ++j)
        if (const float ds = widen(dS.at(i, j)); ds != 0) sum = fmaf(ds, widen(K.at(j, col)), sum);
      add_atomically(sums + at, sum);
    }
    return;
  }
  constexpr int kSquares = kRows / 16 * (kDim / 16);
#pragma unroll 1
  for (int square = warp(); square < kSquares; square += kWarps) {
    const int row = square % (kRows / 16) * 16, first = square / (kRows / 16);
    const LeftCursor<S, SharedMatrix<S, kRows, kKeys>> left(dS, row);
    const SummedCursor<S, 1, SharedMatrix<S, kKeys, kDim>> right(K, 0);
    Sums<1, 2> C = {};
#pragma unroll
    for (int s = 0; s < kKeys / kSlice; ++s) {
      const Left<S> a = left.load(0, s);
      Right<S> b[2];
      right.load(b, s * kSlice, first);
      multiply(C[0][0], a, b[0]), multiply(C[0][1], a, b[1]);
    }
    each_sum<1, 2>([&](int, int n, int i, int r, int c) {
      const int at = row + r, col = 16 * first + c;
      if (at < rows && col < cols) add_atomically(sums + static_cast<int64_t>(at) * cols + col, C[0][n][i]);
    });
  }
}

inline constexpr int kRoundThreads = 256;

// dq = softmax_scale * sums.
template <class S>
PYATTN_KERNEL(kRoundThreads)
round_queries(const __grid_constant__ BackwardParams p) {
  const int64_t at = block_index() * kRoundThreads + thread_index();
  const int64_t row = at / p.head_dim, col = at % p.head_dim;
  if (row >= all_rows(p)) return;
  const int64_t count = (is_packed(p) ? p.packed.total_q : p.seqlen_q) * group_size(p);
  const Head head = is_packed(p) ? Head::of_tokens(p, row / count) : Head(p, row / count);
  const float x = query_sums_of(p, 0, 0)[at] * static_cast<float>(p.softmax_scale);
  with_written<S>(p, [&](auto type) { narrow(head.row<decltype(type)>(p.dq, row % count)[col], x); });
}

}  // namespace
}  // namespace pyattn::cuda
