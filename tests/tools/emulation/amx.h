// The tile registers of AMX in memory, for kernels of csrc/cpu that are compiled with this header in place of simd/amx.h: they
// then run on CPUs without AMX that have AVX512_BF16.
#pragma once

#define PYATTN_HAS_TILE_REGISTERS
#include "cpu/simd/avx512_bf16.h"

namespace pyattn::PYATTN_ISA {
namespace {

inline constexpr int64_t kRegisterWords = 16;

struct Register {
  __m512i rows[kRegisterWords];
};

inline thread_local Register registers[8];
inline thread_local bool configured = false;

// A thread that configures its registers finds numbers in them that no product may read; outside, using one is a fault.
class TileRegisters {
 public:
  TileRegisters() {
    for (Register& r : registers)
      for (__m512i& row : r.rows) row = _mm512_set1_epi32(0x7fc1dead);  // NaN, also as bfloat16
    configured = true;
  }
  ~TileRegisters() { configured = false; }
  TileRegisters(const TileRegisters&) = delete;
};

template <int kRegister>
PYATTN_INLINE Register& tile_register() {
  static_assert(0 <= kRegister && kRegister < 8);
  if (!configured) __builtin_trap();
  return registers[kRegister];
}

template <int kRegister>
PYATTN_INLINE void load_register(const void* p, int64_t row_bytes) {
  const char* from = static_cast<const char*>(p);
  for (__m512i& row : tile_register<kRegister>().rows) row = _mm512_loadu_si512(from), from += row_bytes;
}

template <int kRegister>
PYATTN_INLINE void store_register(void* p, int64_t row_bytes) {
  char* to = static_cast<char*>(p);
  for (const __m512i& row : tile_register<kRegister>().rows) _mm512_storeu_si512(to, row), to += row_bytes;
}

template <int kRegister>
PYATTN_INLINE void zero_register() {
  tile_register<kRegister>() = Register{};
}

// The lower or upper bfloat16 of each word; subnormal numbers count as 0.
template <bool kUpper>
PYATTN_INLINE __m512 halves(__m512i words) {
  const __m512i x = kUpper ? _mm512_and_si512(words, _mm512_set1_epi32(-65536)) : _mm512_slli_epi32(words, 16);
  return _mm512_castsi512_ps(_mm512_maskz_mov_epi32(_mm512_test_epi32_mask(x, _mm512_set1_epi32(0x7f800000)), x));
}

// TDPBF16PS: the sums of lower and of upper products grow by themselves, and are added to the register in the end.
template <int kSum, int kA, int kB>
PYATTN_INLINE void multiply_registers() {
  const Register &a = tile_register<kA>(), &b = tile_register<kB>();
  Register& sum = tile_register<kSum>();
  for (int m = 0; m < kRegisterWords; ++m) {
    __m512 lower = _mm512_setzero_ps(), upper = _mm512_setzero_ps();
    for (int k = 0; k < kRegisterWords; ++k) {
      const __m512i word = _mm512_set1_epi32(reinterpret_cast<const int32_t*>(&a.rows[m])[k]);
      lower = _mm512_fmadd_ps(halves<false>(word), halves<false>(b.rows[k]), lower);
      upper = _mm512_fmadd_ps(halves<true>(word), halves<true>(b.rows[k]), upper);
    }
    sum.rows[m] = _mm512_castps_si512(_mm512_castsi512_ps(sum.rows[m]) + (lower + upper));
  }
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
