// Elementary functions of vectors.
#pragma once

#include "cpu/simd/simd.h"

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
  // Minimax of the error in ulp (an ulp is half as large below 1): 1.05 ulp before rounding.
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
//            tests/native/test_math.py, float over every number in [-126, 0].
//   Method   adding kRound rounds x to an integer n and leaves n + bias in the low mantissa bits,
//            which, shifted up, are 2^n; the other factor is a polynomial in x - n. Where instructions
//            give x - n and multiply by 2^n (cpu/simd/amx.h), they give the same bits.
template <class T>
PYATTN_INLINE vec<T> exp2(vec<T> x) {
  using C = Exp2<T>;
  const auto polynomial = [](vec<T> f) PYATTN_MEMBER_INLINE {
    vec<T> y = set1(C::kPolynomial[0]);
    PYATTN_UNROLL(16)
    for (unsigned i = 1; i < sizeof(C::kPolynomial) / sizeof(T); ++i) y = fma(y, f, set1(C::kPolynomial[i]));
    return fma(y, f, set1(T(1)));
  };
  if constexpr (requires { to_nearest(x); }) {
    const vec<T> f = to_nearest(x);
    return scale_from(C::kSmallest, x, polynomial(f), x - f);
  } else {
    const vec<T> shifted = x + C::kRound;
    const vec<T> power = bit_cast<T>(bit_cast<typename Bits<T>::type>(shifted) << C::kMantissaBits);
    const vec<T> y = polynomial(x - (shifted - C::kRound));
    return x < C::kSmallest ? vec<T>{} : y * power;
  }
}

inline constexpr double kLog2e = 1.4426950408889634;

// |x|, also of NaN.
template <class T>
PYATTN_INLINE vec<T> abs(vec<T> x) {
  using Int = typename Bits<T>::type;
  return bit_cast<T>(bit_cast<Int>(x) & ~(Int{1} << (8 * sizeof(T) - 1)));
}

// Constants of tanh. kPolynomial is (e^r - 1 - r) / r^2 on [-ln(2) / 2, ln(2) / 2], highest degree
// first: interpolation at the Chebyshev nodes.
template <class T>
struct Tanh;
template <>
struct Tanh<float> {
  static constexpr float kLargest = 43.0f;  // exp(2 x) is finite up to here; beyond it the derivative is below 1e-36
  // Largest relative error of e^r - 1: 2.6e-8.
  static constexpr float kPolynomial[] = {0.0013926184f, 0.008363179f, 0.041666556f, 0.16666576f, 0.5f};
};
template <>
struct Tanh<double> {
  static constexpr double kLargest = 353.0;  // the same, 1e-305
  // Largest relative error 8.6e-19.
  static constexpr double kPolynomial[] = {2.0914686968086876e-9, 2.5105217004720745e-8, 2.7557273643110297e-7,
                                           2.7557255400206422e-6, 2.4801587325547743e-5, 1.9841269874820627e-4,
                                           1.3888888888883748e-3, 8.3333333333261358e-3, 4.1666666666666671e-2,
                                           1.6666666666666671e-1, 5.0000000000000000e-1};
};

// e = exp(2 a) - 1, from which tanh and its derivative are computed, for a >= 0; above kLargest, its
// value at kLargest.
//   Method   2^n (exp(r) - 1) + (2^n - 1), where n comes from 2 a log2(e) as in exp2, and
//            r = 2 a - n ln(2), in which rounding ln(2) does no harm, because e grows with n.
template <class T>
PYATTN_INLINE vec<T> exp_twice_minus_one(vec<T> a) {
  using C = Tanh<T>;
  using Int = typename Bits<T>::type;
  a = a > C::kLargest ? set1(C::kLargest) : a;
  const vec<T> shifted = fma(a, set1(static_cast<T>(2 * kLog2e)), set1(Exp2<T>::kRound));
  const vec<T> r = fma(shifted - Exp2<T>::kRound, set1(static_cast<T>(-1 / kLog2e)), a + a);
  const vec<T> power = bit_cast<T>(bit_cast<Int>(shifted) << Exp2<T>::kMantissaBits);
  vec<T> p = set1(C::kPolynomial[0]);
  PYATTN_UNROLL(16)
  for (unsigned i = 1; i < sizeof(C::kPolynomial) / sizeof(T); ++i) p = fma(p, r, set1(C::kPolynomial[i]));
  return fma(power, fma(p, r * r, r), power - T(1));
}

// tanh x = e / (e + 2), with the sign of x.
//   Domain   any x, and NaN.
//   Ends     0 at 0, with its sign; exactly 1 from 10 (float), 20 (double) on, inf included;
//            tanh(-x) = -tanh(x); NaN for NaN.
//   Error    at most 2.6 ulp, near 0 too. Measured by tests/native/test_math.py, float over every number.
template <class T>
PYATTN_INLINE vec<T> tanh(vec<T> x) {
  using Int = typename Bits<T>::type;
  const vec<T> a = abs<T>(x), e = exp_twice_minus_one<T>(a);
  const vec<Int> sign = bit_cast<Int>(x) ^ bit_cast<Int>(a);
  return bit_cast<T>(bit_cast<Int>(e / (e + T(2))) | sign);
}

// 1 - tanh(x)^2 = w (2 - w), w = 1 - tanh|x| = 2 / (e + 2): 1 - t * t cancels where t is near 1.
//   Domain   any x, and NaN.
//   Ends     exactly 1 at 0; exactly 0 above kLargest, inf included; NaN for NaN.
//   Error    at most 5 (1 + |x| / 2) ulp, with fma 2 (1 + |x| / 2); rounding x alone costs |x|. Measured by
//            tests/native/test_math.py, float over every number.
template <class T>
PYATTN_INLINE vec<T> tanh_derivative(vec<T> x) {
  const vec<T> a = abs<T>(x), w = T(2) / (exp_twice_minus_one<T>(a) + T(2));
  return a > Tanh<T>::kLargest ? vec<T>{} : fma(-w, w, w + w);
}

// Constants of log. kPolynomial is (log((1 + s) / (1 - s)) - 2 s) / s^3 in s^2, for 1 + s over 1 - s
// on [sqrt(1/2), sqrt(2)], highest degree first: interpolation at the Chebyshev nodes.
template <class T>
struct Log;
template <>
struct Log<float> {
  static constexpr float kLn2High = 0x1.62ep-1f, kLn2Low = 0x1.0bfbe8p-15f;  // n * kLn2High is exact
  // Largest relative error of the logarithm: 3e-10.
  static constexpr float kPolynomial[] = {0.23330468f, 0.28550822f, 0.40000123f, 0.6666667f};
};
template <>
struct Log<double> {
  static constexpr double kLn2High = 0x1.62e42feep-1, kLn2Low = 0x1.a39ef35793c76p-33;
  // Largest relative error 4.7e-18.
  static constexpr double kPolynomial[] = {0.14616449685043406, 0.15331721600556042, 0.18182889125261723,
                                           0.2222221113479508,  0.28571428625975487, 0.39999999999899505,
                                           0.666666666666667};
};

// log x.
//   Domain   0, positive normal numbers, and NaN.
//   Ends     -inf at 0, exactly 0 at 1, NaN for NaN.
//   Error    at most 1 ulp. Measured by tests/native/test_math.py, float over every number.
//   Method   x = 2^n (1 + f) and, with s = f / (2 + f), log(1 + f) = 2 s + s^3 polynomial(s^2),
//            computed as f minus a small correction.
template <class T>
PYATTN_INLINE vec<T> log(vec<T> x) {
  using C = Log<T>;
  using Int = typename Bits<T>::type;
  constexpr int kShift = Exp2<T>::kMantissaBits;
  const vec<Int> one = bit_cast<Int>(set1(T(1))), root = bit_cast<Int>(set1(static_cast<T>(0.70710678118654752)));
  const vec<Int> exponent = (bit_cast<Int>(x) - root + one) >> kShift;  // n + bias
  const vec<T> f = bit_cast<T>(bit_cast<Int>(x) - (exponent << kShift) + one) - T(1);
  const T magic = static_cast<T>(Int{1} << kShift);
  const vec<T> n = bit_cast<T>(exponent | bit_cast<Int>(set1(magic))) - (magic + static_cast<T>(one[0] >> kShift));
  const vec<T> s = f / (f + T(2)), square = s * s, half = f * f * T(0.5);
  vec<T> y = set1(C::kPolynomial[0]);
  PYATTN_UNROLL(16)
  for (unsigned i = 1; i < sizeof(C::kPolynomial) / sizeof(T); ++i) y = fma(y, square, set1(C::kPolynomial[i]));
  const vec<T> small = fma(s, fma(y, square, half), n * C::kLn2Low);
  y = fma(n, set1(C::kLn2High), f - (half - small));
  return x == T(0) ? set1(static_cast<T>(-__builtin_inff())) : x == x ? y : x;
}

// ---- Rows of float as int16 ----

// The largest int16 of a factor in sums of this many products with int8: no sum leaves 32 bits, and each factor is
// 256 x + y with x and y of int8 (products/few/byte_products.h).
inline float largest_factor(int64_t terms) {
  return static_cast<float>(min(257 * INT8_MAX, INT32_MAX / (-INT8_MIN * max(1, terms))));
}

// Rounds x[n], in whole vectors, to int16. Times `factor` these are x, up to half of the factor. It is NaN if some x is not
// finite. If all are below 2^-111 it is subnormal, and below 2^-126 the numbers are 0.
class RoundToInt16 {
 public:
  float factor;

  PYATTN_MEMBER_INLINE RoundToInt16(const float* x, int64_t n, float largest) : largest_(largest) {
    constexpr int L = kLanes<float>;
    vec<float> most = {}, zero = {};
    for (int64_t d = 0; d < n; d += L) most = max(abs<float>(load(x + d)), most), zero += load(x + d) * 0.0f;
    const float top = largest_lane<float>(most), not_finite = add_lanes<float>(zero);
    finite_ = not_finite == 0;
    shrink_ = top > 1 ? 0x1p-64f : 1;  // the inverse of a number near the largest is subnormal
    inverse_ = top >= 0x1p-126f && finite_ ? 1 / (top * shrink_) : 0.0f;
    factor = top / largest + not_finite;
  }

  // A number in the low 16 bits of each lane.
  PYATTN_MEMBER_INLINE vec<int32_t> operator()(vec<float> x) const {
    constexpr float kRound = 0x1.8p23f;  // adding it leaves the nearest integer in the low bits
    const vec<float> y = finite_ ? x * shrink_ * inverse_ * largest_ : vec<float>{};
    return bit_cast<int32_t>(y + kRound);
  }

 private:
  float largest_, shrink_, inverse_;
  bool finite_;
};

}  // namespace
}  // namespace pyattn::PYATTN_ISA
