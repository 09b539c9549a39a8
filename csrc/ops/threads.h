// Threads: those of torch's pool, which run the tasks of a pass.
#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>

namespace pyattn {

// The number of threads that run_tasks may use: torch.get_num_threads(), but 1 in a forked child,
// where the pool may have no threads behind its state, and 1 inside another parallel region.
int64_t max_tasks();

// Calls task so many times, on as many threads as there are, each of which rounds and flushes subnormal numbers as
// the caller does. The first exception comes back.
void run_tasks(int64_t tasks, c10::function_ref<void()> task);

// The system's number of the calling thread, as torch's profiler gives it.
int64_t thread_id();

}  // namespace pyattn
