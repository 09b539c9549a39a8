#include "ops/devices/host.h"

#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <exception>

namespace pyattn {
namespace {

std::atomic<bool> forked{false};
[[maybe_unused]] const int watch_forks = pthread_atfork(nullptr, nullptr, [] { forked = true; });

#ifndef _OPENMP

// The entry to parallel regions that code compiled by gcc calls. clang's would need LLVM's runtime
// beside libgomp, which torch has loaded: two thread pools in one process. Where torch ships LLVM's
// runtime, that has this entry too.
extern "C" void GOMP_parallel(void (*function)(void*), void* data, unsigned threads, unsigned flags);

struct Region {
  int64_t tasks;
  void (*task)(void*);
  void* data;
  std::atomic<int64_t> started{0};
  std::atomic_flag failed{};
  std::exception_ptr exception{};

  void run() {
    try {
      while (started++ < tasks) task(data);
    } catch (...) {
      if (!failed.test_and_set()) exception = std::current_exception();
    }
  }
};

#endif

// torch.get_num_threads(), but 1 in a forked child, whose copy of the pool may have no threads, and 1 inside
// another parallel region.
int64_t max_tasks() { return forked || at::in_parallel_region() ? 1 : at::get_num_threads(); }

void run_tasks(int64_t tasks, void (*task)(void*), void* data) {
#ifdef _OPENMP
  at::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
    for (; begin < end; ++begin) task(data);
  });
#else
  Region region{tasks, task, data};
  // 0: as many threads as torch has set; any other number makes libgomp rebuild its pool.
  GOMP_parallel([](void* region) { static_cast<Region*>(region)->run(); }, &region, 0, 0);
  if (region.exception) std::rethrow_exception(region.exception);
#endif
}

// With ATen's allocator, so the memory profiler sees it, and without the microsecond of at::empty's dispatch.
Memory allocate(int64_t bytes) {
  c10::DataPtr memory = c10::GetCPUAllocator()->allocate(bytes);
  void* const data = memory.get();
  void (*const free)(void*) = memory.get_deleter();
  return {data, memory.release_context(), free};
}

}  // namespace

const Host torch_host{max_tasks, run_tasks, allocate};

}  // namespace pyattn
