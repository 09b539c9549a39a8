// Packing: copies rows between tensors and scratch. row(i) returns the address of row i of the tensor.
#pragma once

#include "cpu/products/matrix.h"
#include "cpu/products/scratch.h"
#include "cpu/simd/simd.h"
#include "shared/index.h"
#include "storage.h"

namespace pyattn::PYATTN_ISA {
namespace {

// Loads the first n columns and pads with zeros.
template <class S>
PYATTN_INLINE vec<Compute<S>> load(const S* p, int64_t n) {
  if (n == kLanes<Compute<S>>) return load(p);
  S columns[kLanes<Compute<S>>] = {};
  __builtin_memcpy(columns, p, n * sizeof(S));
  return load(columns);
}

template <class S>
PYATTN_INLINE void store(S* p, vec<Compute<S>> x, int64_t n) {
  if (n == kLanes<Compute<S>>) return store(p, x);
  S columns[kLanes<Compute<S>>];
  store(columns, x);
  __builtin_memcpy(p, columns, n * sizeof(S));
}

// Prefetches the rows [i, end). The hardware prefetcher does not follow as many rows side by side as there are lanes.
template <class Row>
void prefetch_rows(int64_t i, int64_t end, int64_t cols, Row row) {
  for (; i < end; ++i)
    for (int64_t d = 0; d < cols; d += kCacheLine / sizeof(*row(i))) __builtin_prefetch(row(i) + d);
}

// src[cols][rows] -> row(i)[d] = scale[i] * src[d][i].
template <class S, class T, class Row>
void unpack_transposed(Matrix<const T> src, int64_t rows, int64_t cols, const T* scale, Row row) {
  constexpr int L = kLanes<T>;
  for (int64_t i = 0; i < rows; i += L) {
    const int64_t m = min(L, rows - i);
    S* to[L];
    for (int64_t r = 0; r < m; ++r) to[r] = row(i + r);
    for (int64_t d = 0; d < cols; d += L) {
      const int64_t n = min(L, cols - d);
      const T* column = src.data + d * src.row + i;
      vec<T> square[L];
      PYATTN_UNROLL(16)
      for (int c = 0; c < L; ++c) {
        square[c] = load(column) * load(scale + i);
        if (c + 1 < n) column += src.row;  // past the last column, that is repeated
      }
      transpose<T>(square);
      if (m == L && n == L) {
        PYATTN_UNROLL(16)
        for (int r = 0; r < L; ++r) store(to[r] + d, square[r]);
      } else {
        for (int64_t r = 0; r < m; ++r) store(to[r] + d, square[r], n);
      }
    }
  }
}

// row(i)[d] -> dst[rows][cols], widened, padded with zeros to a whole vector of columns.
template <class S, class T, class Row>
void pack_rows(Matrix<T> dst, int64_t rows, int64_t cols, Row row) {
  constexpr int L = kLanes<T>;
  for (int64_t i = 0; i < rows; ++i) {
    const S* from = row(i);
    T* to = dst.data + i * dst.row;
    int64_t d = 0;
    for (; d + L <= cols; d += L) store(to + d, load(from + d));
    if (d < cols) store(to + d, load(from + d, cols - d));
  }
}

// src[rows][cols] -> row(i)[d] = scale * src[i][d], rounded.
template <class S, class T, class Row>
void unpack_rows(Matrix<const T> src, int64_t rows, int64_t cols, T scale, Row row) {
  constexpr int L = kLanes<T>;
  for (int64_t i = 0; i < rows; ++i) {
    const T* from = src.data + i * src.row;
    S* to = row(i);
    int64_t d = 0;
    for (; d + L <= cols; d += L) store(to + d, load(from + d) * scale);
    if (d < cols) store(to + d, load(from + d) * scale, cols - d);
  }
}

// Whether kernels can read a tensor in place: its storage type is the compute type.
template <class S>
inline constexpr bool kInPlace = sizeof(S) == sizeof(Compute<S>);

// Rows whole pages apart map to one set of a cache with 64 sets of 64-byte
// lines. A product that reads them repeatedly reads a copy faster:
// (1, 16, 512, 64) as a view of (1, 512, 16, 64) takes 0.85 of the time on AVX2.
inline constexpr int64_t kConflictBytes = 4096;

// Whether the right factor of a product, whose rows are summed over, can be read
// in place: its rows are also whole vectors, and do not all map to one set.
template <class S>
bool summed_in_place(const View& view, int64_t cols) {
  return kInPlace<S> && cols % kLanes<Compute<S>> == 0 &&
         view.stride_s * static_cast<int64_t>(sizeof(S)) % kConflictBytes != 0;
}

// The dot product of two rows.
template <class S>
Compute<S> dot_row(const S* a, const S* b, int64_t cols) {
  using T = Compute<S>;
  constexpr int L = kLanes<T>;
  vec<T> sum = {};
  int64_t d = 0;
  for (; d + L <= cols; d += L) sum = fma(load(a + d), load(b + d), sum);
  if (d < cols) sum = fma(load(a + d, cols - d), load(b + d, cols - d), sum);
  T total = 0;
  for (int i = 0; i < L; ++i) total += sum[i];
  return total;
}

template <class S>
bool all_zero(const S* row, int64_t cols) {
  for (int64_t d = 0; d < cols; ++d)
    if (load(row + d, 1)[0] != 0) return false;
  return true;
}

// Whether no element is NaN or inf: then 0 times each is 0.
template <class S, class Row>
bool all_finite(int64_t rows, int64_t cols, Row row) {
  using T = Compute<S>;
  constexpr int L = kLanes<T>;
  vec<T> sum = {};
  for (int64_t i = 0; i < rows; ++i) {
    const S* from = row(i);
    int64_t d = 0;
    for (; d + L <= cols; d += L) sum += load(from + d) * T(0);
    if (d < cols) sum += load(from + d, cols - d) * T(0);
  }
  T total = 0;
  for (int i = 0; i < L; ++i) total += sum[i];
  return total == 0;
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
