// x86-64-v4: AVX-512 F, BW, CD, DQ, VL.
#pragma once

// gcc 12 initialises _mm512_undefined_ps() with itself, and then warns about it.
#ifndef __clang__
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#ifndef __clang__
#pragma GCC diagnostic pop
#endif

namespace pyattn::PYATTN_ISA {
inline constexpr int kVectorBytes = 64;
// Rows of a register tile, by its width in vectors. Of 32 registers 24 are accumulators,
// 4 hold B, 1 holds A; 4 x 6 and 3 x 8 spill. A tile of one vector has 16 rows: they
// divide most head dimensions evenly, and the keys that a causal mask leaves a strip of 16 lanes.
inline constexpr int kMaxNV = 4;
inline constexpr int kWideNV = 8;
constexpr int kMR[kWideNV + 1] = {0, 16, 12, 8, 6, 4, 3, 3, 2};
}  // namespace pyattn::PYATTN_ISA

#define PYATTN_HAS_HALF_CONVERSION
#define PYATTN_HAS_MULTIPLY_WIDE
#define PYATTN_HAS_BYTE_CONVERSION
#define PYATTN_HAS_WORD_TRANSPOSE
#include "cpu/simd/half.h"

namespace pyattn::PYATTN_ISA {
namespace {

PYATTN_INLINE vec<float> fma(vec<float> a, vec<float> b, vec<float> c) { return _mm512_fmadd_ps(a, b, c); }
PYATTN_INLINE vec<double> fma(vec<double> a, vec<double> b, vec<double> c) { return _mm512_fmadd_pd(a, b, c); }

// Returns b where either is NaN.
PYATTN_INLINE vec<float> max(vec<float> a, vec<float> b) { return _mm512_max_ps(a, b); }
PYATTN_INLINE vec<double> max(vec<double> a, vec<double> b) { return _mm512_max_pd(a, b); }

// The CPU multiplies every other lane: first the even ones, then the odd ones.
PYATTN_INLINE vec<uint32_t> multiply_wide(vec<uint32_t> a, vec<uint32_t> b, vec<uint32_t>& high) {
  const __m512i x = (__m512i)a, y = (__m512i)b;
  const __m512i even = _mm512_mul_epu32(x, y),
                odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), _mm512_srli_epi64(y, 32));
  high = (vec<uint32_t>)_mm512_mask_shuffle_epi32(odd, 0x5555, even, _MM_PERM_CDAB);
  return (vec<uint32_t>)_mm512_mask_shuffle_epi32(even, 0xaaaa, odd, _MM_PERM_CDAB);
}

PYATTN_INLINE vec<float> load(const bf16* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return (vec<float>)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
}
PYATTN_INLINE vec<float> from_halves(vec_u16 bits) { return _mm512_cvtph_ps((__m256i)bits); }
PYATTN_INLINE vec<float> load(const f16* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
PYATTN_INLINE void store(f16* p, vec<float> x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

// Loads and stores of the first n columns by a mask register, where pack.h goes through memory.
PYATTN_INLINE uint32_t first(int64_t n) { return static_cast<uint32_t>((int64_t{1} << n) - 1); }
PYATTN_INLINE vec<float> load(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(first(n), p); }
PYATTN_INLINE vec<double> load(const double* p, int64_t n) { return _mm512_maskz_loadu_pd(first(n), p); }
PYATTN_INLINE void store(float* p, vec<float> x, int64_t n) { _mm512_mask_storeu_ps(p, first(n), x); }
PYATTN_INLINE void store(double* p, vec<double> x, int64_t n) { _mm512_mask_storeu_pd(p, first(n), x); }

// transpose() of words, by instructions that keep their operands; gcc's exchanges overwrite one, and copy it before. First
// the 4 x 4 words of each quarter of four rows, then the quarters.
template <class T>
PYATTN_INLINE void transpose_words(vec<T> (&rows)[16]) {
  static_assert(sizeof(T) == 4);
  __m512i four[16];  // 4 g + c: columns c, c + 4, c + 8, c + 12 of the rows from 4 g on
  PYATTN_UNROLL(16)
  for (int g = 0; g < 16; g += 4) {
    const __m512i a = (__m512i)rows[g], b = (__m512i)rows[g + 1], c = (__m512i)rows[g + 2], d = (__m512i)rows[g + 3];
    const __m512i ab = _mm512_unpacklo_epi32(a, b), cd = _mm512_unpacklo_epi32(c, d);
    const __m512i ab_high = _mm512_unpackhi_epi32(a, b), cd_high = _mm512_unpackhi_epi32(c, d);
    four[g] = _mm512_unpacklo_epi64(ab, cd), four[g + 1] = _mm512_unpackhi_epi64(ab, cd);
    four[g + 2] = _mm512_unpacklo_epi64(ab_high, cd_high), four[g + 3] = _mm512_unpackhi_epi64(ab_high, cd_high);
  }
  PYATTN_UNROLL(16)
  for (int c = 0; c < 4; ++c) {
    const __m512i even = _mm512_shuffle_i32x4(four[c], four[c + 4], 0x88),
                  odd = _mm512_shuffle_i32x4(four[c], four[c + 4], 0xdd),
                  later_even = _mm512_shuffle_i32x4(four[c + 8], four[c + 12], 0x88),
                  later_odd = _mm512_shuffle_i32x4(four[c + 8], four[c + 12], 0xdd);
    rows[c] = (vec<T>)_mm512_shuffle_i32x4(even, later_even, 0x88);
    rows[c + 4] = (vec<T>)_mm512_shuffle_i32x4(odd, later_odd, 0x88);
    rows[c + 8] = (vec<T>)_mm512_shuffle_i32x4(even, later_even, 0xdd);
    rows[c + 12] = (vec<T>)_mm512_shuffle_i32x4(odd, later_odd, 0xdd);
  }
}

PYATTN_INLINE vec<int32_t> load_bytes(const void* p) {
  return (vec<int32_t>)_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}

PYATTN_INLINE vec_u16 load_words(const void* p) {
  return (vec_u16)_mm256_cvtepi8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}

// Pairs of neighbouring columns.
PYATTN_INLINE vec<i16_pair> load_pairs(const i8* p) {
  return (vec<i16_pair>)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// c + the products of the pairs.
PYATTN_INLINE vec<int32_t> fma(vec<i16_pair> a, vec<i16_pair> b, vec<int32_t> c) {
  return c + (vec<int32_t>)_mm512_madd_epi16((__m512i)a, (__m512i)b);
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA

#include "cpu/simd/byte.h"
