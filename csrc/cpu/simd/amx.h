// AVX512_BF16 with AMX: a tile register holds 16 rows of 64 bytes, and TDPBF16PS multiplies two of them,
// 16 x 32 by 32 x 16 numbers, in 16 cycles. Vectors stay those of AVX512_BF16.
#pragma once

#define PYATTN_HAS_TILE_REGISTERS
#include "cpu/simd/avx512_bf16.h"

namespace pyattn::PYATTN_ISA {
namespace {

// The CPUs that have AMX multiply by powers of two as fast as they add, and shift at half that speed: exponentials of a tile take
// 0.83 of the time.

// x minus the nearest integer, of two the even one.
PYATTN_INLINE vec<float> to_nearest(vec<float> x) { return (vec<float>)_mm512_reduce_ps((__m512)x, 0); }

// y * 2^n, or 0 where x < least.
PYATTN_INLINE vec<float> scale_from(float least, vec<float> x, vec<float> y, vec<float> n) {
  const __mmask16 kept = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(least), _CMP_NLT_UQ);  // NaN is kept
  return (vec<float>)_mm512_maskz_scalef_ps(kept, (__m512)y, (__m512)n);
}

// The rows of a tile register, and the 32-bit words of each.
inline constexpr int64_t kRegisterWords = 16;

// Configures the calling thread's tile registers, all of full size, and releases them at the end: until then, the
// system saves 8 KB whenever the thread is switched.
class TileRegisters {
 public:
  TileRegisters() {
    alignas(64) static constexpr Configuration kAll{
        1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    asm volatile("ldtilecfg %0" : : "m"(kAll));
  }
  ~TileRegisters() { asm volatile("tilerelease"); }
  TileRegisters(const TileRegisters&) = delete;

 private:
  struct Configuration {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  };
};

// The compiler's own intrinsics do not say that they access memory, so they could overtake a vector's store.
template <int kRegister>
PYATTN_INLINE void load_register(const void* p, int64_t row_bytes) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(kRegister), "r"(p), "r"(row_bytes) : "memory");
}

template <int kRegister>
PYATTN_INLINE void store_register(void* p, int64_t row_bytes) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(kRegister), "r"(p), "r"(row_bytes) : "memory");
}

template <int kRegister>
PYATTN_INLINE void zero_register() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kRegister));
}

// sum[16][16] += a[16][16 pairs] b[16 pairs][16]; subnormal numbers count as 0.
template <int kSum, int kA, int kB>
PYATTN_INLINE void multiply_registers() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kA), "i"(kB));
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
