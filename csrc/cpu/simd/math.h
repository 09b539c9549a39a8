// Elementary functions of vectors. Comes after the header of an instruction set, whose fma they
// call.
#pragma once

#include "half.h"

namespace pyattn::PYATTN_ISA {
namespace {

// Constants of exp2. kPolynomial is (2^f - 1) / f on [-1/2, 1/2], highest degree first.
template <class T>
struct Exp2;
template <>
struct Exp2<float> {
  static constexpr int kMantissaBits = 23;
  static constexpr float kSmallest = -126.0f;
  static constexpr float kRound = 0x1.8p23f + 127.0f;
  // Minimax of the error in ulp, whose size halves below 1: 1.05 ulp before rounding.
  static constexpr float kPolynomial[] = {0.0013225707f, 0.009671763f, 0.055508915f, 0.24022236f, 0.6931468f};
};
template <>
struct Exp2<double> {
  static constexpr int kMantissaBits = 52;
  static constexpr double kSmallest = -1022.0;
  static constexpr double kRound = 0x1.8p52 + 1023.0;
  // Interpolation at the Chebyshev nodes, largest relative error 8.5e-18.
  static constexpr double kPolynomial[] = {4.454960598443769208e-10, 7.0725859492692237e-9,   1.017806244584400492e-7,
                                           1.321544258792168965e-6,  1.525273383982613628e-5, 1.540353044173605015e-4,
                                           1.333355814641693531e-3,  9.618129107606888527e-3, 5.550410866482159434e-2,
                                           2.402265069591009822e-1,  6.931471805599453094e-1};
};

// 2^x.
//   Domain   x <= 1, and NaN.
//   Ends     exactly 1 at 0; exactly 0 below -126 (float), -1022 (double), -inf included; NaN for NaN.
//   Error    at most 2.1 ulp (float), 1.75 (double); with fma 1.8 and 1.5. Measured by
//            tests/test_exp2.py, float over every number in [-126, 0].
//   Method   adding kRound rounds x to an integer n and leaves n + bias in the low mantissa bits,
//            which shifted up are 2^n; the other factor is a polynomial in x - n.
template <class T>
PYATTN_INLINE vec<T> exp2(vec<T> x) {
  using C = Exp2<T>;
  const vec<T> shifted = x + C::kRound;
  const vec<T> f = x - (shifted - C::kRound);
  const vec<T> power = bit_cast<T>(bit_cast<typename Bits<T>::type>(shifted) << C::kMantissaBits);
  vec<T> y = set1(C::kPolynomial[0]);
  PYATTN_UNROLL(16)
  for (unsigned i = 1; i < sizeof(C::kPolynomial) / sizeof(T); ++i) y = fma(y, f, set1(C::kPolynomial[i]));
  y = fma(y, f, set1(T(1)));
  return x < C::kSmallest ? vec<T>{} : y * power;
}

inline constexpr double kLog2e = 1.4426950408889634;

PYATTN_INLINE float log(float x) { return __builtin_logf(x); }
PYATTN_INLINE double log(double x) { return __builtin_log(x); }

}  // namespace
}  // namespace pyattn::PYATTN_ISA
