// Stopwatch: adds up ticks and operations by phase while
// profiling; otherwise a lap costs one comparison with null.
#pragma once

#include "attention.h"
#include "cpu/simd/inline.h"

namespace pyattn::PYATTN_ISA {
namespace {

PYATTN_INLINE int64_t ticks() {
#if defined(__x86_64__)
  return static_cast<int64_t>(__builtin_ia32_rdtsc());
#elif defined(__aarch64__)
  int64_t count;
  __asm__ volatile("mrs %0, cntvct_el0" : "=r"(count));
  return count;
#else
  return 0;
#endif
}

class Stopwatch {
 public:
  explicit Stopwatch(PhaseCounts* counts) : counts_(counts), last_(counts ? ticks() : 0) {}

  // Adds the time since the last lap, and these floating-point operations, to the phase.
  PYATTN_MEMBER_INLINE void lap(Phase phase, int64_t flops = 0) {
    if (!counts_) return;
    const int64_t now = ticks();
    counts_->ticks[static_cast<int>(phase)] += now - last_;
    counts_->flops[static_cast<int>(phase)] += flops;
    last_ = now;
  }

 private:
  PhaseCounts* const counts_;
  int64_t last_;
};

}  // namespace
}  // namespace pyattn::PYATTN_ISA
