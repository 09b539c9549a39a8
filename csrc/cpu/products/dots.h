// Dot products of few query rows with keys. Columns lie on the lanes, and K is read in place as
// it is stored: few rows would not fill the lanes, and reading K is the cost. If columns do
// not fill the last vector, that vector ends with the last column and overlaps the vector before:
//
//   10 columns, 4 lanes    0 1 2 3    4 5 6 7    6 7 8 9
#pragma once

#include <type_traits>

#include "cpu/products/lines_ahead.h"
#include "cpu/products/matrix.h"
#include "cpu/products/operand.h"
#include "cpu/simd/simd.h"
#include "shared/index.h"

namespace pyattn::PYATTN_ISA {
namespace {

// Whether this many rows prefetch later keys and values while they compute; Rows is a
// Matrix or a RowTable. One row of float reads a Matrix faster without prefetching.
template <class S, class Rows, int kRows>
inline constexpr bool kAsksAhead = kRows > 1 || sizeof(S) < sizeof(Compute<S>) ||
                                   !std::is_same_v<Rows, Matrix<const S>>;

// Q[kRows][cols], K[keys][cols] -> out[kRows][at most kLanes keys] = Q K^T, in tiles of kLanes / kRows keys; a tile with
// fewer repeats the last one. Not inlined, because it would spill. Prefetches a later line for each line of K where several
// keys are read side by side, elsewhere a later row for each key.
template <int kRows, class S, class Rows, class Ahead, class T = Compute<S>, class E = Operand<S>>
[[gnu::noinline]] void dot_rows(Matrix<const E> Q, Rows K, int64_t keys, int64_t cols, Matrix<T> out, Ahead& ahead) {
  constexpr int kKeys = kLanes<T> / kRows;
  constexpr int kStreams = kRows < kSideBySide ? 1 : kKeys;
  constexpr int64_t kBytes = kStreams * kColumns<S> * kLanes<E> * int64_t{sizeof(S)};
  // One burst for 16 keys that lie anywhere would delay the products after it.
  constexpr bool kEachKey = kRows == 1 && !std::is_same_v<Rows, Matrix<const S>>;
  const int64_t last = cols % (kColumns<S> * kLanes<E>), count = (cols - last) / kColumns<S>;
  for (int64_t j = 0; j < min(keys, kLanes<T>); j += kKeys) {
    if constexpr (kStreams == 1 && !kEachKey) ahead.take(kKeys);
    const S* key[kKeys];
    for (int i = 0; i < kKeys; ++i) {
      key[i] = K.at(min(j + i, keys - 1));
      if constexpr (kStreams > 1)
        asm("" : "+r"(key[i]));  // gcc would compute two in a vector, and they would arrive late
    }
    vec<Sum<S>> sum[kLanes<T>] = {};
    PYATTN_UNROLL(16)
    for (int i = 0; i < kKeys; i += kStreams) {
      if constexpr (kEachKey) ahead.take(1);
      PYATTN_UNROLL(kUnrolledTerms)
      for (int64_t d = 0; d < count; d += kLanes<E>) {
        if constexpr (kStreams > 1) ahead.take_lines(max(1, kBytes / kCacheLine));
        vec<E> k[kStreams];
        PYATTN_UNROLL(16)
        for (int e = 0; e < kStreams; ++e) {
          k[e] = load_operands(key[i + e] + d * kColumns<S>);
          if constexpr (kRows == 2) PYATTN_IN_REGISTER(k[e]);  // gcc would load it for each of two rows
        }
        PYATTN_UNROLL(16)
        for (int r = 0; r < kRows; ++r) {
          vec<E> q = load(Q.from(r).data + d);
          if constexpr (kStreams > 1) PYATTN_IN_REGISTER(q);  // gcc would load it again for each key
          PYATTN_UNROLL(16)
          for (int e = 0; e < kStreams; ++e) sum[r * kKeys + i + e] = fma(q, k[e], sum[r * kKeys + i + e]);
        }
      }
      if (last == 0) continue;
      PYATTN_UNROLL(16)
      for (int e = 0; e < kStreams; ++e) {
        const vec<E> k = load_last(key[i + e] + cols, last);
        PYATTN_UNROLL(16)
        for (int r = 0; r < kRows; ++r)
          sum[r * kKeys + i + e] = fma(load(Q.from(r).data + count), k, sum[r * kKeys + i + e]);
      }
    }
    sum_lanes<Sum<S>>(sum);
    T scores[kLanes<T>];
    store(scores, __builtin_convertvector(sum[0], vec<T>));
    PYATTN_UNROLL(16)
    for (int r = 0; r < kRows; ++r) __builtin_memcpy(out.from(r).data + j, scores + r * kKeys, kKeys * sizeof(T));
  }
}

// Q[rows][cols], K[keys][cols] -> out[rows][at most kLanes keys] = Q K^T. Prefetches later rows beside the first rows.
template <class S, class T = Compute<S>, int kRows = min(kSideBySide, kLanes<T>), class Rows, class Ahead>
PYATTN_INLINE void dots(int64_t rows, int64_t keys, int64_t cols, Matrix<const Operand<S>> Q, Rows K, Matrix<T> out,
                        Ahead& ahead) {
  NoRowsAhead none;
  int64_t r = 0;
  for (; r + kRows <= rows; r += kRows) {
    if (kAsksAhead<S, Rows, kRows> && r == 0)
      dot_rows<kRows, S>(Q.from(r), K, keys, cols, out.from(r), ahead);
    else
      dot_rows<kRows, S>(Q.from(r), K, keys, cols, out.from(r), none);
  }
  if constexpr (kRows > 1)
    if (r < rows) {
      const auto multiply = [&](auto& ahead) {
        dots<S, T, kRows / 2>(rows - r, keys, cols, Q.from(r), K, out.from(r), ahead);
      };
      if (r == 0)
        multiply(ahead);
      else
        multiply(none);
    }
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
