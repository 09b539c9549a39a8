// Products of few float rows with rows of int8, as exact sums of integers: a float row is rounded to int16, with a factor,
// and a row of int8 is widened to int16 as it is loaded. VPMADDWD multiplies two terms and adds them. (VPDPWSSD, which adds
// them to the sum, too, takes 0.96 of the time.)
#pragma once

#include "cpu/products/matrix.h"
#include "cpu/simd/math.h"
#include "shared/index.h"

namespace pyattn::PYATTN_ISA {
namespace {

// x[n] -> int16 in pairs; returns their factor.
PYATTN_INLINE float round_to_pairs(const float* x, int64_t n, float largest, i16_pair* pairs) {
  const RoundToInt16 round(x, n, largest);
  auto* to = reinterpret_cast<char*>(pairs);
  for (int64_t d = 0; d < n; d += kLanes<float>, to += sizeof(vec_u16))
    store_bits(to, bit_cast<uint32_t>(round(load(x + d))));
  return round.factor;
}

// The rows of a tile with kNV vectors of sums: 4 rows of 4 vectors, of 32 registers; where there are 16, of 2.
inline constexpr int kInt8Rows = 4;

// O[kRows][kNV vectors] += P[kRows][pairs of keys] V[keys][columns], in the order of interleave_rows.
template <int kRows, int kNV, class Rows>
PYATTN_INLINE void int8_tile(int64_t keys, Matrix<const i16_pair> P, Rows V, Matrix<int32_t> O) {
  constexpr int L = kLanes<int32_t>;
  vec<int32_t> sum[kRows][kNV];
  PYATTN_UNROLL(16)
  for (int r = 0; r < kRows; ++r) {
    PYATTN_UNROLL(16)
    for (int v = 0; v < kNV; ++v) sum[r][v] = load(O.at(r) + v * L);
  }
  const auto add_pair = [&](const i8* even, const i8* odd, int64_t pair) PYATTN_MEMBER_INLINE {
    vec<i16_pair> b[kNV];
    PYATTN_UNROLL(16)
    for (int v = 0; v < kNV; v += 2) {
      b[v] = load_pairs(even + v * L), b[v + 1] = load_pairs(odd + v * L);
      interleave_rows(b[v], b[v + 1]);
    }
    PYATTN_UNROLL(16)
    for (int r = 0; r < kRows; ++r) {
      const vec<i16_pair> a = broadcast(P.at(r) + pair);
      PYATTN_UNROLL(16)
      for (int v = 0; v < kNV; ++v) sum[r][v] = fma(a, b[v], sum[r][v]);
    }
  };
  const int64_t pairs = keys / 2;
  PYATTN_UNROLL(2)
  for (int64_t k = 0; k < pairs; ++k) add_pair(V.at(2 * k), V.at(2 * k + 1), k);
  if (keys % 2) add_pair(V.at(keys - 1), V.at(keys - 1), pairs);  // the weight of the second is 0
  PYATTN_UNROLL(16)
  for (int r = 0; r < kRows; ++r) {
    PYATTN_UNROLL(16)
    for (int v = 0; v < kNV; ++v) store(O.at(r) + v * L, sum[r][v]);
  }
}

template <int kNV, int kRows = kInt8Rows, class Rows, class Ahead>
void int8_panel(int64_t rows, int64_t keys, Matrix<const i16_pair> P, Rows V, Matrix<int32_t> O, Ahead ahead) {
  int64_t r = 0;
  for (; r + kRows <= rows; r += kRows) {
    ahead();
    int8_tile<kRows, kNV>(keys, P.from(r), V, O.from(r));
  }
  if constexpr (kRows > 1)
    if (r < rows) int8_panel<kNV, kRows / 2>(rows - r, keys, P.from(r), V, O.from(r), ahead);
}

// The columns of a product with V of int8: whole groups of two vectors, the last of which ends with the last column.
inline int64_t int8_columns(int64_t cols) { return round_up(cols, 2 * kLanes<int32_t>); }

// O[rows][int8_columns] += P[rows][pairs of keys] V[keys][cols]. Calls ahead(n), altogether for at least as many rows as
// there are keys, before the tiles of the product.
template <class Rows, class Ahead>
void add_int8_values(int64_t rows, int64_t keys, int64_t cols, Matrix<const i16_pair> P, Rows V, Matrix<int32_t> O,
                     Ahead ahead) {
  constexpr int64_t kGroup = 2 * kLanes<int32_t>, kWide = kMaxNV * kLanes<int32_t>;
  const int64_t whole = round_down(cols, kGroup);
  const int64_t tiles = max(1, whole / kWide) * ceil_div(rows, kInt8Rows);  // or more
  const auto beside = [&, n = ceil_div(keys, tiles)] { ahead(n); };
  int64_t d = 0;
  for (; d + kWide <= whole; d += kWide) int8_panel<kMaxNV>(rows, keys, P, V.from_column(d), O.from_column(d), beside);
  for (; d < whole; d += kGroup) int8_panel<2>(rows, keys, P, V.from_column(d), O.from_column(d), beside);
  if (d < cols) int8_panel<2>(rows, keys, P, V.from_column(cols - kGroup), O.from_column(d), beside);
}

// A row of such a product -> row[cols] in float, times a factor; clears the product.
PYATTN_INLINE void take_int8_row(int32_t* product, int64_t cols, float factor, float* row) {
  constexpr int L = kLanes<float>;
  for (int64_t d = 0; d < cols; d += 2 * L) {
    vec<float> a = __builtin_convertvector(load(product + d), vec<float>),
               b = __builtin_convertvector(load(product + d + L), vec<float>);
    store(product + d, vec<int32_t>{}), store(product + d + L, vec<int32_t>{});
    order_columns(a, b);
    float* const to = row + min(d, cols - 2 * L);
    store(to, a * factor), store(to + L, b * factor);
  }
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
