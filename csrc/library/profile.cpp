#include "library/profile.h"

#ifdef __APPLE__
#include <pthread.h>
#elif defined(_WIN32)
#include <windows.h>
#else
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <atomic>
#include <chrono>
#include <mutex>
#include <utility>

namespace pyattn {
namespace {

std::atomic<bool> measuring{false};
std::mutex mutex;
std::vector<TaskProfile> tasks;  // since start_profile; guarded by mutex

int64_t now_ns() {
  using std::chrono::nanoseconds;
  return std::chrono::duration_cast<nanoseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

int64_t thread_id() {
#ifdef __APPLE__
  uint64_t id = 0;
  pthread_threadid_np(nullptr, &id);
  return static_cast<int64_t>(id);
#elif defined(_WIN32)
  return GetCurrentThreadId();
#else
  return syscall(SYS_gettid);
#endif
}

}  // namespace

void start_profile() {
  const std::lock_guard lock(mutex);
  tasks.clear();
  measuring = true;
}

std::vector<TaskProfile> stop_profile() {
  measuring = false;
  const std::lock_guard lock(mutex);
  return std::move(tasks);
}

std::optional<TaskProfile> begin_task(const char* pass) {
  if (!measuring.load(std::memory_order_relaxed)) return std::nullopt;
  return TaskProfile{pass, active_isa(), thread_id(), now_ns(), 0, 0, {}};
}

void end_task(TaskProfile& task, int64_t items) {
  if (items == 0) return;
  task.end_ns = now_ns(), task.items = items;
  const std::lock_guard lock(mutex);
  if (measuring) tasks.push_back(std::move(task));
}

}  // namespace pyattn
