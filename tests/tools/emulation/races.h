// The events that a block's threads report to the race detector (races.cpp). A library compiled with
// PYATTN_RACES and -fsanitize=thread contains the detector, which sees its reads and writes; other
// libraries call none of this.
#pragma once

#include <cstring>

namespace emulation {

#ifdef PYATTN_RACES
inline constexpr bool kRaces = true;
#else
inline constexpr bool kRaces = false;
#endif

// Where a kernel has a barrier, or waits for its copies.
struct Place {
  const char* file;
  int line;

  bool operator==(const Place& other) const { return line == other.line && !std::strcmp(file, other.file); }
};

namespace races {

void begin_block(const char* shared_memory, int bytes);
void barrier(Place place);  // all threads of the block have arrived at it
bool wait(Place place);     // whether the thread's copies arrive: not if the place is taken out
// A copy of 16 bytes by the current thread: begun, waited
// for, or still under way as the block ends.
void begin_copy(const void* to);
void end_copy(const void* to);
void leave_copy(const void* to);

}  // namespace races
}  // namespace emulation
