// Products of few float rows with rows of int8, as sums of products of bytes: VPDPBUSD multiplies four bytes without a sign
// by four with one, and adds the products to a sum of 32 bits. A float row is rounded to int16, x, as in int8_products.h, of
// which each is 256 high + low, two bytes with a sign; y of int8 becomes y + 128, without one; and
//
//   sum of x y = 256 (sum of high (y + 128)) + sum of low (y + 128) - 128 (sum of x).
//
// Sums are exact modulo 2^32, and no sum of x y leaves 32 bits, so they are those of int8_products.h.
#pragma once

#include "cpu/products/few/byte_tiles.h"
#include "cpu/products/lines_ahead.h"
#include "cpu/products/matrix.h"
#include "cpu/products/scratch.h"
#include "cpu/simd/math.h"
#include "cpu/simd/simd.h"
#include "shared/index.h"

namespace pyattn::PYATTN_ISA {
namespace {

#ifdef PYATTN_HAS_BYTE_PRODUCTS

// x[n], in whole vectors -> int16 in two bytes, given to take(d, high, low) as 16 bytes each; returns their factor, and 128
// times their sum in `bias`.
template <class Take>
PYATTN_INLINE float round_to_bytes(const float* x, int64_t n, float largest, int32_t& bias, Take take) {
  const RoundToInt16 round(x, n, largest);
  vec<int32_t> sum = {};
  for (int64_t d = 0; d < n; d += kLanes<float>) {
    const vec<int32_t> words = round(load(x + d));
    sum += words << 16 >> 16;
    take(d, pack_bytes((words + 128) >> 8), pack_bytes(words));
  }
  bias = 128 * add_lanes<int32_t>(sum);
  return round.factor;
}

// The products of few query rows over int8: their factors and sums in scratch.
struct ByteProducts {
  static constexpr bool kFiniteValues = true, kScalesKeys = true;
  static constexpr int L = kLanes<float>;
  ByteQueries Q;
  ByteWeights P;
  Matrix<int32_t> O;  // [rows][head_dim_v in whole vectors of bytes]
  float* p_factors;   // [rows]: what a 1 in P stands for
  int32_t* p_bias;    // [rows]: 128 times the sum of a row of P
  float* row;         // a row of float of any of these

  void take(Carver& carver, int64_t rows, int64_t, int64_t cols, int64_t cols_v) {
    const int64_t columns = round_up(cols, kBytes), columns_v = round_up(cols_v, kBytes);
    Q = {carver.take<int32_t>(columns / kBytes, Q.kRow * rows), carver.take<int32_t>(rows * kQuads),
         carver.take<float>(4 * rows)};
    P = {carver.take<int32_t>(2 * P.kPlane * rows)};
    O = carver.take<int32_t>(rows, columns_v);
    p_factors = carver.take<float>(rows);
    p_bias = carver.take<int32_t>(rows);
    row = carver.take<float>(max(columns, columns_v));
  }

  ByteProducts from(int64_t r) const { return {Q.from(r), P.from(r, 0), O.from(r), p_factors + r, p_bias + r, row}; }

  template <class Row>
  void start(int64_t rows, int64_t cols, float power, Row queries) const {
    const int64_t columns = round_up(cols, kBytes), whole = round_down(cols, L);
    fill_zero(row, columns);
    for (int64_t r = 0; r < rows; ++r) {
      const float* q = queries(r);
      for (int64_t d = 0; d < whole; d += L) store(row + d, load(q + d) * power);
      for (int64_t d = whole; d < cols; ++d) row[d] = q[d] * power;
      int32_t bias;
      const auto expand = [&](int64_t d, quarter high, quarter low) PYATTN_MEMBER_INLINE {
        int32_t* const to = Q.from(r).vectors.at(d / kBytes) + d % kBytes / 4;
        for (int i = 0; i < 4; ++i)
          for (int e = 0; e < 4; ++e) to[i * kQuads + e] = high[i], to[Q.kPlane + i * kQuads + e] = low[i];
      };
      const float factor = round_to_bytes(row, columns, largest_factor(cols), bias, expand);
      for (int i = 0; i < 4; ++i) Q.factors[4 * r + i] = factor;
      store(Q.from(r).minus_bias, vec<int32_t>{-bias, -bias, -bias, -bias});
    }
    fill_zero(O.data, rows * O.row);
  }

  // The weights of a block, of which the keys in `seen` are not 0.
  void round_weights(int64_t r, float* weights, Range seen, int64_t keys) const {
    const int64_t whole = round_up(keys, L);
    for (int64_t k = 0; k < seen.begin; ++k) weights[k] = 0;
    for (int64_t k = seen.end; k < whole; ++k) weights[k] = 0;
    p_factors[r] = round_to_bytes(weights, whole, largest_factor(whole), p_bias[r],
                                  [&](int64_t k, quarter high, quarter low) PYATTN_MEMBER_INLINE {
                                    __builtin_memcpy(P.high(r, k), &high, sizeof high);
                                    __builtin_memcpy(P.high(r, k) + P.kPlane, &low, sizeof low);
                                  });
  }

  template <class Rows>
  void multiply_keys(int64_t rows, int64_t keys, int64_t cols, Rows K, const float* scales, Matrix<float> out,
                     RowsAhead<Rows>& ahead) const {
    byte_dots(rows, keys, cols, Q, K, scales, out, ahead);
  }

  template <class Rows>
  void add_values(int64_t rows, int64_t keys, int64_t cols, Matrix<float>, int64_t first, Rows V,
                  RowsAhead<Rows>& ahead) const {
    const int64_t tiles = ceil_div(cols, kBytes) * (rows < 4 ? 1 : 2);  // or more
    for (int64_t d = 0; d < cols; d += kBytes)
      byte_panel(rows, keys, min(kBytes, cols - d), P.from(0, first), V.from_column(d), O.from_column(d),
                 [&, n = ceil_div(keys, tiles)] { ahead.take(n); });
  }

  void add_to(Matrix<float> out, int64_t rows, int64_t cols) const {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t d = 0; d < cols; d += kBytes) {
        int32_t* const from = O.at(r) + d;
        vec<int32_t> o[4];
        PYATTN_UNROLL(16)
        for (int i = 0; i < 4; ++i) o[i] = load(from + i * kQuads), store(from + i * kQuads, vec<int32_t>{});
        order_quads(o);
        PYATTN_UNROLL(16)
        for (int i = 0; i < 4; ++i)
          store(row + d + i * kQuads, __builtin_convertvector(o[i] - set1(p_bias[r]), vec<float>) * p_factors[r]);
      }
      float* const to = out.at(r);
      for (int64_t d = 0; d < cols; d += L) store(to + d, load(to + d) + load(row + min(d, cols - L)));
    }
  }
};

#endif

}  // namespace
}  // namespace pyattn::PYATTN_ISA
