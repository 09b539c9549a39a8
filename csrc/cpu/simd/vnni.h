// AVX512_VNNI: VPDPBUSD computes four products of bytes in the time of one of float. Four neighbouring bytes of a row, or the
// bytes of four rows in one column, are a quad; four lanes of a vector, a quarter.
#pragma once

#define PYATTN_HAS_BYTE_PRODUCTS

namespace pyattn::PYATTN_ISA {
namespace {

typedef int32_t quarter __attribute__((vector_size(kVectorBytes / 4)));

// sum + the products of four bytes: those of a have no sign, those of b have one.
PYATTN_INLINE vec<int32_t> add_byte_products(vec<int32_t> a, vec<int32_t> b, vec<int32_t> sum) {
  return (vec<int32_t>)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
}

// Loads the first n > 0 bytes and pads with zeros.
PYATTN_INLINE vec<int32_t> load_bytes(const i8* p, int64_t n) {
  return (vec<int32_t>)_mm512_maskz_loadu_epi8(~uint64_t{0} >> (kVectorBytes - n), p);
}

// The lowest byte of each lane.
PYATTN_INLINE quarter pack_bytes(vec<int32_t> x) { return (quarter)_mm512_cvtepi32_epi8((__m512i)x); }

// Stores the quarter i of x.
PYATTN_INLINE void store_quarter(float* p, vec<float> x, int i) {
  __builtin_memcpy(p, reinterpret_cast<const float*>(&x) + 4 * i, kVectorBytes / 4);
}

// n is 1, 2 or 4. x[n][4] -> a vector that has these quarters 4 / n times.
template <int n>
PYATTN_INLINE vec<float> repeat_rows(const float* x) {
  if constexpr (n == 4) return _mm512_loadu_ps(x);
  if constexpr (n == 2) return _mm512_broadcast_f32x8(_mm256_loadu_ps(x));
  return _mm512_broadcast_f32x4(_mm_loadu_ps(x));
}

// x[4 / n][4] -> a vector that has each of these quarters n times.
template <int n>
PYATTN_INLINE vec<float> repeat_keys(const float* x) {
  if constexpr (n == 4) return _mm512_broadcast_f32x4(_mm_loadu_ps(x));
  if constexpr (n == 2) {
    const __m512 two = _mm512_broadcast_f32x8(_mm256_loadu_ps(x));
    return _mm512_shuffle_f32x4(two, two, 0x50);
  }
  return _mm512_loadu_ps(x);
}

// Transposes the four squares of four lanes that lie in the quarters of four rows.
PYATTN_INLINE void transpose_quarters(vec<int32_t> (&rows)[4]) {
  const __m512i a = (__m512i)rows[0], b = (__m512i)rows[1], c = (__m512i)rows[2], d = (__m512i)rows[3];
  const __m512i ab = _mm512_unpacklo_epi32(a, b), cd = _mm512_unpacklo_epi32(c, d);
  const __m512i ab_high = _mm512_unpackhi_epi32(a, b), cd_high = _mm512_unpackhi_epi32(c, d);
  rows[0] = (vec<int32_t>)_mm512_unpacklo_epi64(ab, cd), rows[1] = (vec<int32_t>)_mm512_unpackhi_epi64(ab, cd);
  rows[2] = (vec<int32_t>)_mm512_unpacklo_epi64(ab_high, cd_high);
  rows[3] = (vec<int32_t>)_mm512_unpackhi_epi64(ab_high, cd_high);
}

// The quarter i of the result is the sum of the quarters of x[i].
PYATTN_INLINE vec<int32_t> sum_quarters(const vec<int32_t> (&x)[4]) {
  const auto halves = [](vec<int32_t> a, vec<int32_t> b) PYATTN_MEMBER_INLINE {  // of a, then of b
    const __m512i first = _mm512_shuffle_i32x4((__m512i)a, (__m512i)b, 0x44);
    return (vec<int32_t>)_mm512_shuffle_i32x4((__m512i)a, (__m512i)b, 0xee) + (vec<int32_t>)first;
  };
  const __m512i ab = (__m512i)halves(x[0], x[1]), cd = (__m512i)halves(x[2], x[3]);
  return (vec<int32_t>)_mm512_shuffle_i32x4(ab, cd, 0x88) + (vec<int32_t>)_mm512_shuffle_i32x4(ab, cd, 0xdd);
}

// Four rows of 64 bytes -> the quads of their columns: those of the columns 16 l + 4 i to 16 l + 4 i + 3 fill the quarter l
// of vector i. kCount of these vectors, 2 or 4, from kFirst on, replace the first rows.
template <int kCount, int kFirst>
PYATTN_INLINE void interleave_quads(vec<int32_t> (&rows)[4]) {
  const __m512i a = (__m512i)rows[0], b = (__m512i)rows[1], c = (__m512i)rows[2], d = (__m512i)rows[3];
  int i = 0;
  if constexpr (kFirst == 0) {
    const __m512i ab = _mm512_unpacklo_epi8(a, b), cd = _mm512_unpacklo_epi8(c, d);
    rows[0] = (vec<int32_t>)_mm512_unpacklo_epi16(ab, cd), rows[1] = (vec<int32_t>)_mm512_unpackhi_epi16(ab, cd);
    i = 2;
  }
  if constexpr (kFirst + kCount == 4) {
    const __m512i ab = _mm512_unpackhi_epi8(a, b), cd = _mm512_unpackhi_epi8(c, d);
    rows[i] = (vec<int32_t>)_mm512_unpacklo_epi16(ab, cd), rows[i + 1] = (vec<int32_t>)_mm512_unpackhi_epi16(ab, cd);
  }
}

// Sums over the columns of interleave_quads' vectors -> sums in the order of columns.
PYATTN_INLINE void order_quads(vec<int32_t> (&x)[4]) {
  const __m512i a = (__m512i)x[0], b = (__m512i)x[1], c = (__m512i)x[2], d = (__m512i)x[3];
  const __m512i ab = _mm512_shuffle_i32x4(a, b, 0x44), cd = _mm512_shuffle_i32x4(c, d, 0x44);
  const __m512i ab_high = _mm512_shuffle_i32x4(a, b, 0xee), cd_high = _mm512_shuffle_i32x4(c, d, 0xee);
  x[0] = (vec<int32_t>)_mm512_shuffle_i32x4(ab, cd, 0x88), x[1] = (vec<int32_t>)_mm512_shuffle_i32x4(ab, cd, 0xdd);
  x[2] = (vec<int32_t>)_mm512_shuffle_i32x4(ab_high, cd_high, 0x88);
  x[3] = (vec<int32_t>)_mm512_shuffle_i32x4(ab_high, cd_high, 0xdd);
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
