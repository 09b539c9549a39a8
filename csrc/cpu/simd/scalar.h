// The fallback for any machine: 128-bit vectors in the compiler's own arithmetic.
#pragma once

namespace pyattn::PYATTN_ISA {
inline constexpr int kVectorBytes = 16;
// Rows of a register tile, by its width in vectors. 16 registers
// hold 8 accumulators, B, A and, for lack of fma, products.
inline constexpr int kMaxNV = 2;
inline constexpr int kWideNV = 4;
constexpr int kMR[kWideNV + 1] = {0, 8, 4, 2, 2};
}  // namespace pyattn::PYATTN_ISA

#include "cpu/simd/half.h"

namespace pyattn::PYATTN_ISA {
namespace {

PYATTN_INLINE vec<float> fma(vec<float> a, vec<float> b, vec<float> c) { return a * b + c; }
PYATTN_INLINE vec<double> fma(vec<double> a, vec<double> b, vec<double> c) { return a * b + c; }

// Returns b where either is NaN.
PYATTN_INLINE vec<float> max(vec<float> a, vec<float> b) { return a > b ? a : b; }
PYATTN_INLINE vec<double> max(vec<double> a, vec<double> b) { return a > b ? a : b; }

}  // namespace
}  // namespace pyattn::PYATTN_ISA

#include "cpu/simd/byte.h"
