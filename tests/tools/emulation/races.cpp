// Finds races on the shared memory of emulated blocks. Before each access, code compiled
// with -fsanitize=thread calls __tsan_read4 and the like, which are defined here instead
// of ThreadSanitizer's.
//
// Two accesses to a byte, one of them a write, race unless the same thread makes both, a barrier
// of the block lies between them, or both threads are of one warp and an exchange of its lanes
// lies between them. An asynchronous copy writes its 16 bytes from its issue until its thread
// has waited for it: meanwhile every access races, the thread's own too. That warps happen
// to run one after the other orders nothing, so one run finds all races of the path it takes.
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "threads.h"

namespace emulation {
namespace {

enum class Kind { kRead, kWrite, kAtomicWrite, kCopy, kEnd };
constexpr const char* kNames[] = {"read", "write", "atomic write", "copy", "end"};

struct Access {
  Kind kind;
  int thread;  // kSeveral: of one warp
  uint32_t epoch, exchange;
};
constexpr int kSeveral = -1;

struct Byte {
  Access write{}, read{};  // the last ones; epoch 0: none
  uint32_t readers = 0;    // a bit for each warp that has read it in read.epoch
  bool copying = false;    // by write.thread
};

// The accesses of the blocks that a thread of the host runs one after the other.
struct Shadow {
  uintptr_t begin = 0, size = 0;  // of shared memory
  Byte* bytes = nullptr;
  uint32_t epoch = 0;  // barriers so far, the beginnings of blocks included
};
// initial-exec: otherwise each access of the kernels would call a function to find the address.
[[gnu::tls_model("initial-exec")]] thread_local constinit Shadow shadow;
thread_local std::vector<Byte> shadow_bytes;

// Races of one kind are reported once, by the first of them.
struct Report {
  int64_t block, bytes = 0;
  uintptr_t offset;
  int first, second;  // warps
};
std::mutex mutex;
std::map<std::tuple<const void*, Kind, Kind, bool>, Report> reports;
std::set<std::string> places;
std::string taken_out, text;

bool ordered(const Access& before, const Access& now) {
  if (before.epoch != now.epoch || before.thread == now.thread) return true;
  return before.thread / kWarpLanes == now.thread / kWarpLanes && before.exchange < now.exchange;
}

void report(uintptr_t offset, Kind before, int first, const Access& now, bool copying) {
  const std::lock_guard lock(mutex);
  const auto [at, added] = reports.try_emplace({here.kernel, before, now.kind, copying});
  Report& r = at->second;
  if (added) r = {here.block, 0, offset, first, now.thread / kWarpLanes};
  ++r.bytes;
}

void access(uintptr_t address, size_t count, Kind kind) {
  const uintptr_t offset = address - shadow.begin;
  if (offset >= shadow.size) return;
  const int thread = here.thread, warp = thread / kWarpLanes;
  const Access now{kind, thread, shadow.epoch, static_cast<uint32_t>(here.exchanges[thread])};
  for (uintptr_t at = offset; at < std::min(offset + count, shadow.size); ++at) {
    Byte& b = shadow.bytes[at];
    const bool both_atomic = kind == Kind::kAtomicWrite && b.write.kind == kind;
    if (b.copying || (!ordered(b.write, now) && !both_atomic))
      report(at, b.write.kind, b.write.thread / kWarpLanes, now, b.copying);
    const bool read_now = b.read.epoch == now.epoch;
    if (kind == Kind::kRead) {
      const bool same_moment =
          read_now && b.read.thread != thread && b.read.exchange == now.exchange && b.readers >> warp & 1;
      b.readers = (read_now ? b.readers : 0) | 1u << warp;
      b.read = now;
      if (same_moment) b.read.thread = kSeveral;
      continue;
    }
    if (const uint32_t others = read_now ? b.readers & ~(1u << warp) : 0; others)
      report(at, Kind::kRead, __builtin_ctz(others), now, false);
    else if (read_now && b.read.thread != thread && b.read.exchange >= now.exchange)
      report(at, Kind::kRead, warp, now, false);
    b.write = now;
  }
}

bool counts(const char* what, Place place) {
  const std::string name = std::string(what) + " " + place.file + ":" + std::to_string(place.line);
  const std::lock_guard lock(mutex);
  places.insert(name);
  return name != taken_out;
}

}  // namespace

namespace races {

void begin_block(const char* shared_memory, int bytes) {
  shadow_bytes.assign(bytes, {});
  shadow = {reinterpret_cast<uintptr_t>(shared_memory), static_cast<uintptr_t>(bytes), shadow_bytes.data(),
            shadow.epoch + 1};
}

void barrier(Place place) { shadow.epoch += counts("barrier", place); }
bool wait(Place place) { return counts("wait", place); }

void begin_copy(const void* to) {
  const auto address = reinterpret_cast<uintptr_t>(to);
  access(address, 16, Kind::kCopy);
  for (int i = 0; i < 16; ++i) shadow.bytes[address - shadow.begin + i].copying = true;
}

void end_copy(const void* to) {
  const auto address = reinterpret_cast<uintptr_t>(to);
  for (int i = 0; i < 16; ++i) shadow.bytes[address - shadow.begin + i].copying = false;
  access(address, 16, Kind::kWrite);
}

void leave_copy(const void* to) {
  const int warp = here.thread / kWarpLanes;
  report(reinterpret_cast<uintptr_t>(to) - shadow.begin, Kind::kCopy, warp, {Kind::kEnd, here.thread, 0, 0}, true);
}

}  // namespace races
}  // namespace emulation

using namespace emulation;

extern "C" {

// The races since the last call, line by line: the kernel's
// address in the library, then what happened.
const char* races_found() {
  const std::lock_guard lock(mutex);
  text.clear();
  for (const auto& [key, r] : reports) {
    const auto& [kernel, before, now, copying] = key;
    Dl_info library;
    dladdr(kernel, &library);
    const auto address = static_cast<const char*>(kernel) - static_cast<const char*>(library.dli_fbase);
    char line[300];
    std::snprintf(line, sizeof line,
                  "%zx, shared memory + %zu: %s of warp %d%s, %s of warp %d; block %zd, %zd bytes in all\n",
                  size_t(address), size_t(r.offset), kNames[int(before)], r.first, copying ? " under way" : "",
                  kNames[int(now)], r.second, size_t(r.block), size_t(r.bytes));
    text += line;
  }
  reports.clear();
  return text.c_str();
}

// The barriers and waits that kernels have passed, line by line.
const char* places_seen() {
  const std::lock_guard lock(mutex);
  text.clear();
  for (const std::string& name : places) text += name + "\n";
  return text.c_str();
}

// From now on this place orders nothing.
void take_out(const char* place) {
  const std::lock_guard lock(mutex);
  taken_out = place;
}

#define PYATTN_HOOKS(n)                                                                      \
  void __tsan_read##n(void* p) { access(reinterpret_cast<uintptr_t>(p), n, Kind::kRead); }   \
  void __tsan_write##n(void* p) { access(reinterpret_cast<uintptr_t>(p), n, Kind::kWrite); } \
  void __tsan_unaligned_read##n(void* p) { __tsan_read##n(p); }                              \
  void __tsan_unaligned_write##n(void* p) { __tsan_write##n(p); }
PYATTN_HOOKS(1)
PYATTN_HOOKS(2)
PYATTN_HOOKS(4)
PYATTN_HOOKS(8)
PYATTN_HOOKS(16)
#undef PYATTN_HOOKS
void __tsan_read_range(void* p, size_t n) { access(reinterpret_cast<uintptr_t>(p), n, Kind::kRead); }
void __tsan_write_range(void* p, size_t n) { access(reinterpret_cast<uintptr_t>(p), n, Kind::kWrite); }
uint8_t __tsan_atomic8_load(const uint8_t* p, int) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
void __tsan_atomic8_store(uint8_t* p, uint8_t x, int) {
  access(reinterpret_cast<uintptr_t>(p), 1, Kind::kAtomicWrite);
  __atomic_store_n(p, x, __ATOMIC_RELAXED);
}
// Atomics on memory outside the block.
uint32_t __tsan_atomic32_load(const uint32_t* p, int) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
int __tsan_atomic32_compare_exchange_weak(uint32_t* p, uint32_t* expected, uint32_t x, int, int) {
  return __atomic_compare_exchange_n(p, expected, x, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}
uint64_t __tsan_atomic64_fetch_add(uint64_t* p, uint64_t x, int) { return __atomic_fetch_add(p, x, __ATOMIC_RELAXED); }
void __tsan_vptr_update(void**, void*) {}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
