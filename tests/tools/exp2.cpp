// Measures exp2 of one instruction set against the C library's in the next larger type:
// prints the largest error in ulp over every step-th float in [-126, 0], over as many
// doubles in [-1022, 0], and fails where an end is not exact.
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
T at(T x) {
  return exp2<T>(set1(x))[0];
}

template <class T, class Wide>
double error(T x) {
  const Wide exact = std::exp2(static_cast<Wide>(x));
  const T near = static_cast<T>(exact);
  const T below = near > exact ? std::nextafter(near, T(0)) : near;
  const Wide ulp = static_cast<Wide>(std::nextafter(below, std::numeric_limits<T>::infinity())) - below;
  return static_cast<double>(std::fabs(at(x) - exact) / ulp);
}

template <class T>
bool ends_are_exact(T smallest) {
  const T infinity = std::numeric_limits<T>::infinity();
  return at(T(0)) == 1 && at(T(-0.0)) == 1 && at(T(1)) == 2 && at(smallest) == std::exp2(smallest) &&
         at(std::nextafter(smallest, -infinity)) == 0 && at(T(2) * smallest) == 0 && at(-infinity) == 0 &&
         at(std::numeric_limits<T>::lowest()) == 0 && std::isnan(at(std::numeric_limits<T>::quiet_NaN())) &&
         std::isnan(at(std::numeric_limits<T>::signaling_NaN()));
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA

int main(int, char** arguments) {
  using namespace pyattn::PYATTN_ISA;
  const uint32_t step = std::atoi(arguments[1]);
  double single = 0, both = 0;
  const uint32_t last = std::bit_cast<uint32_t>(-126.0f);
  for (uint32_t bits = std::bit_cast<uint32_t>(-0.0f); bits <= last; bits += step) {
    const float x = std::bit_cast<float>(bits);
    single = std::fmax(single, error<float, double>(x));
    if (bits % 16 == 0) both = std::fmax(both, error<double, long double>(x * (1022.0 / 126.0)));
  }
  std::printf("%.3f %.3f\n", single, both);
  return ends_are_exact<float>(-126) && ends_are_exact<double>(-1022) ? 0 : 1;
}
