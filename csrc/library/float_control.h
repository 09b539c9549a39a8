// The floating-point control register of a thread: its rounding mode, and whether subnormal numbers
// count as 0, which torch.set_flush_denormal sets for its own thread only.
#pragma once

#ifdef __x86_64__
#include <xmmintrin.h>
#endif

#include <cstdint>

namespace pyattn {

// On x86 without the flags of past exceptions.
inline uint64_t float_control() {
  uint64_t control = 0;
#if defined(__x86_64__)
  control = _mm_getcsr() & ~_MM_EXCEPT_MASK;
#elif defined(__aarch64__)
  asm volatile("mrs %0, fpcr" : "=r"(control));
#endif
  return control;
}

inline void set_float_control([[maybe_unused]] uint64_t control) {
#if defined(__x86_64__)
  _mm_setcsr(static_cast<unsigned>(control));
#elif defined(__aarch64__)
  asm volatile("msr fpcr, %0" : : "r"(control));
#endif
}

// While it lives, a thread rounds as the caller of the pass does, so bits do not depend on who claims an item.
class CallersControl {
 public:
  explicit CallersControl(uint64_t callers) : differs_(own_ != callers) {
    if (differs_) set_float_control(callers);
  }
  ~CallersControl() {
    if (differs_) set_float_control(own_);
  }
  CallersControl(const CallersControl&) = delete;
  CallersControl& operator=(const CallersControl&) = delete;

 private:
  uint64_t own_ = float_control();
  bool differs_;
};

}  // namespace pyattn
