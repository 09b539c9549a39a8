#include "ops/threads.h"

#include <ATen/Parallel.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>
#ifdef __x86_64__
#include <xmmintrin.h>
#endif

#include <atomic>
#include <cstdint>
#include <exception>

namespace pyattn {
namespace {

std::atomic<bool> forked{false};
[[maybe_unused]] const int watch_forks = pthread_atfork(nullptr, nullptr, [] { forked = true; });

// The calling thread's floating-point control register: the rounding mode, and whether subnormal numbers count as 0,
// which torch.set_flush_denormal sets for its own thread only. On x86 without the flags of past exceptions.
uint64_t float_control() {
  uint64_t control = 0;
#if defined(__x86_64__)
  control = _mm_getcsr() & ~_MM_EXCEPT_MASK;
#elif defined(__aarch64__)
  asm volatile("mrs %0, fpcr" : "=r"(control));
#endif
  return control;
}

void set_float_control([[maybe_unused]] uint64_t control) {
#if defined(__x86_64__)
  _mm_setcsr(static_cast<unsigned>(control));
#elif defined(__aarch64__)
  asm volatile("msr fpcr, %0" : : "r"(control));
#endif
}

// While it lives, a thread rounds as the caller of run_tasks does, so bits do not depend on who claims an item.
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

#ifndef _OPENMP

// The entry to parallel regions that code compiled by gcc calls. clang's would need LLVM's runtime
// beside libgomp, which torch has loaded: two thread pools in one process. Where torch ships LLVM's
// runtime, that has this entry too.
extern "C" void GOMP_parallel(void (*function)(void*), void* data, unsigned threads, unsigned flags);

struct Region {
  int64_t tasks;
  c10::function_ref<void()> task;
  std::atomic<int64_t> started{0};
  std::atomic_flag failed{};
  std::exception_ptr exception{};

  void run() {
    try {
      while (started++ < tasks) task();
    } catch (...) {
      if (!failed.test_and_set()) exception = std::current_exception();
    }
  }
};

#endif

}  // namespace

int64_t max_tasks() { return forked || at::in_parallel_region() ? 1 : at::get_num_threads(); }

void run_tasks(int64_t tasks, c10::function_ref<void()> task) {
  if (tasks == 1) return task();
  const auto as_caller = [&, control = float_control()] {
    const CallersControl same(control);
    task();
  };
#ifdef _OPENMP
  at::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
    for (; begin < end; ++begin) as_caller();
  });
#else
  Region region{tasks, as_caller};
  // 0: as many threads as torch has set; any other number makes libgomp rebuild its pool.
  GOMP_parallel([](void* data) { static_cast<Region*>(data)->run(); }, &region, 0, 0);
  if (region.exception) std::rethrow_exception(region.exception);
#endif
}

int64_t thread_id() {
#ifdef __APPLE__
  uint64_t id = 0;
  pthread_threadid_np(nullptr, &id);
  return static_cast<int64_t>(id);
#else
  return syscall(SYS_gettid);
#endif
}

}  // namespace pyattn
