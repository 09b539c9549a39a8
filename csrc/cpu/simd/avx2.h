// x86-64-v3: AVX2, FMA, F16C.
#pragma once

#include <immintrin.h>

namespace pyattn::PYATTN_ISA {
inline constexpr int kVectorBytes = 32;
// Rows of a register tile, by its width in vectors. Of 16 registers
// 12 are accumulators, 2 hold B, 1 holds A; 4 x 3 spills.
inline constexpr int kMaxNV = 2;
inline constexpr int kWideNV = 8;
constexpr int kMR[kWideNV + 1] = {0, 12, 6, 3, 2, 2, 1, 1, 1};
}  // namespace pyattn::PYATTN_ISA

#define PYATTN_HAS_HALF_CONVERSION
#define PYATTN_HAS_MULTIPLY_WIDE
#define PYATTN_HAS_BYTE_CONVERSION
#define PYATTN_HAS_HALF_LOADS
#include "cpu/simd/half.h"

namespace pyattn::PYATTN_ISA {
namespace {

PYATTN_INLINE vec<float> fma(vec<float> a, vec<float> b, vec<float> c) { return _mm256_fmadd_ps(a, b, c); }
PYATTN_INLINE vec<double> fma(vec<double> a, vec<double> b, vec<double> c) { return _mm256_fmadd_pd(a, b, c); }

// Returns b where either is NaN.
PYATTN_INLINE vec<float> max(vec<float> a, vec<float> b) { return _mm256_max_ps(a, b); }
PYATTN_INLINE vec<double> max(vec<double> a, vec<double> b) { return _mm256_max_pd(a, b); }

// The CPU multiplies every other lane: first the even ones, then the odd ones.
PYATTN_INLINE vec<uint32_t> multiply_wide(vec<uint32_t> a, vec<uint32_t> b, vec<uint32_t>& high) {
  const __m256i x = (__m256i)a, y = (__m256i)b;
  const __m256i even = _mm256_mul_epu32(x, y),
                odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), _mm256_srli_epi64(y, 32));
  high = (vec<uint32_t>)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
  return (vec<uint32_t>)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
}

PYATTN_INLINE vec<float> load(const bf16* p) {
  return (vec<float>)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16);
}
PYATTN_INLINE vec<float> from_halves(vec_u16 bits) { return _mm256_cvtph_ps((__m128i)bits); }
PYATTN_INLINE vec<float> load(const f16* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
PYATTN_INLINE void store(f16* p, vec<float> x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

// The low and the high half of a vector, from two places.
template <class T>
PYATTN_INLINE vec<T> load_halves(const T* low, const T* high) {
  const __m128i* const from[] = {reinterpret_cast<const __m128i*>(low), reinterpret_cast<const __m128i*>(high)};
  return (vec<T>)_mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(from[0])), _mm_loadu_si128(from[1]), 1);
}

PYATTN_INLINE vec<int32_t> load_bytes(const void* p) {
  return (vec<int32_t>)_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
}

PYATTN_INLINE vec_u16 load_words(const void* p) {
  return (vec_u16)_mm_cvtepi8_epi16(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
}

// Pairs of neighbouring columns.
PYATTN_INLINE vec<i16_pair> load_pairs(const i8* p) {
  return (vec<i16_pair>)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// c + the products of the pairs.
PYATTN_INLINE vec<int32_t> fma(vec<i16_pair> a, vec<i16_pair> b, vec<int32_t> c) {
  return c + (vec<int32_t>)_mm256_madd_epi16((__m256i)a, (__m256i)b);
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA

#include "cpu/simd/byte.h"
