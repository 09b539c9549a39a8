// The product of few query rows with V where the instruction set multiplies pairs of bf16: of two keys, column by column.
// Rows of V are read in place and interleaved in registers.
#pragma once

#include <type_traits>
#include <utility>

#include "cpu/products/matrix.h"
#include "cpu/products/operand.h"
#include "cpu/simd/simd.h"
#include "shared/index.h"

namespace pyattn::PYATTN_ISA {
namespace {

// Vectors of a row of V that a tile of that many query rows multiplies. Each needs two sums a row: 16 of 32 registers, and 8
// for a single row, which hide the six cycles of a VDPBF16PS.
template <int kRows>
inline constexpr int kPairVectors = kRows == 1 ? 4 : 8 / kRows;

// O[kRows][columns of kVectors vectors of V] += P[kRows][pairs of keys] V[keys][columns], continuing earlier sums. The last
// vector has `last` columns, a whole one or half of one: a vector of sums.
template <class S, int kRows, int kVectors, class Rows, class Ahead, class T = Compute<S>, class E = Operand<S>>
[[gnu::noinline]] void add_pairs_tile(int64_t keys, int64_t last, Strided<E> P, Rows V, Matrix<T> O, Ahead& ahead) {
  constexpr int L = kLanes<T>, kSums = 2 * kVectors;
  vec<T> sum[kRows][kSums] = {};
  const auto each_sum = [&](auto f) PYATTN_MEMBER_INLINE {
    PYATTN_UNROLL(16)
    for (int r = 0; r < kRows; ++r) {
      PYATTN_UNROLL(16)
      for (int i = 0; i < kSums; ++i)
        if (i + 1 < kSums || last > L) f(sum[r][i], O.from(r).data + i * L);
    }
  };
  const auto add_pair = [&](int64_t j, auto whole) PYATTN_MEMBER_INLINE {
    PYATTN_UNROLL(16)
    for (int v = 0; v < kVectors; ++v) {
      const int64_t n = v + 1 < kVectors ? 2 * L : last;
      vec<E> low = load_operands(V.at(j) + 2 * L * v, n), high = {};
      if constexpr (whole) high = load_operands(V.at(j + 1) + 2 * L * v, n);
      interleave(low, high, std::make_index_sequence<2 * L>{});
      PYATTN_UNROLL(16)
      for (int r = 0; r < kRows; ++r) {
        const vec<E> p = broadcast(P.data + r * P.row + j / 2);
        sum[r][2 * v] = fma(p, low, sum[r][2 * v]);
        sum[r][2 * v + 1] = fma(p, high, sum[r][2 * v + 1]);
      }
    }
  };
  each_sum([](vec<T>& x, const T* o) PYATTN_MEMBER_INLINE { x = load(o); });
  PYATTN_UNROLL(1)
  for (int64_t j = 0; j + 1 < keys; j += 2) {
    ahead.take_lines(2 * kVectors);
    add_pair(j, std::true_type{});
  }
  if (keys % 2) add_pair(keys - 1, std::false_type{});
  each_sum([](vec<T> x, T* o) PYATTN_MEMBER_INLINE { store(o, x); });
}

// The columns [0, cols), whole vectors of sums, in tiles of kVectors vectors of V, then of fewer.
template <class S, int kRows, int kVectors, class Rows, class Ahead>
void add_pairs_columns(int64_t keys, int64_t cols, Strided<Operand<S>> P, Rows V, Matrix<Compute<S>> O, Ahead& ahead) {
  constexpr int64_t kVector = 2 * kLanes<Compute<S>>, kWidth = kVectors * kVector;
  int64_t d = 0;
  for (; d + kWidth <= cols; d += kWidth)
    add_pairs_tile<S, kRows, kVectors>(keys, kVector, P, V.from_column(d), O.from_column(d), ahead);
  if (d == cols) return;
  if constexpr (kVectors == 1)
    add_pairs_tile<S, kRows, 1>(keys, cols - d, P, V.from_column(d), O.from_column(d), ahead);
  else
    add_pairs_columns<S, kRows, kVectors / 2>(keys, cols - d, P, V.from_column(d), O.from_column(d), ahead);
}

// O[rows][columns of a part] += P[rows][pairs of keys] V[keys][cols], continuing earlier sums in the order of keys, as gemm
// does over pack_summed_rows. A last key without a second one is paired with 0. Prefetches a later line for each line of V.
template <class S, int kRows = 8, class Rows, class Ahead>
void add_pairs(int64_t rows, int64_t keys, int64_t cols, Strided<Operand<S>> P, Rows V, Matrix<Compute<S>> O,
               Ahead& ahead) {
  constexpr int L = kLanes<Compute<S>>;
  const int64_t whole = round_down(cols, L);
  int64_t r = 0;
  for (; r + kRows <= rows; r += kRows) {
    const Strided<Operand<S>> weights = P.from(r, 0);
    add_pairs_columns<S, kRows, kPairVectors<kRows>>(keys, whole, weights, V, O.from(r), ahead);
    if (whole < cols)
      add_pairs_tile<S, kRows, 1>(keys, L, weights, V.from_column(cols - L), O.from(r).from_column(whole), ahead);
  }
  if constexpr (kRows > 1)
    if (r < rows) add_pairs<S, kRows / 2>(rows - r, keys, cols, P.from(r, 0), V, O.from(r), ahead);
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
