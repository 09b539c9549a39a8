// Products of tiles by a warp: how fragments are read, and where the sums lie.
#pragma once

#include <cstdint>

#include "attention.h"
#include "cuda/products/fragment.h"
#include "cuda/ptx/primitives.h"
#include "cuda/products/matrix.h"

namespace pyattn::cuda {
namespace {

// ---- Fragments ----

// Loads left factors: 16 rows from the given one on, slice by slice.
template <class S, class T>
struct LeftCursor : Cursor<T> {
  PYATTN_DEVICE LeftCursor(T tile, int row) : Cursor<T>(tile, row + lane() % 16, lane() / 16) {}

  PYATTN_DEVICE Left<S> load(int rows, int s) const {
    Left<S> a;
    if constexpr (sizeof(S) == 4) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t words[4];
        load_matrices(words, this->at(rows, 2 * s + half));
#pragma unroll
        for (int i = 0; i < 4; ++i) split(float_of(words[i]), a.high[half][i], a.low[half][i]);
      }
    } else {
      load_matrices(a.data, this->at(rows, s));
    }
    return a;
  }
};

// Loads right factors: two times 8 rows as columns, slice by slice.
template <class S, class T>
struct RightCursor : Cursor<T> {
  PYATTN_DEVICE explicit RightCursor(T tile) : Cursor<T>(tile, lane() % 8 + lane() / 16 * 8, lane() / 8 % 2) {}

  PYATTN_DEVICE void load(Right<S> (&b)[2], int rows, int s) const {
    uint32_t words[4];
    if constexpr (sizeof(S) == 4) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        load_matrices(words, this->at(rows, 2 * s + half));
#pragma unroll
        for (int i = 0; i < 4; ++i) split(float_of(words[i]), b[i / 2].high[half][i % 2], b[i / 2].low[half][i % 2]);
      }
    } else {
      load_matrices(words, this->at(rows, s));
      b[0] = {words[0], words[1]}, b[1] = {words[2], words[3]};
    }
  }
};

// The first of the n-th 8 columns of a part. kParts warps, one or two, share the columns of a
// tile: each takes one half of every 128 bytes of a row, so a cursor's steps are the same
// constants for both.
template <class S, int kParts>
PYATTN_DEVICE int column_of_part(int n, int part) {
  constexpr int kHalf = 64 / sizeof(S);
  return kParts == 1 ? 8 * n : 8 * n / kHalf * 2 * kHalf + part * kHalf + 8 * n % kHalf;
}

// Loads right factors: a slice of rows, which the product sums over, and two times 8 columns of the part.
template <class S, int kParts, class T>
struct SummedCursor : Cursor<T> {
  PYATTN_DEVICE SummedCursor(T tile, int part) : Cursor<T>(tile, lane() % 16, 4 * part + lane() / 16) {}

  PYATTN_DEVICE void load(Right<S> (&b)[2], int rows, int columns) const {
    uint32_t words[4];
    load_matrices_transposed(words, this->at(rows, kParts == 1 ? columns : columns / 2 * 4 + columns % 2));
    b[0] = {words[0], words[1]}, b[1] = {words[2], words[3]};
  }
};
template <int kParts, class T>
struct SummedCursor<float, kParts, T> {  // ldmatrix transposes 2-byte elements only; the order of the rows is as_left's
  Cursor<T> even, odd;
  int column;  // byte offset in the chunk

  PYATTN_DEVICE SummedCursor(T tile, int part)
      : even(tile, lane() % 4 * 2, 4 * part + lane() / 16),
        odd(tile, lane() % 4 * 2 + 1, 4 * part + lane() / 16),
        column(lane() / 4 % 4 * 4) {}

  PYATTN_DEVICE void load(Right<float> (&b)[2], int rows, int columns) const {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = rows + 8 * half, s = 2 * kParts * columns + i;
        split(float_of(load_word(even.at(r, s) + column)), b[i].high[half][0], b[i].low[half][0]);
        split(float_of(load_word(odd.at(r, s) + column)), b[i].high[half][1], b[i].low[half][1]);
      }
  }
};

// ---- Products ----

// The sums of a warp: 16 kM rows of 8 kN columns.
template <int kM, int kN>
using Sums = float[kM][kN][4];

// C = A B^T: rows of A from a_row on, rows of B from 0 on, summed over all columns.
template <class S, int kM, int kN, int kARows, int kBRows, int kCols>
PYATTN_DEVICE void multiply_rows(Sums<kM, kN>& C, SharedMatrix<S, kARows, kCols> A, int a_row,
                                 SharedMatrix<S, kBRows, kCols> B) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) C[m][n][i] = 0;
  const LeftCursor<S, SharedMatrix<S, kARows, kCols>> left(A, a_row);
  const RightCursor<S, SharedMatrix<S, kBRows, kCols>> right(B);
  // Two slices of float at a time, after which a cursor's
  // steps repeat: more would not fit the registers.
  [[maybe_unused]] constexpr int kTogether = sizeof(S) == 4 ? 2 : kCols / kSlice;
#pragma unroll kTogether
  for (int s = 0; s < kCols / kSlice; ++s) {
    Left<S> a[kM];
#pragma unroll
    for (int m = 0; m < kM; ++m) a[m] = left.load(16 * m, s);
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      Right<S> b[2];
      right.load(b, 8 * n, s);
#pragma unroll
      for (int m = 0; m < kM; ++m) multiply(C[m][n], a[m], b[0]), multiply(C[m][n + 1], a[m], b[1]);
    }
  }
}

// C += W B for the columns of the part. W: sums of an earlier product; rows of B from 0 on.
template <class S, int kParts, int kM, int kK, int kN, int kRows, int kCols>
PYATTN_DEVICE void multiply_sums(Sums<kM, kN>& C, const Sums<kM, kK>& W, SharedMatrix<S, kRows, kCols> B, int part) {
  const SummedCursor<S, kParts, SharedMatrix<S, kRows, kCols>> right(B, part);
#pragma unroll
  for (int k = 0; k < kK; k += kSlice / 8) {
    Left<S> a[kM];
#pragma unroll
    for (int m = 0; m < kM; ++m) a[m] = as_left<S>(W[m] + k);
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      Right<S> b[2];
      right.load(b, 8 * k, n / 2);
#pragma unroll
      for (int m = 0; m < kM; ++m) multiply(C[m][n], a[m], b[0]), multiply(C[m][n + 1], a[m], b[1]);
    }
  }
}

// Calls f(m, n, i, row, col) for each of the lane's sums.
template <int kM, int kN, class F>
PYATTN_DEVICE void each_sum(F f) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) f(m, n, i, 16 * m + lane() / 4 + i / 2 * 8, 8 * n + lane() % 4 * 2 + i % 2);
}

// How a tile of scores lies in a warp's sums.
enum class Layout { kQueriesByKeys, kKeysByQueries };

// Calls f(at, row, each_key) for each query row that the lane holds sums of: `at` counts them,
// `row` is the row's place in the tile, and each_key(g) calls g(m, n, i, key) for its sums. The
// warp's sums begin at row, or key, `first` of the tile.
template <Layout kLayout, int kM, int kN, class F>
PYATTN_DEVICE void each_query(int first, F f) {
  if constexpr (kLayout == Layout::kQueriesByKeys) {
#pragma unroll
    for (int at = 0; at < 2 * kM; ++at)
      f(at, first + 8 * at + lane() / 4, [&](auto g) {
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int odd = 0; odd < 2; ++odd) g(at / 2, n, at % 2 * 2 + odd, 8 * n + lane() % 4 * 2 + odd);
      });
  } else {
#pragma unroll
    for (int at = 0; at < 2 * kN; ++at)
      f(at, at / 2 * 8 + lane() % 4 * 2 + at % 2, [&](auto g) {
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
          for (int half = 0; half < 2; ++half) g(m, at / 2, 2 * half + at % 2, first + 16 * m + 8 * half + lane() / 4);
      });
  }
}

// row(i)[j] = scale * C[i][j] for i < rows and j < cols, as S or as float: i counts from the
// warp's first row, j is a column of the part, and scale(m, half) is that of the row.
template <class S, int kParts, int kM, int kN, class Row, class Scale>
PYATTN_DEVICE void store_sums(const Sums<kM, kN>& C, int part, int rows, int64_t cols, bool whole_chunks, Row row,
                              Scale scale) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = 16 * m + lane() / 4 + half * 8;
      if (i >= rows) continue;
      auto* to = row(i);
      const float factor = scale(m, half);
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const int j = column_of_part<S, kParts>(n, part) + lane() % 4 * 2;
        const float x = C[m][n][2 * half] * factor, y = C[m][n][2 * half + 1] * factor;
        if constexpr (sizeof(*to) == 4) {
          if (j < cols) to[j] = x;
          if (j + 1 < cols) to[j + 1] = y;
        } else {
          const uint32_t pair = pack<S>(x, y);
          if (whole_chunks && j + 1 < cols) {
            *reinterpret_cast<uint32_t*>(to + j) = pair;
          } else {
            if (j < cols) to[j] = {static_cast<uint16_t>(pair)};
            if (j + 1 < cols) to[j + 1] = {static_cast<uint16_t>(pair >> 16)};
          }
        }
      }
    }
}

// f(S{}), or f(float{}) for the gradients of a part, which are not rounded.
template <class S, class F>
constexpr void with_written(const BackwardParams& p, F f) {
  if (sizeof(S) == 2 && p.part)
    f(float{});
  else
    f(S{});
}

}  // namespace
}  // namespace pyattn::cuda
