// The threads of a CUDA block on one thread of a host: each has its own stack and runs until it has
// to wait for others, at a barrier of the block or where the lanes of its warp exchange words. Then
// the next one runs. The process ends where a kernel breaks a rule of CUDA:
// warps at different barriers, addresses outside shared memory, copies that outlive their block.
#pragma once

#include <cstdint>
#include <functional>

#include "races.h"

namespace emulation {

inline constexpr int kWarpLanes = 32, kStagingBytes = 1280;  // of the fragments of a product

// The thread of a block that a thread of the host runs.
struct Position {
  int64_t block = 0, block_y = 0;
  int thread = 0;
  const void* kernel = nullptr;
  char* shared_memory = nullptr;
  int shared_bytes = 0;
  const int* exchanges = nullptr;  // of each thread of the block, so far
};

// initial-exec: otherwise each use would be a call.
inline thread_local constinit Position here __attribute__((tls_model("initial-exec")));

inline int64_t block_index() { return here.block; }
inline int64_t block_index_y() { return here.block_y; }
inline int thread_index() { return here.thread; }
inline int lane() { return here.thread % kWarpLanes; }
inline char* shared_memory() { return here.shared_memory; }

[[noreturn]] void fail(const char* what);

inline void require(bool condition, const char* what) {
  if (!condition) fail(what);
}

inline void check_shared(uintptr_t address, uintptr_t bytes, uintptr_t alignment) {
  const auto begin = reinterpret_cast<uintptr_t>(shared_memory());
  require(address % alignment == 0, "address in shared memory not aligned");
  require(address >= begin && address + bytes <= begin + here.shared_bytes, "address outside shared memory");
}

// Waits for all threads of the block. Returns whether any of them has passed true.
bool barrier(bool any, Place place);

// Lanes of a warp exchange words: each writes its own to staged<T>(), calls exchange(), and reads what others wrote. The
// last lane may change the words before it calls exchange().
char* staging();
void exchange();

template <class T>
T& staged() {
  static_assert(sizeof(T) <= kStagingBytes);
  return *reinterpret_cast<T*>(staging());
}

// Copies that arrive when their thread waits for them.
void copy_later(void* to, const void* from, int bytes);
void copy_now(Place place);

// Products that are computed when their warp waits for them: for all groups but the last `left`.
void multiply_later(std::function<void()> product);
void end_group();
void multiply_now(int left);

// Runs call(kernel, params) on all threads of all blocks, which the threads of the host share.
void run(int64_t blocks, int64_t blocks_y, int threads, int shared_bytes, const void* kernel, const void* params,
         void (*call)(const void* kernel, const void* params));

}  // namespace emulation
