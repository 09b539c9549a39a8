// 8-bit storage, widened in integer vector arithmetic.
#pragma once

#include "cpu/simd/vector.h"

namespace pyattn::PYATTN_ISA {
namespace {

typedef int8_t vec_i8 __attribute__((vector_size(kVectorBytes / 4)));

#ifndef PYATTN_HAS_BYTE_CONVERSION

// Bytes -> 32-bit integers of the same value.
PYATTN_INLINE vec<int32_t> load_bytes(const void* p) {
  vec_i8 x;
  __builtin_memcpy(&x, p, sizeof x);
  return __builtin_convertvector(x, vec<int32_t>);
}

#endif

PYATTN_INLINE vec<float> load(const i8* p) { return __builtin_convertvector(load_bytes(p), vec<float>); }

PYATTN_INLINE vec<float> load(const f8* p) {
  const vec<uint32_t> bits = reinterpret_cast<vec<uint32_t>>(load_bytes(p));  // the sign in all upper bits
  const vec<uint32_t> magnitude = (bits & 0x7f) << 20;
  // 2^120 moves the exponent bias from 7 to 127 and is exact for subnormals.
  const vec<uint32_t> finite = bit_cast<uint32_t>(bit_cast<float>(magnitude) * 0x1p120f);
  return bit_cast<float>((bits & 0x80000000) | (magnitude == 0x07f00000 ? set1<uint32_t>(0x7fc00000) : finite));
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
