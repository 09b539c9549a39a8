// csrc/cuda/ptx/ptx.h for a host: the same functions over the threads
// of threads.h, so the kernels run where there is no GPU.
//
// It is stricter than a GPU, to expose faults: shared memory begins as NaN; an asynchronous copy
// arrives when it is waited for and not before; warps run one after the other, from the first or
// from the last (threads.h), up to the next barrier; addresses in shared memory are checked for
// bounds and alignment. Tensor cores align and truncate their addends, as a GPU's do.
#pragma once

#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "attention.h"
#include "tensor_core.h"
#include "threads.h"

#define PYATTN_DEVICE inline
#define PYATTN_KERNEL(...) void
#define __grid_constant__

namespace pyattn::cuda {
namespace {

inline constexpr int kWarpLanes = emulation::kWarpLanes;

using emulation::block_index;
using emulation::block_index_y;
using emulation::thread_index;

char* shared_memory() { return emulation::shared_memory(); }

using std::exp;
using std::log;
using std::signbit;

// The last two arguments of functions that synchronize say where the kernel calls them.
void barrier(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  emulation::barrier(false, {file, line});
}
bool barrier_or(bool any, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  return emulation::barrier(any, {file, line});
}
void set_flag(char& flag) { std::atomic_ref(flag).store(1, std::memory_order_relaxed); }
void add_atomically(float* to, float x) { std::atomic_ref(*to).fetch_add(x, std::memory_order_relaxed); }

// ---- Warp: every lane publishes its words and reads the others' ----

template <class T>
T shuffle_xor(T x, int lanes) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  auto& all = emulation::staged<T[kWarpLanes]>();
  all[emulation::lane()] = x;
  emulation::exchange();
  return all[emulation::lane() ^ lanes];
}

using SharedAddress = uintptr_t;
SharedAddress shared_address(const void* p) { return reinterpret_cast<SharedAddress>(p); }

// The lanes' addresses: those of the rows of four matrices.
const SharedAddress* exchange_rows(SharedAddress row) {
  emulation::check_shared(row, 16, 16);
  auto& rows = emulation::staged<SharedAddress[kWarpLanes]>();
  rows[emulation::lane()] = row;
  emulation::exchange();
  return rows;
}

void load_matrices(uint32_t (&r)[4], SharedAddress row) {
  const SharedAddress* rows = exchange_rows(row);
  const int lane = emulation::lane();
  for (int matrix = 0; matrix < 4; ++matrix)
    std::memcpy(&r[matrix], reinterpret_cast<const char*>(rows[8 * matrix + lane / 4]) + 4 * (lane % 4), 4);
}

void load_matrices_transposed(uint32_t (&r)[4], SharedAddress row) {
  const SharedAddress* rows = exchange_rows(row);
  const int lane = emulation::lane();
  for (int matrix = 0; matrix < 4; ++matrix)
    for (int i = 0; i < 2; ++i)
      std::memcpy(reinterpret_cast<char*>(&r[matrix]) + 2 * i,
                  reinterpret_cast<const char*>(rows[8 * matrix + 2 * (lane % 4) + i]) + 2 * (lane / 4), 2);
}

uint32_t load_word(SharedAddress address) {
  emulation::check_shared(address, 4, 4);
  return *reinterpret_cast<const uint32_t*>(address);
}

void load_words(uint32_t (&words)[4], SharedAddress address) {
  emulation::check_shared(address, 16, 16);
  std::memcpy(words, reinterpret_cast<const void*>(address), 16);
}

void load_16_bytes(uint32_t (&words)[4], const void* from) {
  emulation::require(reinterpret_cast<uintptr_t>(from) % 16 == 0, "load of 16 bytes");
  std::memcpy(words, from, 16);
}

using emulation::multiply_bf16;
using emulation::multiply_f16;
using emulation::multiply_tf32;

// ---- Products by a warpgroup: as late as a kernel allows, so that it reads no sums and changes no factors before they are there ----

template <class... T>
void begin_products(T&...) {}
using emulation::end_group;
template <int kLeft, class... T>
void wait_for_products(T&...) {
  emulation::multiply_now(kLeft);
}

// The half-word at a row and a byte of a matrix that begins at `from`: a unit of 16 bytes lies where its number, exclusive or
// the row's in its group of eight, says.
uint32_t swizzled(SharedAddress from, int row, int byte) {
  const SharedAddress begin = shared_address(shared_memory()), address = from - begin + row * 128 + byte;
  const SharedAddress place = begin + (address ^ (address >> 7 & 7) << 4);
  emulation::check_shared(place, 2, 2);
  return *reinterpret_cast<const uint16_t*>(place);
}
uint32_t swizzled_word(SharedAddress from, int row, int byte) {
  return swizzled(from, row, byte) | swizzled(from, row, byte + 2) << 16;
}

template <class S>
void multiply_on(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], bool add) {
  if (!add) c[0] = c[1] = c[2] = c[3] = 0;
  if constexpr (std::is_same_v<S, bf16>)
    multiply_bf16(c, a, b);
  else
    multiply_f16(c, a, b);
}

template <class S, int kN>
void multiply_by_rows(float (&c)[kN][4], const uint32_t (&a)[4], SharedAddress b_from, bool add) {
  const int row = emulation::lane() / 4, byte = emulation::lane() % 4 * 4;
  for (int n = 0; n < kN; ++n) {
    const uint32_t b[2] = {swizzled_word(b_from, 8 * n + row, byte), swizzled_word(b_from, 8 * n + row, byte + 16)};
    multiply_on<S>(c[n], a, b, add);
  }
}

template <class S, int kN>
void multiply_shared(float (&c)[kN][4], SharedAddress a_from, SharedAddress b_from, bool add) {
  emulation::multiply_later([=, &c] {
    const int row = thread_index() / kWarpLanes % 4 * 16 + emulation::lane() / 4, byte = emulation::lane() % 4 * 4;
    uint32_t a[4];
    for (int i = 0; i < 4; ++i) a[i] = swizzled_word(a_from, row + i % 2 * 8, byte + i / 2 * 16);
    multiply_by_rows<S>(c, a, b_from, add);
  });
}

template <class S, int kN>
void multiply_columns(float (&c)[kN][4], const uint32_t (&a)[4], SharedAddress b_from, int panel) {
  emulation::multiply_later([=, &c, a0 = a[0], a1 = a[1], a2 = a[2], a3 = a[3]] {
    const int row = emulation::lane() % 4 * 2;
    for (int n = 0; n < kN; ++n) {
      const int column = 8 * n + emulation::lane() / 4;
      const auto element = [&](int k) { return swizzled(b_from + column / 64 * panel, row + k, column % 64 * 2); };
      const uint32_t b[2] = {element(0) | element(1) << 16, element(8) | element(9) << 16};
      multiply_on<S>(c[n], {a0, a1, a2, a3}, b, true);
    }
  });
}

// ---- Copies ----

void copy_16_bytes(SharedAddress to, const void* from, int bytes) {
  emulation::check_shared(to, 16, 16);
  emulation::require(reinterpret_cast<uintptr_t>(from) % 16 == 0 && 0 <= bytes && bytes <= 16, "copy of 16 bytes");
  emulation::copy_later(reinterpret_cast<void*>(to), from, bytes);
}
void wait_for_copies(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  emulation::copy_now({file, line});
}

// ---- Arithmetic ----

float exp2(float x) { return x < -126 ? 0 : std::exp2f(x); }
float reciprocal(float x) { return 1 / x; }

uint32_t round_tf32(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return std::isfinite(x) ? (bits + 0x1000) & 0xffffe000 : bits;
}

uint32_t pack_f16(float low, float high) {
  return std::bit_cast<uint16_t>(static_cast<_Float16>(low)) |
         uint32_t{std::bit_cast<uint16_t>(static_cast<_Float16>(high))} << 16;
}

uint32_t round_bf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return std::isnan(x) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
uint32_t pack_bf16(float low, float high) { return round_bf16(low) | round_bf16(high) << 16; }

float widen_f16(uint16_t x) { return static_cast<float>(std::bit_cast<_Float16>(x)); }

uint32_t multiply_high(uint32_t a, uint32_t b) { return static_cast<uint32_t>(uint64_t{a} * b >> 32); }
float float_of(uint32_t x) { return std::bit_cast<float>(x); }
uint32_t bits_of(float x) { return std::bit_cast<uint32_t>(x); }

template <class T>
T opaque(T x) {
  return x;
}

// ---- Launch ----

const char* clear_memory(void* p, int64_t bytes, void*) {
  emulation::require(p && bytes > 0, "no memory to clear");
  std::memset(p, 0, bytes);
  return nullptr;
}

// Blocks of threads.
struct Grid {
  int64_t x, y;

  Grid(int64_t x, int64_t y = 1) : x(x), y(y) {}
};

template <class Params>
const char* launch(void (*kernel)(Params), Grid grid, int threads, int shared_bytes, void*, const Params& p) {
  const auto call = [](const void* kernel, const void* p) {
    reinterpret_cast<void (*)(Params)>(kernel)(*static_cast<const Params*>(p));
  };
  emulation::run(grid.x, grid.y, threads, shared_bytes, reinterpret_cast<const void*>(kernel), &p, call);
  return nullptr;
}

}  // namespace
}  // namespace pyattn::cuda
