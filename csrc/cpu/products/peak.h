// The peak that speeds are compared with: multiply-adds between
// registers, in the shape of the products' register tile.
#pragma once

#include <cstdint>

#include "cpu/products/register_product.h"
#include "cpu/simd/simd.h"

namespace pyattn::PYATTN_ISA {
namespace {

#ifdef PYATTN_HAS_TILE_REGISTERS

template <class S>
double peak(int64_t rounds) {
  const TileRegisters registers;
  const auto multiply = [&]<int... kV>(std::integer_sequence<int, kV...>) {
    (zero_register<kV>(), ...);
    for (int64_t round = 0; round < rounds; ++round) (multiply_registers<kV, kRegisterA, kRegisterB>(), ...);
  };
  zero_register<kRegisterA>(), zero_register<kRegisterB>();
  multiply(std::make_integer_sequence<int, kSumRegisters>{});
  return 2.0 * rounds * kSumRegisters * kRegisterWords * kRegisterWords * 2 * kRegisterWords;
}

#else

template <class S>
double peak(int64_t rounds) {
  using T = Compute<S>;
  using E = Operand<S>;
  constexpr int kM = kMR[kMaxNV];
  volatile E zero{};  // read anew for each sum, so the compiler can't know that they are equal
  const vec<E> a = set1(E(zero)), b = set1(E(zero));
  vec<T> sum[kM][kMaxNV];
  for (auto& row : sum)
    for (vec<T>& s : row) s = set1(static_cast<T>(E(zero)));
  for (int64_t round = 0; round < rounds; ++round) {
    PYATTN_UNROLL(16)
    for (int i = 0; i < kM; ++i) {
      PYATTN_UNROLL(16)
      for (int v = 0; v < kMaxNV; ++v) sum[i][v] = fma(a, b, sum[i][v]);
    }
  }
  volatile T sink = 0;
  for (int i = 0; i < kM; ++i)
    for (int v = 0; v < kMaxNV; ++v) sink = sink + sum[i][v][0];
  return 2.0 * rounds * kM * kMaxNV * kLanes<T> * (kPairs<S> ? 2 : 1);
}

#endif

}  // namespace
}  // namespace pyattn::PYATTN_ISA
