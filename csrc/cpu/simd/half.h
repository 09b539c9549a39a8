// 16-bit storage, widened and rounded (to nearest, ties to even; NaN
// stays NaN) in integer vector arithmetic. bf16 is always rounded
// here; the other conversions serve instruction sets that lack them.
#pragma once

#include "cpu/simd/vector.h"

namespace pyattn::PYATTN_ISA {
namespace {

PYATTN_INLINE void store_bits(void* p, vec<uint32_t> x) {
  const vec_u16 narrow = __builtin_convertvector(x, vec_u16);
  __builtin_memcpy(p, &narrow, sizeof narrow);
}

PYATTN_INLINE void store(bf16* p, vec<float> x) {
  const vec<uint32_t> bits = bit_cast<uint32_t>(x);
  const vec<uint32_t> rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  store_bits(p, x == x ? rounded : (bits >> 16) | 0x40);  // 0x40 keeps a NaN whose payload was all in the low half
}

#ifndef PYATTN_HAS_HALF_CONVERSION

PYATTN_INLINE vec<uint32_t> load_bits(const void* p) {
  vec_u16 x;
  __builtin_memcpy(&x, p, sizeof x);
  return __builtin_convertvector(x, vec<uint32_t>);
}

PYATTN_INLINE vec<float> load(const bf16* p) { return bit_cast<float>(load_bits(p) << 16); }

PYATTN_INLINE vec<float> load(const f16* p) {
  const vec<uint32_t> bits = load_bits(p), magnitude = (bits & 0x7fff) << 13;
  // 2^112 moves the exponent bias from 15 to 127 and is exact for subnormals.
  const vec<uint32_t> finite = bit_cast<uint32_t>(bit_cast<float>(magnitude) * 0x1p112f);
  const vec<uint32_t> special = magnitude | 0x7f800000;
  return bit_cast<float>(((bits & 0x8000) << 16) | (magnitude >= 0x0f800000 ? special : finite));
}

PYATTN_INLINE void store(f16* p, vec<float> x) {
  const vec<uint32_t> bits = bit_cast<uint32_t>(x), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
  const vec<uint32_t> normal = (magnitude - 0x38000000 + 0x0fff + ((magnitude >> 13) & 1)) >> 13;
  // Adding 0.5 leaves a subnormal's 10 bits, rounded, at the low end of the mantissa.
  const vec<uint32_t> subnormal = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000;
  vec<uint32_t> half = magnitude < 0x38800000 ? subnormal : normal;
  half = magnitude >= 0x477ff000 ? set1<uint32_t>(0x7c00) : half;  // 65520 and above round to inf
  half = magnitude > 0x7f800000 ? set1<uint32_t>(0x7e00) : half;
  store_bits(p, sign | half);
}

#endif

}  // namespace
}  // namespace pyattn::PYATTN_ISA
