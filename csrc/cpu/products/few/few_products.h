// The products of few query rows: their factors and sums in scratch. Columns lie on the lanes. Rows of K and V are read
// in place, one after another, or widened once a turn (kWidensTurns in operand.h).
#pragma once

#include "cpu/products/few/byte_products.h"
#include "cpu/products/few/int8_products.h"
#include "cpu/products/lines_ahead.h"
#include "cpu/products/operand.h"
#include "cpu/products/pack.h"
#include "cpu/products/product.h"
#include "cpu/products/scratch.h"

namespace pyattn::PYATTN_ISA {
namespace {

// O[rows][columns of a part] += P[rows][terms] V[terms][cols], continuing earlier sums. Prefetches later rows, a share of
// one beside each term of a tile. Values of 8 bits are widened for four rows at once, and widened ones lie in L1; others are
// read by two rows or one, whose tiles take whole rows of V.
template <class KV, class E, class Rows, class T, class Ahead>
void add_values(int64_t rows, int64_t terms, int64_t cols, Strided<E> P, Rows V, Matrix<T> O, Ahead& ahead) {
  constexpr int L = kLanes<T>, kTileRows = 4;
  constexpr bool kByFour = sizeof(KV) == 1 || sizeof(typename Rows::Element) > sizeof(KV);
  constexpr int kNV = kByFour ? kMaxNV : kWideNV;
  const int64_t whole = round_down(cols, L), panels = max(1, whole / (kNV * L));
  const int64_t tiles = panels * ceil_div(rows, kByFour ? kTileRows : kMR[min(whole / L, kNV)]);  // or more
  const int64_t lines = ceil_div(cols * int64_t{sizeof(KV)}, tiles * kCacheLine);
  const auto beside = [&](int64_t) PYATTN_MEMBER_INLINE { ahead.take_lines(lines); };
  int64_t d = 0;
  if constexpr (kByFour)
    for (; d + kNV * L <= whole; d += kNV * L)
      gemm_panel<kNV, T, E, Rows, Resume<T>, decltype(beside), kTileRows>(rows, terms, P, V, O, d, Resume<T>(), beside);
  gemm<T, E, Rows, kNV>(rows, d, whole, terms, P, V, O, Resume<T>(), beside);
  if (whole < cols)
    gemm<T, E, Rows, 1>(rows, 0, L, terms, P, V.from_column(cols - L), O.from_column(whole), Resume<T>());
}

// Keys of a turn of four rows or more, but for pairs of bf16.
inline constexpr int64_t kLongTurn = 32;

// Queries and sums of S, keys and values stored as KV, which are widened as they are loaded.
template <class S, class KV>
struct FewProducts {
  using T = Compute<S>;
  static constexpr bool kWidens = kWidensTurns<S, KV>;
  static constexpr bool kFiniteValues = false;  // whether V holds neither NaN nor inf
  static constexpr bool kScalesKeys = false;  // whether it multiplies K, too, and the scores by the scales of K's rows
  Matrix<Operand<S>> Q;                       // [rows][few_terms(head_dim)]
  Matrix<T> O;                                // [rows][columns of a part]: the product of at most kSumKeys keys, then 0
  Matrix<T> wide;                             // [keys of a turn][columns]: rows of K or V, where they are widened once

  void take(Carver& carver, int64_t rows, int64_t, int64_t cols, int64_t cols_v) {
    Q = carver.take<Operand<S>>(rows, few_terms<S>(cols));
    O = carver.take<T>(rows, round_up(cols_v, kLanes<T>));
    wide = carver.take<T>(kWidens && rows >= kSideBySide ? kLongTurn : 0, round_up(max(cols, cols_v), kLanes<T>));
  }

  FewProducts from(int64_t r) const { return {Q.from(r), O.from(r), wide}; }

  template <class Row>
  void start(int64_t rows, int64_t cols, T power, Row row) const {
    pack_few_queries<S>(Q, rows, cols, power, row);
    fill_zero(O.data, rows * O.row);
  }

  static T query_factor(int64_t) { return 1; }
  static void round_weights(int64_t, T*, Range, int64_t) {}

  template <class Rows, class Ahead>
  void add_values(int64_t rows, int64_t keys, int64_t cols, Matrix<T> P, int64_t, Rows V, Ahead& ahead) const {
    with_rows(rows, keys, cols, V, ahead, [&](auto rows_of_v, auto& later) PYATTN_MEMBER_INLINE {
      pyattn::PYATTN_ISA::add_values<KV>(rows, keys, cols, P.strided(), rows_of_v, O, later);
    });
  }

  // Calls f with rows of K or V and with those to prefetch: in place, or for four query rows or more widened, beside which
  // all later ones are prefetched. A turn has at most kLongTurn keys.
  template <class Rows, class Ahead, class F>
  PYATTN_MEMBER_INLINE void with_rows(int64_t query_rows, int64_t keys, int64_t cols, Rows rows, Ahead& ahead,
                                      F f) const {
    if constexpr (kWidens)
      if (query_rows >= kSideBySide) {
        pack_rows<KV>(wide, keys, cols, [&](int64_t i) {
          ahead.take(1);
          return rows.at(i);
        });
        NoRowsAhead none;
        return f(Matrix<const T>(wide), none);
      }
    f(rows, ahead);
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

  // Rows of int8 are read in place.
  template <class Rows, class Ahead, class F>
  PYATTN_MEMBER_INLINE void with_rows(int64_t, int64_t, int64_t, Rows rows, Ahead& ahead, F f) const {
    f(rows, ahead);
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
