// The threads of a CUDA block on one thread of a host: each has its own stack and runs until it has
// to wait for others, at a barrier of the block or where the lanes of its warp exchange words. Then
// the next one runs. The process ends where a kernel breaks a rule of CUDA:
// warps at different barriers, addresses outside shared memory, copies that outlive their block.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "races.h"

namespace emulation {

inline constexpr int kWarpLanes = 32, kMaxWords = 16;
inline constexpr size_t kStackBytes = 256 << 10;

using Words = uint32_t[kWarpLanes][kMaxWords];

inline void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "emulation: %s\n", what);
  std::abort();
}

struct Copy {
  void* to;
  const void* from;
  int bytes;
};

enum class Wait { kNothing, kWarp, kBlock, kEnd };

struct Thread {
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  ucontext_t start;
  jmp_buf resume;
  bool started;
  Wait wait;
  Place place;  // of the barrier that it waits at
  bool any;     // its argument there
  std::vector<Copy> copies;
};

struct Warp {
  Words words[2];  // of this exchange and of the one before, which slower lanes may still read
  int exchanges[kWarpLanes];
};

struct Block {
  int64_t index, index_y;
  int current;
  bool any;  // the result of the last barrier
  jmp_buf scheduler;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::vector<char> shared;
  int shared_bytes;
  const void* name;  // the kernel's address
  std::function<void()> kernel;
};

inline thread_local Block* block __attribute__((tls_model("initial-exec")));  // else each use would be a call

inline int64_t block_index() { return block->index; }
inline int64_t block_index_y() { return block->index_y; }
inline int thread_index() { return block->current; }
inline int lane() { return block->current % kWarpLanes; }
inline char* shared_memory() {
  return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(block->shared.data()) + 127) / 128 * 128);
}

inline void check_shared(uintptr_t address, uintptr_t bytes, uintptr_t alignment) {
  const auto begin = reinterpret_cast<uintptr_t>(shared_memory());
  require(address % alignment == 0, "address in shared memory not aligned");
  require(address >= begin && address + bytes <= begin + block->shared_bytes, "address outside shared memory");
}

// Goes back to the scheduler, which resumes the thread when the wait is over.
inline void wait_for(Wait what) {
  Block& b = *block;
  Thread& t = b.threads[b.current];
  t.wait = what;
  if (_setjmp(t.resume) == 0) _longjmp(b.scheduler, 1);
}

inline bool barrier(bool any, Place place) {
  Thread& t = block->threads[block->current];
  t.any = any, t.place = place;
  wait_for(Wait::kBlock);
  return block->any;
}

// Publishes the lane's words and returns those of all lanes.
inline const Words& exchange(const uint32_t* words, int count) {
  require(count <= kMaxWords, "too many words to exchange");
  Warp& warp = block->warps[block->current / kWarpLanes];
  Words& all = warp.words[warp.exchanges[lane()]++ % 2];
  std::memcpy(all[lane()], words, count * sizeof *words);
  wait_for(Wait::kWarp);
  return all;
}

inline void copy_later(void* to, const void* from, int bytes) {
  if constexpr (kRaces) races::begin_copy(to);
  block->threads[block->current].copies.push_back({to, from, bytes});
}

inline void copy_now(Place place) {
  if constexpr (kRaces)
    if (!races::wait(place)) return;
  std::vector<Copy>& copies = block->threads[block->current].copies;
  for (const Copy& copy : copies) {
    if constexpr (kRaces) races::end_copy(copy.to);
    std::memset(copy.to, 0, 16);
    std::memcpy(copy.to, copy.from, copy.bytes);
  }
  copies.clear();
}

inline void enter() {
  block->kernel();
  wait_for(Wait::kEnd);
}

// Runs a thread until it waits.
inline void resume(int thread) {
  Block& b = *block;
  Thread& t = b.threads[b.current = thread];
  if (_setjmp(b.scheduler) != 0) return;
  if (t.started) _longjmp(t.resume, 1);
  t.started = true;
  getcontext(&t.start);
  t.start.uc_stack.ss_sp = t.stack.get(), t.start.uc_stack.ss_size = kStackBytes, t.start.uc_link = nullptr;
  makecontext(&t.start, enter, 0);
  setcontext(&t.start);
}

// Runs a warp until its lanes wait for a barrier or have ended, all of them for the same thing.
inline void run_warp(int first) {
  Wait wait;
  do {
    for (int i = 0; i < kWarpLanes; ++i) resume(first + i);
    wait = block->threads[first].wait;
    for (int i = 0; i < kWarpLanes; ++i)
      require(block->threads[first + i].wait == wait, "lanes of a warp wait for different things");
  } while (wait == Wait::kWarp);
}

inline void run_block(int64_t index, int64_t index_y) {
  Block& b = *block;
  b.index = index, b.index_y = index_y;
  std::memset(b.shared.data(), 0xff, b.shared.size());  // NaN in every format
  if constexpr (kRaces) races::begin_block(shared_memory(), b.shared_bytes);
  for (Thread& t : b.threads) t.started = false, t.copies.clear();
  for (Warp& w : b.warps) std::fill(std::begin(w.exchanges), std::end(w.exchanges), 0);
  const int threads = static_cast<int>(b.threads.size());
  const bool backwards = (index + index_y) % 2;  // so not always the same warp runs ahead
  do {
    for (int t = 0; t < threads; t += kWarpLanes) run_warp(backwards ? threads - kWarpLanes - t : t);
    b.any = false;
    for (Thread& t : b.threads) {
      require(t.wait == b.threads[0].wait, "some warps wait at a barrier, others have ended");
      require(t.wait == Wait::kEnd || t.place == b.threads[0].place, "warps wait at different barriers");
      b.any = b.any || t.any;
    }
    if constexpr (kRaces)
      if (b.threads[0].wait == Wait::kBlock) races::barrier(b.threads[0].place);
  } while (b.threads[0].wait == Wait::kBlock);
  for (b.current = 0; b.current < threads; ++b.current)
    for (const Copy& copy : b.threads[b.current].copies)
      if constexpr (kRaces)
        races::leave_copy(copy.to);
      else
        require(false, "a block ends before its copies");
}

// Runs all blocks, shared among the threads of the host.
inline void run(int64_t blocks, int64_t blocks_y, int threads, int shared_bytes, const void* name,
                std::function<void()> kernel) {
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    Block own;
    own.threads = std::vector<Thread>(threads), own.warps = std::vector<Warp>(threads / kWarpLanes);
    own.shared = std::vector<char>(shared_bytes + 127), own.shared_bytes = shared_bytes;
    own.name = name, own.kernel = kernel;
    block = &own;
    for (int64_t at; (at = next++) < blocks * blocks_y;) run_block(at % blocks, at / blocks);
  };
  std::vector<std::thread> hosts;
  for (unsigned i = 0; i < std::min<int64_t>(blocks * blocks_y, std::thread::hardware_concurrency()); ++i)
    hosts.emplace_back(work);
  for (std::thread& host : hosts) host.join();
}

}  // namespace emulation
