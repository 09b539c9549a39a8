// Dot products of few query rows with keys, summed over columns in the order of score_gemm, so they have its bits. K is
// read in place, and squares of it are transposed in registers, so keys lie on the lanes.
#pragma once

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

// Q[kRows][terms(cols)], K[keys][cols] -> out[kRows][kGroups vectors of keys] = Q K^T. With fewer keys, the last one is
// repeated. Prefetches the first `count` rows of `later`, each line as the same line of K is read.
template <int kRows, int kGroups, class S, class Rows, class T = Compute<S>, class E = Operand<S>>
[[gnu::noinline]] void ordered_dot_tile(Matrix<const E> Q, Rows K, int64_t keys, int64_t cols, Matrix<T> out,
                                        Rows later, int64_t count) {
  constexpr int L = kLanes<T>, kKeys = kGroups * L;
  constexpr int64_t kWidth = L * kColumns<S>, kLine = kCacheLine / sizeof(S);
  const S *key[kKeys], *ahead[kKeys];
  for (int i = 0; i < kKeys; ++i) {
    key[i] = K.at(min(i, keys - 1));
    ahead[i] = i < count ? later.at(i) : key[i];
  }
  vec<T> sum[kRows][kGroups] = {};
  const auto add_block = [&](bool first) PYATTN_MEMBER_INLINE {
    PYATTN_UNROLL(16)
    for (int r = 0; r < kRows; ++r) {
      PYATTN_UNROLL(16)
      for (int g = 0; g < kGroups; ++g) {
        T* const o = out.from(r).data + g * L;
        store(o, first ? sum[r][g] : load(o) + sum[r][g]);
        sum[r][g] = vec<T>{};
      }
    }
  };
  int64_t d = 0;
  for (; d + kWidth <= cols; d += kWidth) {
    PYATTN_UNROLL(16)
    for (int g = 0; g < kGroups; ++g) {
      vec<E> square[L];
      PYATTN_UNROLL(16)
      for (int i = 0; i < L; ++i) {
        square[i] = load_operands(key[g * L + i] + d);
        if (kWidth >= kLine || d % kLine == 0) __builtin_prefetch(ahead[g * L + i] + d);
      }
      transpose_square<E>(square);
      PYATTN_UNROLL(16)
      for (int c = 0; c < L; ++c) {
        PYATTN_UNROLL(16)
        for (int r = 0; r < kRows; ++r)
          sum[r][g] = fma(broadcast(Q.from(r).data + d / kColumns<S> + c), square[c], sum[r][g]);
      }
    }
    if ((d + kWidth) % kScoreBlock<E> == 0) add_block(d + kWidth == kScoreBlock<E>);
  }
  if (d < cols)
    for (int g = 0; g < kGroups; ++g) {
      vec<E> square[L];
      for (int i = 0; i < L; ++i) square[i] = load_operands(key[g * L + i] + d, cols - d);
      transpose_square<E>(square);
      for (int64_t c = 0; c < terms<S>(cols - d); ++c)
        for (int r = 0; r < kRows; ++r)
          sum[r][g] = fma(broadcast(Q.from(r).data + d / kColumns<S> + c), square[c], sum[r][g]);
    }
  if (cols % kScoreBlock<E> != 0) add_block(cols < kScoreBlock<E>);
}

// Q[rows][terms(cols)], K[keys][cols] -> out[rows][keys in whole vectors] = Q K^T. Prefetches the first `count` rows of
// `later`. One or two rows take two vectors of keys at a time: a single chain of sums would wait for each fma.
template <class S, int kRows = kOrderedRows, class T = Compute<S>, class Rows>
void ordered_dots(int64_t rows, int64_t keys, int64_t cols, Matrix<const Operand<S>> Q, Rows K, Matrix<T> out,
                  Rows later, int64_t count) {
  constexpr int kGroups = kRows > 2 ? 1 : 2, kKeys = kGroups * kLanes<T>;
  int64_t r = 0;
  for (; r + kRows <= rows; r += kRows, count = 0)
    for (int64_t j = 0; j < keys; j += kKeys) {
      const Matrix<T> to{out.from(r).data + j, out.row};
      if (kGroups == 1 || keys - j > kLanes<T>)
        ordered_dot_tile<kRows, kGroups, S>(Q.from(r), K.from(j), keys - j, cols, to, later.from(j), count - j);
      else
        ordered_dot_tile<kRows, 1, S>(Q.from(r), K.from(j), keys - j, cols, to, later.from(j), count - j);
    }
  if constexpr (kRows > 1)
    if (r < rows) ordered_dots<S, kRows / 2>(rows - r, keys, cols, Q.from(r), K, out.from(r), later, count);
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
