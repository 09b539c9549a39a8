// x86-64-v4 with AVX512_BF16: VDPBF16PS computes two products of bf16 in the time of one of float. Each CPU that has it also
// has AVX512_VNNI.
#pragma once

#define PYATTN_HAS_BF16_PAIRS
#include "cpu/simd/avx512.h"

namespace pyattn::PYATTN_ISA {
namespace {

PYATTN_INLINE vec<float> fma(vec<bf16_pair> a, vec<bf16_pair> b, vec<float> c) {
  return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b);
}

// low and high -> pairs, rounded to nearest even; subnormal numbers become 0.
PYATTN_INLINE vec<bf16_pair> make_pairs(vec<float> low, vec<float> high) {
  const __m512i interleave = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22,
                                              6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return (vec<bf16_pair>)_mm512_permutexvar_epi16(interleave, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

// Neighbouring lanes -> pairs, in half as many words.
PYATTN_INLINE void store_pairs(bf16_pair* p, vec<float> x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(x));
}

// Loads the first n elements and pads with zeros.
PYATTN_INLINE vec<bf16_pair> load_pairs(const bf16* p, int64_t n) {
  return (vec<bf16_pair>)_mm512_maskz_loadu_epi16(first(n), p);
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA

#include "cpu/simd/vnni.h"
