// Threads: runs the tasks of a pass on torch's thread pool.
#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>

namespace pyattn {

// The number of threads that run_tasks may use: torch.get_num_threads(), but 1 in a forked child,
// whose copy of the pool may have no threads, and 1 inside another parallel region.
int64_t max_tasks();

// Calls task `tasks` times, on all threads of the pool. Each rounds and flushes subnormal numbers as the caller does.
// Rethrows the first exception.
void run_tasks(int64_t tasks, c10::function_ref<void()> task);

// The system's ID of the calling thread, as in torch's profiler.
int64_t thread_id();

}  // namespace pyattn
