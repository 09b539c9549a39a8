// Profiles: what each task of a pass took, phase by phase, while someone measures.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "attention.h"

namespace pyattn {

// What one thread did of one pass.
struct TaskProfile {
  const char* pass;
  std::string isa;
  int64_t thread;            // the system's number of it, as in torch's profiler
  int64_t begin_ns, end_ns;  // since 1970
  int64_t items;             // how many of the pass's work items
  PhaseCounts counts;
};

void start_profile();
std::vector<TaskProfile> stop_profile();

// A task that begins now; nothing if nobody measures. It is kept when it ends, unless others were faster to take all items.
std::optional<TaskProfile> begin_task(const char* pass);
void end_task(TaskProfile& task, int64_t items);

}  // namespace pyattn
