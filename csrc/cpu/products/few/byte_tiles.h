// Register tiles of byte_products.h: dot products of query rows of bytes with keys, and sums of values of bytes.
#pragma once

#include "cpu/products/lines_ahead.h"
#include "cpu/products/matrix.h"
#include "cpu/simd/simd.h"
#include "shared/index.h"

namespace pyattn::PYATTN_ISA {
namespace {

// Keys of a block, at most.
inline constexpr int64_t kByteKeys = 128;

#ifdef PYATTN_HAS_BYTE_PRODUCTS

// Bytes of a vector, and its quads (simd/vnni.h).
inline constexpr int64_t kBytes = kVectorBytes, kQuads = kLanes<int32_t>;

// n int8 -> themselves + 128; the others of the vector become 128.
PYATTN_INLINE vec<int32_t> load_unsigned(const i8* p, int64_t n) {
  return load_bytes(p, n) ^ static_cast<int32_t>(0x80808080);
}

// a + 256 high + low, modulo 2^32.
PYATTN_INLINE vec<int32_t> join_sums(vec<int32_t> a, vec<int32_t> high, vec<int32_t> low) {
  return bit_cast<int32_t>(bit_cast<uint32_t>(a) + (bit_cast<uint32_t>(high) << 8) + bit_cast<uint32_t>(low));
}

// Queries, [columns of a vector of bytes][row][high, low][4 vectors]: quad 4 l + i of these columns fills the quarter l of
// vector i, as transpose_quarters places the quads of four keys.
struct ByteQueries {
  static constexpr int64_t kPlane = 4 * kQuads, kRow = 2 * kPlane;
  Matrix<int32_t> vectors;
  int32_t* minus_bias;  // [rows][kQuads]: -128 (sum of x) in the first quarter, 0 elsewhere
  float* factors;       // [rows][4]: what a 1 stands for

  ByteQueries from(int64_t r) const {
    return {vectors.from_column(kRow * r), minus_bias + kQuads * r, factors + 4 * r};
  }
};

// x[kRows], K[keys][cols], times scales[keys] -> out[kRows][keys, up to whole tiles] in float. Prefetches a later line for
// each line of K.
template <int kRows, class Rows>
[[gnu::noinline]] void byte_dots_tiles(int64_t keys, int64_t cols, const ByteQueries& x, Rows K, const float* scales,
                                       const Matrix<float>& out, RowsAhead<Rows>& ahead) {
  constexpr int kSquares = kRows == 1 ? 4 : 2, kKeys = 4 * kSquares, kSums = kRows * kSquares;
  // Multiplies the keys j to j + last, of which the last one is repeated.
  const auto multiply = [&](int64_t j, int64_t last) PYATTN_MEMBER_INLINE {
    ahead.take(kKeys);
    vec<int32_t> sum[kSums][2];
    PYATTN_UNROLL(16)
    for (int i = 0; i < kSums; ++i) sum[i][0] = vec<int32_t>{}, sum[i][1] = load(x.minus_bias + i % kRows * kQuads);
    PYATTN_UNROLL(1)
    for (int64_t d = 0; d < cols; d += kBytes) {
      const int32_t* vectors = x.vectors.at(d / kBytes);
      asm("" : "+r"(vectors));  // one address for all; gcc would keep one for each vector, and spill
      const int64_t n = min(kBytes, cols - d);
      vec<int32_t> square[kSquares][4];
      PYATTN_UNROLL(16)
      for (int g = 0; g < kSquares; ++g) {
        PYATTN_UNROLL(16)
        for (int i = 0; i < 4; ++i) square[g][i] = load_unsigned(K.at(j + min(4 * g + i, last)) + d, n);
        transpose_quarters(square[g]);
      }
      PYATTN_UNROLL(16)
      for (int i = 0; i < 4; ++i) {
        PYATTN_UNROLL(16)
        for (int r = 0; r < 2 * kRows; ++r) {
          const vec<int32_t> q = load(vectors + r * x.kPlane + i * kQuads);
          PYATTN_UNROLL(16)
          for (int g = 0; g < kSquares; ++g) {
            vec<int32_t>& s = sum[g * kRows + r / 2][r % 2];
            s = add_byte_products(square[g][i], q, s);
          }
        }
      }
    }
    PYATTN_UNROLL(16)
    for (int n = 0; n < kSums; n += 4) {
      vec<int32_t> total[4];
      PYATTN_UNROLL(16)
      for (int i = 0; i < 4; ++i) total[i] = join_sums(vec<int32_t>{}, sum[n + i][0], sum[n + i][1]);
      const vec<float> scores = __builtin_convertvector(sum_quarters(total), vec<float>);
      // Quarters are rows, then groups of four keys.
      const vec<float> factors = repeat_rows<kRows>(x.factors) * repeat_keys<kRows>(scales + j + n / kRows * 4);
      PYATTN_UNROLL(16)
      for (int i = 0; i < 4; ++i) store_quarter(out.at(i % kRows) + j + (n + i) / kRows * 4, scores * factors, i);
    }
  };
  int64_t j = 0;
  PYATTN_UNROLL(1)
  for (; j + kKeys <= keys; j += kKeys) multiply(j, kKeys - 1);
  if (j < keys) multiply(j, keys - 1 - j);
}

// The same for any number of rows.
template <int kRows = 4, class Rows>
PYATTN_INLINE void byte_dots(int64_t rows, int64_t keys, int64_t cols, const ByteQueries& x, Rows K,
                             const float* scales, Matrix<float> out, RowsAhead<Rows>& ahead) {
  RowsAhead<Rows> none{};
  int64_t r = 0;
  for (; r + kRows <= rows; r += kRows)
    byte_dots_tiles<kRows>(keys, cols, x.from(r), K, scales, out.from(r), r == 0 ? ahead : none);
  if constexpr (kRows > 1)
    if (r < rows) byte_dots<kRows / 2>(rows - r, keys, cols, x.from(r), K, scales, out.from(r), r == 0 ? ahead : none);
}

// Weights, [row][high, low][quads of keys].
struct ByteWeights {
  static constexpr int64_t kPlane = kByteKeys / 4;
  int32_t* quads;

  int32_t* high(int64_t r, int64_t key) const { return quads + 2 * kPlane * r + key / 4; }
  ByteWeights from(int64_t r, int64_t key) const { return {high(r, key)}; }
};

// O[kRows][kVectors vectors] += P[kRows][keys] V[keys][columns]: the vectors from kFirst on of the four that
// interleave_quads makes of at most kBytes columns.
template <int kRows, int kVectors, int kFirst, class Rows>
[[gnu::noinline]] void byte_tile(int64_t keys, int64_t columns, const ByteWeights& P, Rows V,
                                 const Matrix<int32_t>& O) {
  vec<int32_t> sum[2 * kRows][kVectors] = {};
  const auto add_quad = [&](int64_t k, int64_t last) PYATTN_MEMBER_INLINE {
    vec<int32_t> v[4];
    PYATTN_UNROLL(16)
    for (int i = 0; i < 4; ++i) v[i] = load_unsigned(V.at(k + min(i, last)), columns);
    interleave_quads<kVectors, kFirst>(v);
    PYATTN_UNROLL(16)
    for (int r = 0; r < 2 * kRows; ++r) {
      const vec<int32_t> p = broadcast(P.quads + r * P.kPlane + k / 4);
      PYATTN_UNROLL(16)
      for (int i = 0; i < kVectors; ++i) sum[r][i] = add_byte_products(v[i], p, sum[r][i]);
    }
  };
  int64_t k = 0;
  PYATTN_UNROLL(1)
  for (; k + 4 <= keys; k += 4) add_quad(k, 3);
  if (k < keys) add_quad(k, keys - 1 - k);  // the weights of the others are 0
  PYATTN_UNROLL(16)
  for (int r = 0; r < kRows; ++r) {
    PYATTN_UNROLL(16)
    for (int i = 0; i < kVectors; ++i) {
      int32_t* const o = O.at(r) + (kFirst + i) * kQuads;
      store(o, join_sums(load(o), sum[2 * r][i], sum[2 * r + 1][i]));
    }
  }
}

// The same for any number of rows and four vectors. Calls ahead() before each tile.
template <int kRows = 4, class Rows, class Ahead>
PYATTN_INLINE void byte_panel(int64_t rows, int64_t keys, int64_t columns, ByteWeights P, Rows V, Matrix<int32_t> O,
                              Ahead ahead) {
  int64_t r = 0;
  for (; r + kRows <= rows; r += kRows) {
    ahead();
    if constexpr (kRows == 4) {  // sums of four vectors would be all registers
      byte_tile<kRows, 2, 0>(keys, columns, P.from(r, 0), V, O.from(r));
      ahead();
      byte_tile<kRows, 2, 2>(keys, columns, P.from(r, 0), V, O.from(r));
    } else {
      byte_tile<kRows, 4, 0>(keys, columns, P.from(r, 0), V, O.from(r));
    }
  }
  if constexpr (kRows > 1)
    if (r < rows) byte_panel<kRows / 2>(rows - r, keys, columns, P.from(r, 0), V, O.from(r), ahead);
}

#endif

}  // namespace
}  // namespace pyattn::PYATTN_ISA
