// Tensors of every dtype without torch, for kernels_check.cpp.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "attention.h"

namespace pyattn {

using Values = std::vector<double>;

// Conversions by the definitions of the formats, rounding to nearest even.
inline double widen(double x) { return x; }
inline double widen(float x) { return x; }
inline double widen(bf16 x) {
  const uint32_t bits = uint32_t{x.bits} << 16;
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}
inline double widen(f16 x) {
  const int exponent = x.bits >> 10 & 31, mantissa = x.bits & 1023;
  const double magnitude = exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24);
  return x.bits >> 15 ? -magnitude : magnitude;
}

template <class S>
S narrow(double x) {
  if constexpr (std::is_floating_point_v<S>) {
    return static_cast<S>(x);
  } else if constexpr (std::is_same_v<S, bf16>) {
    const float rounded =
        static_cast<float>(std::ldexp(std::nearbyint(std::ldexp(x, 7 - std::ilogb(x))), std::ilogb(x) - 7));
    uint32_t bits;
    std::memcpy(&bits, &rounded, sizeof bits);
    return {static_cast<uint16_t>(bits >> 16)};
  } else {
    const int exponent = std::max(std::ilogb(x), -14), sign = std::signbit(x) << 15;
    const int mantissa = static_cast<int>(std::nearbyint(std::ldexp(std::abs(x), 10 - exponent)));
    return {static_cast<uint16_t>(sign + ((exponent + 14) << 10) + mantissa)};
  }
}

template <class S>
constexpr DType dtype = std::is_same_v<S, double>  ? DType::kFloat64
                        : std::is_same_v<S, float> ? DType::kFloat32
                        : std::is_same_v<S, bf16>  ? DType::kBFloat16
                                                   : DType::kFloat16;

// A tensor (batch, heads, positions, columns), with positions outside heads in memory.
template <class S>
struct Tensor {
  int64_t heads, positions, cols;
  std::vector<S> data;

  Tensor(int64_t batch, int64_t heads, int64_t positions, int64_t cols)
      : heads(heads), positions(positions), cols(cols), data(batch * heads * positions * cols) {}
  View view() { return {data.data(), positions * heads * cols, cols, heads * cols}; }
  void fill(const Values& from) {
    for (size_t i = 0; i < data.size(); ++i) data[i] = narrow<S>(from[i]);
  }
  Values values() const {
    Values x;
    for (const S& y : data) x.push_back(widen(y));
    return x;
  }
};

}  // namespace pyattn
