// Products of tiles by a warpgroup, each warp 16 of its 64 rows. Sums lie as in products by a warp.
#pragma once

#include <cstdint>

#include "cuda/products/fragment.h"
#include "cuda/products/matrix.h"
#include "cuda/ptx/primitives.h"

namespace pyattn::cuda {
namespace {

// Starts c = A B^T: the warpgroup's rows of A, among which the warp's begin at a_row; rows of B from 0 on.
template <class S, int kN, int kARows, int kBRows, int kCols>
PYATTN_DEVICE void start_rows(float (&c)[kN][4], SharedMatrix<S, kARows, kCols> A, int a_row,
                              SharedMatrix<S, kBRows, kCols> B) {
  static_assert(8 * kN == kBRows);
  constexpr int kBytes = kSlice * sizeof(S), kOfPanel = A.kPitch / kBytes;
  const SharedAddress a = shared_address(A.chunk(a_row / 64 * 64, 0)), b = shared_address(B.data);
#pragma unroll
  for (int s = 0; s < kCols / kSlice; ++s)
    multiply_shared<S>(c, a + s / kOfPanel * A.kPanel + s % kOfPanel * kBytes,
                       b + s / kOfPanel * B.kPanel + s % kOfPanel * kBytes, s > 0);
}

// Sums of an earlier product as left factors: the warp's 16 rows, slice by slice.
template <class S, int kSlices>
struct Factors {
  uint32_t slice[kSlices][4];

  PYATTN_DEVICE void take(const float (&w)[2 * kSlices][4]) {
#pragma unroll
    for (int k = 0; k < kSlices; ++k) {
      const Left<S> left = as_left<S>(w + 2 * k);
#pragma unroll
      for (int i = 0; i < 4; ++i) slice[k][i] = left.data[i];
    }
  }
};

// Starts c += w B, rows of B from 0 on.
template <class S, int kN, int kRows, int kCols>
PYATTN_DEVICE void start_sums(float (&c)[kN][4], const Factors<S, kRows / kSlice>& w, SharedMatrix<S, kRows, kCols> B) {
  static_assert(8 * kN == kCols);
  const SharedAddress b = shared_address(B.data);
#pragma unroll
  for (int k = 0; k < kRows / kSlice; ++k) multiply_columns<S>(c, w.slice[k], b + k * kSlice * B.kPitch, B.kPanel);
}

// Starts products by f() and waits for them. registers: their sums, and factors that are not in shared memory.
template <class F, class... T>
PYATTN_DEVICE void multiply_together(F f, T&... registers) {
  begin_products(registers...);
  f();
  end_group();
  wait_for_products<0>(registers...);
}

}  // namespace
}  // namespace pyattn::cuda
