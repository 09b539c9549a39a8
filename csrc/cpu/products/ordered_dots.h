// Dot products of few query rows with keys, summed over columns in the order of score_gemm, so they have its bits. K is
// read in place, and squares of it are transposed in registers, so keys lie on the lanes.
#pragma once

#include "cpu/products/lines_ahead.h"
#include "cpu/products/matrix.h"
#include "cpu/products/operand.h"
#include "cpu/products/product.h"
#include "cpu/products/scratch.h"
#include "cpu/simd/simd.h"
#include "shared/index.h"

namespace pyattn::PYATTN_ISA {
namespace {

// Query rows that share a transposed square. It takes 16 of 32 registers with AVX-512, elsewhere at most 8 of 16, and
// each row takes one for its sum.
inline constexpr int kOrderedRows = kVectorBytes == 64 ? 8 : 4;

template <class E>
PYATTN_INLINE void transpose_square(vec<E> (&rows)[kLanes<E>]) {
#ifdef PYATTN_HAS_WORD_TRANSPOSE
  if constexpr (sizeof(E) == sizeof(uint32_t)) return transpose_words<E>(rows);
#endif
  transpose<E>(rows);
}

// Q[kRows][terms(cols)], K[kGroups vectors of keys][cols] -> out[kRows][keys] = Q K^T. Prefetches a later line for each
// line of K.
template <int kRows, int kGroups, class S, class Rows, class Ahead, class T = Compute<S>, class E = Operand<S>>
[[gnu::noinline]] void ordered_dot_tile(Matrix<const E> Q, Rows K, int64_t cols, Matrix<T> out, Ahead& ahead) {
  constexpr int L = kLanes<T>;
  constexpr int64_t kWidth = L * kColumns<S>;
  constexpr int64_t kLines = max(1, L * kWidth * int64_t{sizeof(S)} / kCacheLine);
  vec<T> sum[kRows][kGroups] = {};
  const auto store_sums = [&](auto update) PYATTN_MEMBER_INLINE {
    PYATTN_UNROLL(16)
    for (int r = 0; r < kRows; ++r) {
      PYATTN_UNROLL(16)
      for (int g = 0; g < kGroups; ++g) update(out.from(r).data + g * L, sum[r][g]);
    }
  };
  const auto end_block = [&](bool first) PYATTN_MEMBER_INLINE {
    if (first)
      store_sums([](T* o, vec<T>& x) PYATTN_MEMBER_INLINE { store(o, x), x = vec<T>{}; });
    else
      store_sums([](T* o, vec<T>& x) PYATTN_MEMBER_INLINE { store(o, load(o) + x), x = vec<T>{}; });
  };
  int64_t d = 0;
  PYATTN_UNROLL(1)
  for (; d + kWidth <= cols; d += kWidth) {
    PYATTN_UNROLL(16)
    for (int g = 0; g < kGroups; ++g) {
      vec<E> square[L];
      PYATTN_UNROLL(16)
      for (int i = 0; i < L; ++i) {
        square[i] = load_operands(K.at(g * L + i) + d);
        PYATTN_IN_REGISTER(square[i]);
      }
      transpose_square<E>(square);
      const E* q = Q.data + d / kColumns<S>;
      asm volatile("" : "+r"(q));  // gcc would keep all broadcasts for the next vector of keys, and spill the sums
      PYATTN_UNROLL(16)
      for (int c = 0; c < L; ++c) {
        if constexpr (kLines >= 4)
          if (c % 4 == 0) ahead.take_lines(kLines / 4);
        PYATTN_UNROLL(16)
        for (int r = 0; r < kRows; ++r) sum[r][g] = fma(broadcast(q + r * Q.row + c), square[c], sum[r][g]);
      }
      if constexpr (kLines < 4) ahead.take_lines(kLines);
    }
    if ((d + kWidth) % kScoreBlock<E> == 0) end_block(d + kWidth == kScoreBlock<E>);
  }
  if (d < cols) {
    PYATTN_UNROLL(16)
    for (int g = 0; g < kGroups; ++g) {
      vec<E> square[L];
      for (int i = 0; i < L; ++i) square[i] = load_operands(K.at(g * L + i) + d, cols - d);
      transpose_square<E>(square);
      for (int64_t c = 0; c < terms<S>(cols - d); ++c) {
        PYATTN_UNROLL(16)
        for (int r = 0; r < kRows; ++r)
          sum[r][g] = fma(broadcast(Q.from(r).data + d / kColumns<S> + c), square[c], sum[r][g]);
      }
    }
  }
  if (cols % kScoreBlock<E> != 0) end_block(cols < kScoreBlock<E>);
}

// Q[rows][terms(cols)], K[keys][cols] -> out[rows][keys in whole vectors] = Q K^T, where the last vector repeats the last
// key. Prefetches a later line for each line of K. One or two rows take two vectors of keys at a time: a single chain of
// sums would wait for each fma.
template <class S, int kRows = kOrderedRows, class T = Compute<S>, class Rows, class Ahead>
void ordered_dots(int64_t rows, int64_t keys, int64_t cols, Matrix<const Operand<S>> Q, Rows K, Matrix<T> out,
                  Ahead& ahead) {
  constexpr int L = kLanes<T>, kGroups = kRows > 2 ? 1 : 2;
  int64_t r = 0;
  for (; r + kRows <= rows; r += kRows) {
    int64_t j = 0;
    const auto to = [&] { return Matrix<T>{out.from(r).data + j, out.row}; };
    for (; j + kGroups * L <= keys; j += kGroups * L)
      ordered_dot_tile<kRows, kGroups, S>(Q.from(r), K.from(j), cols, to(), ahead);
    if constexpr (kGroups > 1)
      for (; j + L <= keys; j += L) ordered_dot_tile<kRows, 1, S>(Q.from(r), K.from(j), cols, to(), ahead);
    if (j < keys) {
      const S* key[L];
      for (int i = 0; i < L; ++i) key[i] = K.at(min(j + i, keys - 1));
      RowsAhead<RowTable<const S>> none{};
      ordered_dot_tile<kRows, 1, S>(Q.from(r), RowTable<const S>{key}, cols, to(), none);
    }
  }
  if constexpr (kRows > 1)
    if (r < rows) ordered_dots<S, kRows / 2>(rows - r, keys, cols, Q.from(r), K, out.from(r), ahead);
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
