// Tiles of few query rows, S[rows][keys] with keys on the lanes: softmax row by row, and the product with V where rows
// do not see every key.
#pragma once

#include "cpu/products/pack.h"
#include "cpu/products/product.h"
#include "cpu/tiles/softmax.h"
#include "cpu/tiles/strips.h"
#include "shared/mask.h"

namespace pyattn::PYATTN_ISA {
namespace {

// The number that a row's exponents subtract, and the factor that rescales its earlier sums.
template <class T>
struct RowShift {
  vec<T> shift, decay;
};

// Hides the keys of s[begin, end), whole vectors, that are not in `seen`, and raises row_max to the largest score.
template <class T, class Score>
RowShift<T> raise_row_max(T* s, int64_t begin, int64_t end, Range seen, Score score, T& row_max) {
  constexpr int L = kLanes<T>;
  for (int64_t k = begin; k < seen.begin; ++k) s[k] = kNegInf<T>;
  for (int64_t k = seen.end; k < end; ++k) s[k] = kNegInf<T>;
  vec<T> largest = set1(row_max);
  for (int64_t k = begin; k < end; k += L) largest = max(load(s + k), largest);
  const vec<T> before = set1(row_max);
  row_max = largest_lane<T>(largest);
  const vec<T> shift = finite_shift<T>(set1(row_max));
  return {shift, score.exp(before - shift)};
}

// s[keys] -> P = exp(s - row_max) in place, for one row and the keys in `seen`.
// Updates row_max and row_sum[lanes]; returns the factor that rescales earlier sums.
template <class T, class Score>
T softmax_row(T* s, Range seen, Score score, T& row_max, T* row_sum) {
  constexpr int L = kLanes<T>;
  const int64_t begin = round_down(seen.begin, L), end = round_up(seen.end, L);
  const auto [shift, decay] = raise_row_max(s, begin, end, seen, score, row_max);
  vec<T> sum = load(row_sum) * decay;
  for (int64_t k = begin; k < end; k += L) {
    const vec<T> p = score.exp(load(s + k) - shift);
    sum += p;
    store(s + k, p);
  }
  store(row_sum, sum);
  return decay[0];
}

// The same for all keys of a block, without the sum: masked keys become 0, which enter the product with V.
template <class T, class Score>
T softmax_row_whole(T* s, int64_t keys, Range seen, Score score, T& row_max) {
  const int64_t end = round_up(keys, kLanes<T>);
  const auto [shift, decay] = raise_row_max(s, 0, end, seen, score, row_max);
  for (int64_t k = 0; k < end; k += kLanes<T>) store(s + k, score.exp(load(s + k) - shift));
  return decay[0];
}

// row_sum[rows] = row_sum * decay + the sums of P[rows][keys], added up key by key, as in softmax_strip. An addition waits
// for the one before it, so four rows are added up side by side.
template <int kRows = 4, class T>
void sum_rows_in_order(Matrix<T> P, int64_t rows, int64_t keys, const T* decay, T* row_sum) {
  int64_t r = 0;
  for (; r + kRows <= rows; r += kRows) {
    T sum[kRows] = {};
    for (int64_t k = 0; k < keys; ++k) {
      PYATTN_UNROLL(16)
      for (int i = 0; i < kRows; ++i) sum[i] += P.from(r + i).data[k];
    }
    PYATTN_UNROLL(16)
    for (int i = 0; i < kRows; ++i) row_sum[r + i] = fma(set1(row_sum[r + i]), set1(decay[r + i]), set1(sum[i]))[0];
  }
  if constexpr (kRows > 1)
    if (r < rows) sum_rows_in_order<kRows / 2>(P.from(r), rows - r, keys, decay + r, row_sum + r);
}

// Masks scores[keys] of row r in `seen` that lie between its intervals.
template <class T>
void hide_gaps(const Mask& mask, const Tile& tile, int64_t r, Range seen, T* scores) {
  int64_t k = seen.begin;
  for (int64_t n = 0; n < mask.intervals(); ++n) {
    const Range keys = mask.keys_of(r, n).within(tile.n0, tile.keys);
    if (keys.empty()) continue;
    for (; k < keys.begin; ++k) scores[k] = kNegInf<T>;
    k = keys.end;
  }
  for (; k < seen.end; ++k) scores[k] = kNegInf<T>;
}

// Masks scores[keys] of row r between the first and the last key that it sees, and returns these keys.
template <class S, class T = Compute<S>>
Range mask_scores(const Mask& mask, const Tile& tile, int64_t r, T* scores) {
  const Range seen = mask.keys_of(r).within(tile.n0, tile.keys);
  if (mask.intervals() > 1) hide_gaps(mask, tile, r, seen, scores);
  mask.each_filter<S>(r, [&](auto shown) {
    for (int64_t k = seen.begin; k < seen.end; ++k) scores[k] = shown(tile.n0 + k) ? scores[k] : kNegInf<T>;
  });
  return seen;
}

// O[rows][cols] += P[rows][keys] V[keys][cols], for the keys of a block that each row sees.
// Keys that every row sees are multiplied in one product, the others row by row. So a row is
// never multiplied by a value that it does not see, which may be NaN. If V is not finite,
// keys in holes are skipped too. Rows is a Matrix or a RowTable.
template <class S, class Rows>
class BlockProduct {
  using T = Compute<S>;
  using KV = typename Rows::Element;

 public:
  BlockProduct(const ForwardParams& p, const Mask& mask, const Tile& tile, Matrix<T> P, Rows V)
      : cols_(p.head_dim_v),
        mask_(mask),
        tile_(tile),
        P_(P),
        V_(V),
        select_(mask.any_holes(0, tile.rows) && !all_finite<KV>(tile.keys, cols_, [&](int64_t j) { return V.at(j); })) {
  }

  void add_to(Matrix<T> O) const {
    for (int64_t n = 0; n < mask_.intervals(); ++n) {
      const Range common = mask_.keys_of_all(0, tile_.rows, n).within(tile_.n0, tile_.keys);
      add_rows(O, 0, tile_.rows, common);
      for (int64_t r = 0; r < tile_.rows; ++r) {
        const Range seen = mask_.keys_of(r, n).within(tile_.n0, tile_.keys);
        const Range apart[] = {{seen.begin, min(seen.end, common.begin)}, {max(seen.begin, common.end), seen.end}};
        for (const Range keys : apart)
          if (!keys.empty()) add_rows(O, r, 1, keys);
      }
    }
  }

 private:
  // A product's factors and its columns, for some rows and keys.
  struct Factors {
    Strided<T> weights;  // [rows][keys]
    Rows values;         // [keys][cols]
    int64_t rows, cols;
    Range keys;
  };

  int64_t cols_;  // head_dim_v
  const Mask& mask_;
  const Tile& tile_;
  Matrix<T> P_;
  Rows V_;
  bool select_;  // whether keys in holes are left out one by one

  void add_rows(Matrix<T> O, int64_t r, int64_t rows, Range keys) const {
    const int64_t whole = round_down(cols_, kLanes<T>);
    const Strided<T> weights = P_.strided().from(r, keys.begin);
    const Rows values = V_.from(keys.begin);
    add_columns({weights, values, rows, whole, keys}, r, O.from(r));
    if (whole < cols_)
      add_columns({weights, values.from_column(cols_ - kLanes<T>), rows, kLanes<T>, keys}, r,
                  O.from(r).from_column(whole));
  }

  void add_columns(const Factors& f, int64_t r, Matrix<T> O) const {
    if (select_)
      gemm_seen<T, T, Rows>(f.rows, 0, f.cols, f.keys.count(), f.weights, f.values, O, Update<T>::add(),
                            [&](int64_t i, int64_t, int64_t k) {
                              const bool sees = mask_.sees<S>(r + i, tile_.n0 + f.keys.begin + k);
                              return set1(static_cast<T>(sees)) != vec<T>{};
                            });
    else
      gemm<T, T, Rows, kWideNV>(f.rows, 0, f.cols, f.keys.count(), f.weights, f.values, O, Update<T>::add());
  }
};

}  // namespace
}  // namespace pyattn::PYATTN_ISA
