// Dot products of few query rows with keys, summed over columns in the order of score_gemm, so they have its bits. K is
// read in place, and squares of it are transposed in registers, so keys lie on the lanes.
#pragma once

#include <type_traits>

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

// An element of a square of K, as it is transposed. bf16 that is multiplied as float stays in pairs of columns until then,
// which takes half the exchanges.
template <class S>
using Square = std::conditional_t<std::is_same_v<S, bf16>, bf16_pair, Operand<S>>;

// Columns of a square.
template <class S>
inline constexpr int64_t kSquareColumns = kLanes<Square<S>> * (std::is_same_v<S, bf16> ? 2 : kColumns<S>);

// The columns from d on of kLanes keys -> square[i], which has element i of each key.
template <class S, class Rows>
PYATTN_INLINE void load_square(Rows K, int64_t d, vec<Square<S>> (&square)[kLanes<Square<S>>]) {
  using W = Square<S>;
  constexpr int L = kLanes<W>;
  const auto at = [&](int i) { return K.at(i) + d; };
  if constexpr (std::is_same_v<S, bf16> || std::is_same_v<S, W>) {
    const auto words = [&](int i) { return reinterpret_cast<const W*>(at(i)); };
#ifdef PYATTN_HAS_HALF_LOADS
    // Loads do what the last stage of a transpose does: they exchange halves of registers.
    PYATTN_UNROLL(16)
    for (int i = 0; i < L / 2; ++i) {
      square[i] = load_halves(words(i), words(i + L / 2));
      square[i + L / 2] = load_halves(words(i) + L / 2, words(i + L / 2) + L / 2);
    }
    transpose<W, 1, L / 2>(square);
    return;
#else
    PYATTN_UNROLL(16)
    for (int i = 0; i < L; ++i) square[i] = load_unaligned(words(i));
#endif
  } else {
    PYATTN_UNROLL(16)
    for (int i = 0; i < L; ++i) square[i] = load_operands(at(i));
  }
  PYATTN_UNROLL(16)
  for (int i = 0; i < L; ++i) PYATTN_IN_REGISTER(square[i]);
  transpose_square<W>(square);
}

// Q[kRows][terms(cols)], K[kGroups vectors of keys][cols] -> out[kRows][keys] = Q K^T. Prefetches a later line for each
// line of K.
template <int kRows, int kGroups, class S, class Rows, class Ahead, class T = Compute<S>, class E = Operand<S>>
[[gnu::noinline]] void ordered_dot_tile(Matrix<const E> Q, Rows K, int64_t cols, Matrix<T> out, Ahead& ahead) {
  constexpr int L = kLanes<T>;
  constexpr int64_t kWidth = kSquareColumns<S>;
  constexpr int64_t kLines = max(1, L * kWidth * int64_t{sizeof(S)} / kCacheLine);
  constexpr int kShares = kLines >= 4 ? 4 : 1;  // one burst of prefetches would delay the loads after it
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
      vec<Square<S>> square[L];
      load_square<S>(K.from(g * L), d, square);
      const E* q = Q.data + d / kColumns<S>;
      asm volatile("" : "+r"(q));  // gcc would keep all broadcasts for the next vector of keys, and spill the sums
      PYATTN_UNROLL(16)
      for (int c = 0; c < L; ++c) {
        if (c % (L / kShares) == 0) ahead.take_lines(kLines / kShares);
        const auto add = [&](int64_t term, vec<E> k) PYATTN_MEMBER_INLINE {
          PYATTN_UNROLL(16)
          for (int r = 0; r < kRows; ++r) sum[r][g] = fma(broadcast(q + r * Q.row + term), k, sum[r][g]);
        };
        if constexpr (std::is_same_v<Square<S>, E>)
          add(c, square[c]);
        else
          add(2 * c, bit_cast<float>(square[c] << 16)), add(2 * c + 1, bit_cast<float>(square[c] & 0xffff0000));
      }
    }
    if ((d + kWidth) % kScoreBlock<E> == 0) end_block(d + kWidth == kScoreBlock<E>);
  }
  constexpr int64_t kTail = L * kColumns<S>;
  PYATTN_UNROLL(1)
  for (; d < cols; d += kTail) {
    const int64_t last = min(kTail, cols - d);
    PYATTN_UNROLL(16)
    for (int g = 0; g < kGroups; ++g) {
      ahead.take_lines(ceil_div(L * last * int64_t{sizeof(S)}, kCacheLine));
      vec<E> square[L];
      for (int i = 0; i < L; ++i) {
        const S* k = K.at(g * L + i) + d;
        square[i] = last == kTail ? load_operands(k) : load_operands(k, last);
      }
      transpose_square<E>(square);
      for (int64_t c = 0; c < terms<S>(last); ++c) {
        PYATTN_UNROLL(16)
        for (int r = 0; r < kRows; ++r)
          sum[r][g] = fma(broadcast(Q.from(r).data + d / kColumns<S> + c), square[c], sum[r][g]);
      }
    }
  }
  if (cols % kScoreBlock<E> != 0) end_block(cols < kScoreBlock<E>);
}

// Q[rows][terms(cols)], K[keys][cols] -> out[rows][keys in whole vectors] = Q K^T, where the last vector repeats the last
// key. Prefetches a later line for each line of K. One or two rows take two vectors of keys at a time where a single chain of
// sums would wait for each fma. Floats of AVX-512 do not wait, because each square takes longer than its sums; 32 of their
// keys at once would read those that the turn before prefetched last.
template <class S, int kRows = kOrderedRows, class T = Compute<S>, class Rows, class Ahead>
void ordered_dots(int64_t rows, int64_t keys, int64_t cols, Matrix<const Operand<S>> Q, Rows K, Matrix<T> out,
                  Ahead& ahead) {
  constexpr int L = kLanes<T>, kGroups = kRows <= 2 && (L <= 8 || kPairs<S>) ? 2 : 1;
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
      NoRowsAhead none;
      ordered_dot_tile<kRows, 1, S>(Q.from(r), RowTable<const S>{key}, cols, to(), none);
    }
  }
  if constexpr (kRows > 1)
    if (r < rows) ordered_dots<S, kRows / 2>(rows - r, keys, cols, Q.from(r), K, out.from(r), ahead);
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
