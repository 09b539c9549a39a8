// The products of few query rows: their factors and sums in scratch. Columns lie on the lanes, and rows of K and V are
// read in place, one after another.
#pragma once

#include <utility>

#include "cpu/products/few/byte_products.h"
#include "cpu/products/few/int8_products.h"
#include "cpu/products/lines_ahead.h"
#include "cpu/products/operand.h"
#include "cpu/products/product.h"
#include "cpu/products/scratch.h"

namespace pyattn::PYATTN_ISA {
namespace {

// O[rows][columns of a part] += P[rows][terms] V[terms][cols], continuing earlier sums. Prefetches later rows, a share of
// one beside each term of a tile. Values of 8 bits are widened for four rows at once, others for two rows or one,
// whose tiles read whole rows of V.
template <class KV, class E, class Rows, class T, class Ahead>
void add_values(int64_t rows, int64_t terms, int64_t cols, Strided<E> P, Rows V, Matrix<T> O, Ahead& ahead) {
  constexpr int L = kLanes<T>, kWidened = 4;
  constexpr bool kBytes = sizeof(KV) == 1;
  constexpr int kNV = kBytes ? kMaxNV : kWideNV;
  const int64_t whole = round_down(cols, L), panels = max(1, whole / (kNV * L));
  const int64_t tiles = panels * ceil_div(rows, kBytes ? kWidened : kMR[min(whole / L, kNV)]);  // or more
  const int64_t lines = ceil_div(cols * int64_t{sizeof(KV)}, tiles * kCacheLine);
  const auto beside = [&](int64_t) PYATTN_MEMBER_INLINE { ahead.take_lines(lines); };
  int64_t d = 0;
  if constexpr (kBytes)
    for (; d + kNV * L <= whole; d += kNV * L)
      gemm_panel<kNV, T, E, Rows, Resume<T>, decltype(beside), kWidened>(rows, terms, P, V, O, d, Resume<T>(), beside);
  gemm<T, E, Rows, kNV>(rows, d, whole, terms, P, V, O, Resume<T>(), beside);
  if (whole < cols)
    gemm<T, E, Rows, kNV>(rows, 0, L, terms, P, V.from_column(cols - L), O.from_column(whole), Resume<T>());
}

// ---- Pairs of bf16 keys ----

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

// ---- Factors and sums in scratch ----

// Queries and sums of S, keys and values stored as KV, which are widened as they are loaded.
template <class S, class KV>
struct FewProducts {
  using T = Compute<S>;
  static constexpr bool kFiniteValues = false;  // whether V holds neither NaN nor inf
  static constexpr bool kScalesKeys = false;  // whether it multiplies K, too, and the scores by the scales of K's rows
  Matrix<Operand<S>> Q;                       // [rows][few_terms(head_dim)]
  Matrix<T> O;                                // [rows][columns of a part]: the product of a block, 0 between blocks

  void take(Carver& carver, int64_t rows, int64_t, int64_t cols, int64_t cols_v) {
    Q = carver.take<Operand<S>>(rows, few_terms<S>(cols));
    O = carver.take<T>(rows, round_up(cols_v, kLanes<T>));
  }

  FewProducts from(int64_t r) const { return {Q.from(r), O.from(r)}; }

  template <class Row>
  void start(int64_t rows, int64_t cols, T power, Row row) const {
    pack_few_queries<S>(Q, rows, cols, power, row);
    fill_zero(O.data, rows * O.row);
  }

  static T query_factor(int64_t) { return 1; }
  static void round_weights(int64_t, T*, Range, int64_t) {}

  template <class Rows>
  void add_values(int64_t rows, int64_t keys, int64_t cols, Matrix<T> P, int64_t, Rows V,
                  RowsAhead<Rows>& ahead) const {
    pyattn::PYATTN_ISA::add_values<KV>(rows, keys, cols, P.strided(), V, O, ahead);
  }

  void add_to(Matrix<T> out, int64_t rows, int64_t) const {
    for (int64_t i = 0; i < rows * O.row; i += kLanes<T>) {
      store(out.data + i, load(out.data + i) + load(O.data + i));
      store(O.data + i, vec<T>{});
    }
  }
};

#ifdef PYATTN_HAS_BYTE_PRODUCTS
template <class S>
struct FewProducts<S, i8> : ByteProducts {
  FewProducts from(int64_t r) const { return {ByteProducts::from(r)}; }
};
#else

// The same over rows of int8, in sums of integers.
template <class S>
struct FewProducts<S, i8> {
  static constexpr bool kFiniteValues = true, kScalesKeys = false;
  static constexpr int L = kLanes<float>;
  Matrix<i16_pair> Q, P;             // [rows][few_terms(head_dim)], [rows][pairs of keys]
  Matrix<int32_t> O;                 // [rows][int8_columns(head_dim_v)]
  float *query_factors, *p_factors;  // [rows]: what a 1 in Q and P stands for
  float* row;                        // a row of float of any of these

  void take(Carver& carver, int64_t rows, int64_t keys, int64_t cols, int64_t cols_v) {
    Q = carver.take<i16_pair>(rows, few_terms<i8>(cols));
    P = carver.take<i16_pair>(rows, keys / 2);
    O = carver.take<int32_t>(rows, int8_columns(cols_v));
    query_factors = carver.take<float>(rows);
    p_factors = carver.take<float>(rows);
    row = carver.take<float>(max(2 * few_terms<i8>(cols), int8_columns(cols_v)));
  }

  FewProducts from(int64_t r) const { return {Q.from(r), P.from(r), O.from(r), query_factors + r, p_factors + r, row}; }

  template <class Row>
  void start(int64_t rows, int64_t cols, float power, Row queries) const {
    const int64_t columns = 2 * few_terms<i8>(cols), whole = round_down(cols, 2 * L);
    for (int64_t r = 0; r < rows; ++r) {
      const float* q = queries(r);
      for (int64_t d = 0; d < whole; d += L) store(row + d, load(q + d) * power);
      fill_zero(row + whole, columns - whole);  // the last vector ends with the last column, as in dots.h
      for (int64_t d = whole; d < cols; ++d) row[columns - cols + d] = q[d] * power;
      query_factors[r] = round_to_pairs(row, columns, largest_factor(cols), Q.at(r));
    }
    fill_zero(O.data, rows * O.row);
  }

  float query_factor(int64_t r) const { return query_factors[r]; }

  void round_weights(int64_t r, float* weights, Range seen, int64_t keys) const {
    const int64_t whole = round_up(keys, L);
    for (int64_t k = 0; k < seen.begin; ++k) weights[k] = 0;
    for (int64_t k = seen.end; k < whole; ++k) weights[k] = 0;
    p_factors[r] = round_to_pairs(weights, whole, largest_factor(whole), P.at(r));
  }

  template <class Rows>
  void add_values(int64_t rows, int64_t keys, int64_t cols, Matrix<float>, int64_t first, Rows V,
                  RowsAhead<Rows>& ahead) const {
    add_int8_values(rows, keys, cols, P.from_column(first / 2), V, O, [&](int64_t n) { ahead.take(n); });
  }

  void add_to(Matrix<float> out, int64_t rows, int64_t cols) const {
    for (int64_t r = 0; r < rows; ++r) {
      take_int8_row(O.at(r), cols, p_factors[r], row);
      float* const to = out.at(r);
      for (int64_t d = 0; d < cols; d += L) store(to + d, load(to + d) + load(row + min(d, cols - L)));
    }
  }
};
#endif

}  // namespace
}  // namespace pyattn::PYATTN_ISA
