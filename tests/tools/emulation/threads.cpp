#include "threads.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "context.h"

namespace emulation {
namespace {

constexpr size_t kStackBytes = 256 << 10;

struct Copy {
  void* to;
  const void* from;
  int bytes;
};

// Products that are put off, in groups.
struct Products {
  std::vector<std::vector<std::function<void()>>> groups{{}};  // the last one is open

  bool empty() const { return groups.size() == 1 && groups[0].empty(); }
};

enum class Wait { kWarp, kBlock, kEnd };

struct Thread {
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  Context context;
  Wait wait;
  Place place;  // of the barrier that it waits at
  bool any;     // its argument there
  std::vector<Copy> copies;
  Products products;
};

// The words that lanes exchange now, and those before, which slower lanes may still read.
struct Warp {
  alignas(64) char staging[2][kStagingBytes];
};

// Kept for the blocks of later launches, because new stacks cost more than most launches. There may
// be more threads and warps than the current block has.
struct Block {
  bool any;  // the result of the last barrier
  Context scheduler;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::vector<int> exchanges;
  std::vector<char> shared;
  const void* params;
  void (*call)(const void* kernel, const void* params);
};

thread_local constinit Block* block __attribute__((tls_model("initial-exec"))) = nullptr;

Thread& current() { return block->threads[here.thread]; }

// A thread may wait on one thread of the host and continue on another. What it does between waits is therefore not
// inlined: a compiler may keep the addresses of thread_local variables from one wait to the next.
#define PYATTN_BETWEEN_WAITS [[gnu::noinline]]

// Leaves the current thread for the warp's next lane; the last lane, for the scheduler.
PYATTN_BETWEEN_WAITS void wait_for(Wait what) {
  Thread& t = current();
  t.wait = what;
  const bool is_last = lane() == kWarpLanes - 1;
  leave_for(t.context, is_last ? block->scheduler : block->threads[++here.thread].context);
}

PYATTN_BETWEEN_WAITS void call_kernel() { block->call(here.kernel, block->params); }

void run_kernels() {
  for (;; wait_for(Wait::kEnd)) call_kernel();
}

// Gives the block as many threads and as much shared memory.
void prepare(int threads, int shared_bytes) {
  Block& b = *block;
  const size_t before = b.threads.size();
  b.threads.resize(std::max(before, size_t(threads)));
  for (size_t t = before; t < b.threads.size(); ++t)
    begin(b.threads[t].context, b.threads[t].stack.get(), kStackBytes, run_kernels);
  b.warps.resize(b.threads.size() / kWarpLanes), b.exchanges.resize(b.threads.size());
  b.shared.resize(std::max(b.shared.size(), size_t(shared_bytes) + 1023));
  const auto begin = reinterpret_cast<uintptr_t>(b.shared.data());
  here.shared_memory = b.shared.data() + (1023 - (begin + 1023) % 1024), here.shared_bytes = shared_bytes;
  here.exchanges = b.exchanges.data();
}

// Runs a warp until its lanes wait for a barrier or have ended, all of them for the same thing.
void run_warp(int first) {
  std::vector<Thread>& threads = block->threads;
  Wait wait;
  do {
    here.thread = first;
    leave_for(block->scheduler, threads[first].context);
    wait = threads[first].wait;
    for (int i = 0; i < kWarpLanes; ++i)
      require(threads[first + i].wait == wait, "lanes of a warp wait for different things");
  } while (wait == Wait::kWarp);
}

void run_block(int64_t index, int64_t index_y, int threads) {
  Block& b = *block;
  here.block = index, here.block_y = index_y;
  std::memset(shared_memory(), 0xff, here.shared_bytes);  // NaN in every format
  if constexpr (kRaces) races::begin_block(shared_memory(), here.shared_bytes);
  std::fill(b.exchanges.begin(), b.exchanges.end(), 0);
  const bool backwards = (index + index_y) % 2;  // so not always the same warp runs ahead
  const Thread& first = b.threads[0];
  do {
    for (int t = 0; t < threads; t += kWarpLanes) run_warp(backwards ? threads - kWarpLanes - t : t);
    b.any = false;
    for (int i = 0; i < threads; ++i) {
      const Thread& t = b.threads[i];
      require(t.wait == first.wait, "some warps wait at a barrier, others have ended");
      require(t.wait == Wait::kEnd || t.place == first.place, "warps wait at different barriers");
      b.any = b.any || t.any;
    }
    if constexpr (kRaces)
      if (first.wait == Wait::kBlock) races::barrier(first.place);
  } while (first.wait == Wait::kBlock);
  for (here.thread = 0; here.thread < threads; ++here.thread) {
    require(current().products.empty(), "a block ends before its products");
    std::vector<Copy>& copies = current().copies;
    for (const Copy& copy : copies)
      if constexpr (kRaces)
        races::leave_copy(copy.to);
      else
        fail("a block ends before its copies");
    copies.clear();
  }
}

std::mutex mutex;
std::vector<std::unique_ptr<Block>> idle;

std::unique_ptr<Block> take() {
  const std::lock_guard lock(mutex);
  if (idle.empty()) return std::make_unique<Block>();
  std::unique_ptr<Block> taken = std::move(idle.back());
  idle.pop_back();
  return taken;
}

void give_back(std::unique_ptr<Block> taken) {
  const std::lock_guard lock(mutex);
  idle.push_back(std::move(taken));
}

}  // namespace

void fail(const char* what) {
  std::fprintf(stderr, "emulation: %s\n", what);
  std::abort();
}

bool barrier(bool any, Place place) {
  Thread& t = current();
  t.any = any, t.place = place;
  wait_for(Wait::kBlock);
  return block->any;
}

char* staging() { return block->warps[here.thread / kWarpLanes].staging[block->exchanges[here.thread]++ & 1]; }

void exchange() { wait_for(Wait::kWarp); }

void copy_later(void* to, const void* from, int bytes) {
  if constexpr (kRaces) races::begin_copy(to);
  current().copies.push_back({to, from, bytes});
}

void copy_now(Place place) {
  if constexpr (kRaces)
    if (!races::wait(place)) return;
  std::vector<Copy>& copies = current().copies;
  for (const Copy& copy : copies) {
    if constexpr (kRaces) races::end_copy(copy.to);
    std::memset(copy.to, 0, 16);
    std::memcpy(copy.to, copy.from, copy.bytes);
  }
  copies.clear();
}

void multiply_later(std::function<void()> product) { current().products.groups.back().push_back(std::move(product)); }

void end_group() { current().products.groups.emplace_back(); }

void multiply_now(int left) {
  auto& groups = current().products.groups;
  if (left == 0 && !groups.back().empty()) end_group();
  while (groups.size() > size_t(left) + 1) {
    for (const auto& product : groups.front()) product();
    groups.erase(groups.begin());
  }
}

void run(int64_t blocks, int64_t blocks_y, int threads, int shared_bytes, const void* kernel, const void* params,
         void (*call)(const void* kernel, const void* params)) {
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    std::unique_ptr<Block> own = take();
    block = own.get();
    own->params = params, own->call = call, here.kernel = kernel;
    prepare(threads, shared_bytes);
    for (int64_t at; (at = next++) < blocks * blocks_y;) run_block(at % blocks, at / blocks, threads);
    give_back(std::move(own));
  };
  std::vector<std::thread> others;
  for (unsigned i = 1; i < std::min<int64_t>(blocks * blocks_y, std::thread::hardware_concurrency()); ++i)
    others.emplace_back(work);
  work();
  for (std::thread& other : others) other.join();
}

}  // namespace emulation
