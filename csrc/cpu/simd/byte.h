// 8-bit storage, widened in integer vector arithmetic.
#pragma once

#include <utility>

#include "cpu/simd/vector.h"

namespace pyattn::PYATTN_ISA {
namespace {

#ifndef PYATTN_HAS_BYTE_CONVERSION

typedef int8_t vec_i8 __attribute__((vector_size(kVectorBytes / 4)));
typedef int16_t vec_i16 __attribute__((vector_size(kVectorBytes / 2)));

// Bytes -> 32-bit integers of the same value.
PYATTN_INLINE vec<int32_t> load_bytes(const void* p) {
  vec_i8 x;
  __builtin_memcpy(&x, p, sizeof x);
  return __builtin_convertvector(x, vec<int32_t>);
}

// Bytes -> 16-bit integers of the same value.
PYATTN_INLINE vec_u16 load_words(const void* p) {
  vec_i8 x;
  __builtin_memcpy(&x, p, sizeof x);
  return (vec_u16) __builtin_convertvector(x, vec_i16);
}

// Pairs of neighbouring columns.
PYATTN_INLINE vec<i16_pair> load_pairs(const i8* p) {
  typedef int8_t bytes __attribute__((vector_size(kVectorBytes / 2)));
  bytes x;
  __builtin_memcpy(&x, p, sizeof x);
  return bit_cast<i16_pair>(__builtin_convertvector(x, vec<int16_t>));
}

// c + the products of the pairs.
PYATTN_INLINE vec<int32_t> fma(vec<i16_pair> a, vec<i16_pair> b, vec<int32_t> c) {
#ifdef __SSE2__  // has no multiplication of 32 bits
  typedef int16_t words __attribute__((vector_size(16)));
  return c + (vec<int32_t>)__builtin_ia32_pmaddwd128((words)a, (words)b);
#else
  return c + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

#endif

PYATTN_INLINE vec<float> load(const i8* p) { return __builtin_convertvector(load_bytes(p), vec<float>); }

// The number that a loaded 1 stands for: 2^-8 of a float8 is a half, which takes a multiplication less.
template <class KV>
inline constexpr float kLoadedUnit = std::is_same_v<KV, f8> ? 0x1p8f : 1.0f;

PYATTN_INLINE vec<float> load(const f8* p) {
#ifdef PYATTN_HAS_HALF_CONVERSION
  // Shifted by 7, a byte is such a half, with the sign in bit 14, too. The sum carries into that bit where all bits of the
  // magnitude are set: the half is then a NaN, and otherwise the bit is cleared.
  vec_u16 bits = load_words(p) << 7;
  bits ^= (bits + 0x80) & 0x4000;
  return from_halves(bits);
#else
  const vec<uint32_t> bits = reinterpret_cast<vec<uint32_t>>(load_bytes(p));  // the sign in all upper bits
  const vec<uint32_t> magnitude = (bits & 0x7f) << 20;
  // 2^112 moves the exponent bias from 7 to 127 - 8 and is exact for subnormals.
  const vec<uint32_t> finite = bit_cast<uint32_t>(bit_cast<float>(magnitude) * 0x1p112f);
  return bit_cast<float>((bits & 0x80000000) | (magnitude == 0x07f00000 ? set1<uint32_t>(0x7fc00000) : finite));
#endif
}

// Interleaving takes the low and the high halves of each 128 bits, as instruction sets do: pairs of the columns
// 0 to 3, 8 to 11, .. and of 4 to 7, 12 to 15, ..
inline constexpr int kHalfPiece = 4;

template <std::size_t... I>
PYATTN_INLINE void interleave_rows(vec<i16_pair>& a, vec<i16_pair>& b, std::index_sequence<I...>) {
  constexpr int n = sizeof...(I);
  const auto x = bit_cast<int16_t>(a), y = bit_cast<int16_t>(b);
  a = bit_cast<i16_pair>(__builtin_shufflevector(x, y, (I % 2 * n + I / 8 * 8 + I % 8 / 2)...));
  b = bit_cast<i16_pair>(__builtin_shufflevector(x, y, (I % 2 * n + I / 8 * 8 + I % 8 / 2 + kHalfPiece)...));
}

// Pairs of neighbouring columns of two rows -> pairs of both rows, column by column.
PYATTN_INLINE void interleave_rows(vec<i16_pair>& a, vec<i16_pair>& b) {
  interleave_rows(a, b, std::make_index_sequence<kLanes<int16_t>>{});
}

template <std::size_t... I>
PYATTN_INLINE void order_columns(vec<float>& a, vec<float>& b, std::index_sequence<I...>) {
  constexpr int n = sizeof...(I), kPiece = 2 * kHalfPiece;
  const vec<float> x = a, y = b;
  a = __builtin_shufflevector(x, y, (I % kPiece / kHalfPiece * n + I / kPiece * kHalfPiece + I % kHalfPiece)...);
  b = __builtin_shufflevector(x, y,
                              ((I + n) % kPiece / kHalfPiece * n + (I + n) / kPiece * kHalfPiece + I % kHalfPiece)...);
}

// Columns in the order of interleave_rows -> columns in their own.
PYATTN_INLINE void order_columns(vec<float>& a, vec<float>& b) {
  order_columns(a, b, std::make_index_sequence<kLanes<float>>{});
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
