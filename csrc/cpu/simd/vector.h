// Vectors of kVectorBytes: GCC's vector extension, the same for every instruction
// set. The language itself provides + - * / and comparisons on vec. The header of
// an instruction set defines kVectorBytes and then includes this one.
#pragma once

#include <cstddef>
#include <type_traits>
#include <utility>

#include "cpu/simd/inline.h"
#include "shared/index.h"
#include "storage.h"

namespace pyattn::PYATTN_ISA {
namespace {

template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(kVectorBytes)));
};
template <class T>
using vec = typename VectorOf<T>::type;

template <class T>
inline constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));

// Vector registers, where an fma reads a factor from memory.
inline constexpr int kVectorRegisters = kVectorBytes == 64 ? 32 : 16;

// Terms in a round of a product's loop. With AVX2 two take 0.93 to 0.98 of the time of one where another program runs on the same
// core, 0.95 to 1.0 elsewhere; without it, 0.97 to 1.02.
inline constexpr int kUnrolledTerms = kVectorBytes == 32 ? 2 : 1;

// 16 bits for each lane of 32.
typedef uint16_t vec_u16 __attribute__((vector_size(kVectorBytes / 2)));

// Compute<S>: the type that values stored as S are computed in.
template <class S>
struct ComputeOf {
  using type = float;
};
template <>
struct ComputeOf<double> {
  using type = double;
};
template <class S>
using Compute = typename ComputeOf<S>::type;

// Integers of the size of T.
template <class T>
struct Bits;
template <>
struct Bits<float> {
  using type = uint32_t;
  using signed_type = int32_t;
};
template <>
struct Bits<double> {
  using type = uint64_t;
  using signed_type = int64_t;
};

// Two bf16, the first in the low half: the operand of products where the instruction set multiplies pairs.
using bf16_pair = uint32_t;

// Two int16, the first in the low half: the operand of products of int8, which are sums of integers and so exact.
using i16_pair = int32_t;

// Operand<S>: the type that products read where values are stored as S.
template <class S>
struct OperandOf {
  using type = Compute<S>;
};
template <>
struct OperandOf<i8> {
  using type = i16_pair;
};
#ifdef PYATTN_HAS_BF16_PAIRS
template <>
struct OperandOf<bf16> {
  using type = bf16_pair;
};
#endif
template <class S>
using Operand = typename OperandOf<S>::type;
template <class S>
inline constexpr bool kPairs = !std::is_same_v<Operand<S>, Compute<S>>;

// Whether products of operands E run on tile registers (products/register_product.h), and the terms that one holds.
#ifdef PYATTN_HAS_TILE_REGISTERS
template <class E>
inline constexpr bool kTileRegisters = std::is_same_v<E, bf16_pair>;
inline constexpr int64_t kRegisterTerms = 16;
#else
template <class E>
inline constexpr bool kTileRegisters = false;
inline constexpr int64_t kRegisterTerms = 1;
#endif

// Sum<S>: the type in which the products of operands of S are summed.
template <class S>
using Sum = std::conditional_t<std::is_same_v<S, i8>, int32_t, Compute<S>>;

// Elements per operand.
template <class S>
inline constexpr int64_t kColumns = kPairs<S> ? 2 : 1;

// Terms of a sum over n elements.
template <class S>
constexpr int64_t terms(int64_t n) {
  return ceil_div(n, kColumns<S>);
}

template <class T>
PYATTN_INLINE vec<T> set1(T x) {
  return x - vec<T>{};
}

template <class T>
PYATTN_INLINE vec<T> load_unaligned(const T* p) {
  vec<T> x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}

PYATTN_INLINE vec<float> load(const float* p) { return load_unaligned(p); }
PYATTN_INLINE vec<double> load(const double* p) { return load_unaligned(p); }
PYATTN_INLINE vec<uint32_t> load(const uint32_t* p) { return load_unaligned(p); }
PYATTN_INLINE vec<int32_t> load(const int32_t* p) { return load_unaligned(p); }
PYATTN_INLINE void store(float* p, vec<float> x) { __builtin_memcpy(p, &x, sizeof x); }
PYATTN_INLINE void store(double* p, vec<double> x) { __builtin_memcpy(p, &x, sizeof x); }
PYATTN_INLINE void store(uint32_t* p, vec<uint32_t> x) { __builtin_memcpy(p, &x, sizeof x); }
PYATTN_INLINE void store(int32_t* p, vec<int32_t> x) { __builtin_memcpy(p, &x, sizeof x); }

// The element at p, aligned or not, on all lanes.
template <class T>
PYATTN_INLINE vec<T> broadcast(const T* p) {
  T x;
  __builtin_memcpy(&x, p, sizeof x);
  return set1(x);
}

// The same lanes, bit for bit, as another element type.
template <class To, class From>
PYATTN_INLINE vec<To> bit_cast(From x) {
  static_assert(sizeof(From) == sizeof(vec<To>));
  return reinterpret_cast<vec<To>>(x);
}

// Converts 32-bit integers below 2^31 to integers as wide as T;
// x holds several vectors of them, of which `part` picks one.
template <class T>
PYATTN_INLINE vec<typename Bits<T>::signed_type> widen(vec<uint32_t> x, int part) {
  typedef uint32_t words __attribute__((vector_size(sizeof(uint32_t) * kLanes<T>)));
  words w;
  __builtin_memcpy(&w, reinterpret_cast<const char*>(&x) + part * sizeof w, sizeof w);
  return __builtin_convertvector(w, vec<typename Bits<T>::signed_type>);
}

#ifndef PYATTN_HAS_MULTIPLY_WIDE

// Returns the low words of the products, and the high words in `high`.
PYATTN_INLINE vec<uint32_t> multiply_wide(vec<uint32_t> a, vec<uint32_t> b, vec<uint32_t>& high) {
  typedef uint64_t wide __attribute__((vector_size(2 * kVectorBytes)));
  const wide product = __builtin_convertvector(a, wide) * __builtin_convertvector(b, wide);
  high = __builtin_convertvector(product >> 32, vec<uint32_t>);
  return __builtin_convertvector(product, vec<uint32_t>);
}

#endif

template <int kStage, class V, std::size_t... I>
PYATTN_INLINE void exchange(V& a, V& b, std::index_sequence<I...>) {
  constexpr int n = sizeof...(I);
  const V low = __builtin_shufflevector(a, b, (I & kStage ? n + I - kStage : I)...);
  b = __builtin_shufflevector(a, b, (I & kStage ? n + I : I + kStage)...);
  a = low;
}

// Transposes a square of registers: log2(lanes) stages, each swapping the off-diagonal halves of 2 x 2 blocks. With kEnd
// below the lanes, transposes each square of kEnd rows and lanes.
template <class T, int kStage = 1, int kEnd = kLanes<T>>
PYATTN_INLINE void transpose(vec<T> (&rows)[kLanes<T>]) {
  if constexpr (kStage < kEnd) {
    PYATTN_UNROLL(16)
    for (int i = 0; i < kLanes<T>; ++i)
      if (!(i & kStage)) exchange<kStage>(rows[i], rows[i + kStage], std::make_index_sequence<kLanes<T>>{});
    transpose<T, 2 * kStage, kEnd>(rows);
  }
}

// a and b -> a: the sums of neighbouring groups of kSize lanes, those of a first, within each block of kBlock lanes of both.
template <int kSize, int kBlock, class V, std::size_t... I>
PYATTN_INLINE void add_neighbours(V& a, V b, std::index_sequence<I...>) {
  constexpr int n = sizeof...(I), half = kBlock / 2;
  // Group g of a block: group 2 g of a's block, or of b's in the second half.
  const auto from = [](int i, int later) constexpr {
    const int at = i % half, lane = i / kBlock * kBlock + at / kSize * 2 * kSize + at % kSize + later;
    return i % kBlock < half ? lane : n + lane;
  };
  a = __builtin_shufflevector(a, b, from(I, 0)...) + __builtin_shufflevector(a, b, from(I, kSize)...);
}

// rows[i] -> rows[0]: lane i holds the sum of the lanes of row i. Neighbours are added within 16 bytes first, in one cheap
// shuffle each, then 16 bytes at a time.
template <class T, int kStage = 1>
PYATTN_INLINE void sum_lanes(vec<T> (&rows)[kLanes<T>]) {
  if constexpr (kStage < kLanes<T>) {
    constexpr int kQuad = min(16 / int{sizeof(T)}, kLanes<T>);
    constexpr int kSize = kStage < kQuad ? 1 : kQuad, kBlock = kStage < kQuad ? kQuad : kLanes<T>;
    PYATTN_UNROLL(16)
    for (int i = 0; i < kLanes<T>; i += 2 * kStage)
      add_neighbours<kSize, kBlock>(rows[i], rows[i + kStage], std::make_index_sequence<kLanes<T>>{});
    sum_lanes<T, 2 * kStage>(rows);
  }
}

template <int kStage, class V, std::size_t... I>
PYATTN_INLINE V swap_lanes(V x, std::index_sequence<I...>) {
  return __builtin_shufflevector(x, x, (I ^ kStage)...);
}

// Combines all lanes into one number by f, of two vectors.
template <class T, int kStage = 1, class F>
PYATTN_INLINE T fold_lanes(vec<T> x, F f) {
  if constexpr (kStage < kLanes<T>)
    return fold_lanes<T, 2 * kStage>(f(x, swap_lanes<kStage>(x, std::make_index_sequence<kLanes<T>>{})), f);
  else
    return x[0];
}

template <class T>
PYATTN_INLINE T add_lanes(vec<T> x) {
  return fold_lanes<T>(x, [](vec<T> a, vec<T> b) PYATTN_MEMBER_INLINE { return a + b; });
}

// The largest lane; none may be NaN.
template <class T>
PYATTN_INLINE T largest_lane(vec<T> x) {
  return fold_lanes<T>(x, [](vec<T> a, vec<T> b) PYATTN_MEMBER_INLINE { return a > b ? a : b; });
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
