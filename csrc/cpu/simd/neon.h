// Advanced SIMD, which every AArch64 processor has.
#pragma once

#include <arm_neon.h>

namespace pyattn::PYATTN_ISA {
inline constexpr int kVectorBytes = 16;
// Rows of a register tile, by its width in vectors. Of 32 registers at most 20 are
// accumulators: with 24 gcc 12 spills, because it reads several values of A ahead.
inline constexpr int kMaxNV = 4;
inline constexpr int kWideNV = 8;
constexpr int kMR[kWideNV + 1] = {0, 14, 10, 7, 5, 4, 3, 3, 2};
}  // namespace pyattn::PYATTN_ISA

#define PYATTN_HAS_HALF_CONVERSION
#define PYATTN_HAS_MULTIPLY_WIDE
#include "cpu/simd/half.h"

namespace pyattn::PYATTN_ISA {
namespace {

PYATTN_INLINE vec<float> fma(vec<float> a, vec<float> b, vec<float> c) { return vfmaq_f32(c, a, b); }
PYATTN_INLINE vec<double> fma(vec<double> a, vec<double> b, vec<double> c) { return vfmaq_f64(c, a, b); }

// Returns b where either is NaN; vmaxq would return NaN.
PYATTN_INLINE vec<float> max(vec<float> a, vec<float> b) { return a > b ? a : b; }
PYATTN_INLINE vec<double> max(vec<double> a, vec<double> b) { return a > b ? a : b; }

// Multiplies the lower lanes, then the upper ones.
PYATTN_INLINE vec<uint32_t> multiply_wide(vec<uint32_t> a, vec<uint32_t> b, vec<uint32_t>& high) {
  const uint32x4_t lower = vreinterpretq_u32_u64(vmull_u32(vget_low_u32(a), vget_low_u32(b)));
  const uint32x4_t upper = vreinterpretq_u32_u64(vmull_high_u32(a, b));
  high = vuzp2q_u32(lower, upper);
  return vuzp1q_u32(lower, upper);
}

PYATTN_INLINE vec<float> load(const bf16* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(&p->bits), 16)); }
PYATTN_INLINE vec<float> from_halves(vec_u16 bits) { return vcvt_f32_f16(vreinterpret_f16_u16((uint16x4_t)bits)); }
PYATTN_INLINE vec<float> load(const f16* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits))); }
PYATTN_INLINE void store(f16* p, vec<float> x) { vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32(x))); }

}  // namespace
}  // namespace pyattn::PYATTN_ISA

#include "cpu/simd/byte.h"
