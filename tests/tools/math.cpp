// Measures the elementary functions of one instruction set against the C library's in the next
// larger type. Prints their largest errors in ulp, over every step-th float of a range and fewer
// doubles of another:
//
//   exp2                  floats in [-126, 0], doubles in [-1022, 0]
//   tanh                  [0, 10], [0, 20]
//   derivative of tanh    [0, 43], [0, 353], in units of 1 + x / 2 ulp
//   log                   all normal floats, squares of them
//
// Fails if an end is not exact.
#include PYATTN_ISA_HEADER

#include "cpu/simd/math.h"

#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>

namespace pyattn::PYATTN_ISA {
namespace {

template <class T>
inline constexpr T kInfinity = std::numeric_limits<T>::infinity();
template <class T>
inline constexpr T kNaNs[] = {std::numeric_limits<T>::quiet_NaN(), std::numeric_limits<T>::signaling_NaN()};

template <class T>
T exp2_at(T x) {
  return exp2<T>(set1(x))[0];
}

template <class T>
T tanh_at(T x) {
  return tanh<T>(set1(x))[0];
}

template <class T>
T tanh_derivative_at(T x) {
  return tanh_derivative<T>(set1(x))[0];
}

template <class T>
T exact_tanh_derivative(T x) {
  const T u = std::exp(-2 * x);
  return 4 * u / ((1 + u) * (1 + u));
}

template <class T>
T log_at(T x) {
  return log<T>(set1(x))[0];
}

// |x - exact| in ulp of the next number of T below the exact one.
template <class T, class Wide>
double error(T x, Wide exact) {
  const T near = static_cast<T>(exact);
  const T below = std::fabs(near) > std::fabs(exact) ? std::nextafter(near, T(0)) : near;
  const Wide ulp = std::fabs(static_cast<Wide>(std::nextafter(below, std::copysign(kInfinity<T>, below))) - below);
  return static_cast<double>(std::fabs(x - exact) / ulp);
}

template <class T>
bool exp2_ends(T smallest) {
  for (const T nan : kNaNs<T>)
    if (!std::isnan(exp2_at(nan))) return false;
  return exp2_at(T(0)) == 1 && exp2_at(T(-0.0)) == 1 && exp2_at(T(1)) == 2 &&
         exp2_at(smallest) == std::exp2(smallest) && exp2_at(std::nextafter(smallest, -kInfinity<T>)) == 0 &&
         exp2_at(T(2) * smallest) == 0 && exp2_at(-kInfinity<T>) == 0 && exp2_at(std::numeric_limits<T>::lowest()) == 0;
}

template <class T>
bool tanh_ends(T large) {
  for (const T nan : kNaNs<T>)
    if (!std::isnan(tanh_at(nan)) || !std::isnan(tanh_at(-nan))) return false;
  for (const T x : {large, std::numeric_limits<T>::max(), kInfinity<T>})
    if (tanh_at(x) != 1 || tanh_at(-x) != -1) return false;
  for (const T x : {T(1e-30), T(0.3), T(5)})
    if (tanh_at(-x) != -tanh_at(x)) return false;
  return tanh_at(T(0)) == 0 && !std::signbit(tanh_at(T(0))) && tanh_at(T(-0.0)) == 0 && std::signbit(tanh_at(T(-0.0)));
}

template <class T>
bool tanh_derivative_ends(T large) {
  for (const T nan : kNaNs<T>)
    if (!std::isnan(tanh_derivative_at(nan)) || !std::isnan(tanh_derivative_at(-nan))) return false;
  for (const T x : {std::nextafter(large, kInfinity<T>), std::numeric_limits<T>::max(), kInfinity<T>})
    if (tanh_derivative_at(x) != 0 || tanh_derivative_at(-x) != 0) return false;
  return tanh_derivative_at(T(0)) == 1 && tanh_derivative_at(T(-5)) == tanh_derivative_at(T(5));
}

template <class T>
bool log_ends() {
  for (const T nan : kNaNs<T>)
    if (!std::isnan(log_at(nan)) || !std::isnan(log_at(-nan))) return false;
  return log_at(T(0)) == -kInfinity<T> && log_at(T(1)) == 0 && !std::signbit(log_at(T(1)));
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA

int main(int, char** arguments) {
  using namespace pyattn::PYATTN_ISA;
  const uint32_t step = std::atoi(arguments[1]);
  double exp2_single = 0, exp2_double = 0, tanh_single = 0, tanh_double = 0, derivative_single = 0,
         derivative_double = 0, log_single = 0, log_double = 0;
  const uint32_t last = std::bit_cast<uint32_t>(-126.0f);
  for (uint32_t bits = std::bit_cast<uint32_t>(-0.0f); bits <= last; bits += step) {
    const float x = std::bit_cast<float>(bits);
    exp2_single = std::fmax(exp2_single, error<float, double>(exp2_at(x), std::exp2(static_cast<double>(x))));
    if (bits % 16) continue;
    const double wide = x * (1022.0 / 126.0);
    exp2_double = std::fmax(exp2_double, error<double, long double>(exp2_at(wide), std::exp2((long double)wide)));
  }
  const uint32_t end = std::bit_cast<uint32_t>(10.0f);  // tanh_ends checks larger ones
  for (uint32_t bits = 1; bits < end; bits += step) {
    const float x = std::bit_cast<float>(bits);
    tanh_single = std::fmax(tanh_single, error<float, double>(tanh_at(x), std::tanh(static_cast<double>(x))));
    if (bits % 16) continue;
    const double wide = 2.0 * x;
    tanh_double = std::fmax(tanh_double, error<double, long double>(tanh_at(wide), std::tanh((long double)wide)));
  }
  const uint32_t saturated = std::bit_cast<uint32_t>(43.0f);
  for (uint32_t bits = 1; bits <= saturated; bits += step) {
    const float x = std::bit_cast<float>(bits);
    const double exact = exact_tanh_derivative<double>(x);
    const double own = 1 + x / 2;  // the error may grow with x
    derivative_single = std::fmax(derivative_single, error<float, double>(tanh_derivative_at(x), exact) / own);
    if (bits % 16) continue;
    const double wide = x * (353.0 / 43.0);
    const long double exact_wide = exact_tanh_derivative<long double>(wide);
    const double wrong = error<double, long double>(tanh_derivative_at(wide), exact_wide);
    derivative_double = std::fmax(derivative_double, wrong / (1 + wide / 2));
  }
  const uint32_t infinity = std::bit_cast<uint32_t>(kInfinity<float>);
  for (uint32_t bits = std::bit_cast<uint32_t>(std::numeric_limits<float>::min()); bits < infinity; bits += step) {
    const float x = std::bit_cast<float>(bits);
    log_single = std::fmax(log_single, error<float, double>(log_at(x), std::log(static_cast<double>(x))));
    if (bits % 16) continue;
    const double wide = static_cast<double>(x) * x;
    log_double = std::fmax(log_double, error<double, long double>(log_at(wide), std::log((long double)wide)));
  }
  for (const double worst : {exp2_single, exp2_double, tanh_single, tanh_double, derivative_single, derivative_double,
                             log_single, log_double})
    std::printf("%.3f ", worst);
  const bool exp2_exact = exp2_ends<float>(-126) && exp2_ends<double>(-1022);
  const bool tanh_exact = tanh_ends<float>(10) && tanh_ends<double>(20);
  const bool derivative_exact = tanh_derivative_ends<float>(43) && tanh_derivative_ends<double>(353);
  return exp2_exact && tanh_exact && derivative_exact && log_ends<float>() && log_ends<double>() ? 0 : 1;
}
