#include "threads.h"

#include <ATen/Parallel.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <exception>

namespace pyattn {
namespace {

std::atomic<bool> forked{false};
[[maybe_unused]] const int watch_forks = pthread_atfork(nullptr, nullptr, [] { forked = true; });

#ifndef _OPENMP

// The entry to parallel regions that code of gcc calls. clang's own would need LLVM's runtime
// beside the one that torch has loaded: two pools of threads in one process. LLVM's runtime has
// this entry too, where torch comes with that.
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
#ifdef _OPENMP
  at::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
    for (; begin < end; ++begin) task();
  });
#else
  Region region{tasks, task};
  // 0: as many threads as torch has set; asking for a number makes libgomp build its pool anew.
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
