// Profiles: how long each task of a pass took, phase by phase. When
// profiling is off, a task costs one atomic load.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "attention.h"

namespace pyattn {

// The part of a pass that one thread ran.
struct TaskProfile {
  const char* pass;
  std::string isa;
  int64_t thread;            // thread_id()
  int64_t begin_ns, end_ns;  // since 1970
  int64_t items;             // how many of the pass's work items it ran
  PhaseCounts counts;
};

void start_profile();
std::vector<TaskProfile> stop_profile();

// Begins a task; nothing when profiling is off. end_task keeps
// it, unless other tasks took every item.
std::optional<TaskProfile> begin_task(const char* pass);
void end_task(TaskProfile& task, int64_t items);

}  // namespace pyattn
