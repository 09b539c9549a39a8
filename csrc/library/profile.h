// Recording of profiles. When profiling is off, a task costs one atomic load.
#pragma once

#include <optional>

#include "library.h"

namespace pyattn {

// Begins a task; nothing when profiling is off. end_task keeps
// it, unless other tasks took every item.
std::optional<TaskProfile> begin_task(const char* pass);
void end_task(TaskProfile& task, int64_t items);

}  // namespace pyattn
