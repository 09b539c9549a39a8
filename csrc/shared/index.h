// Index: integer arithmetic over rows and keys, and ranges of them. Every
// backend shares this file; everything is constexpr, so device code may call it.
#pragma once

#include <cstdint>

// A loop that nvcc leaves rolled: unrolled in a kernel's hot loop, it would spill up to 2 KB of registers.
#ifdef __CUDACC__
#define PYATTN_ROLLED _Pragma("unroll 1")
#else
#define PYATTN_ROLLED
#endif

namespace pyattn::PYATTN_ISA {
namespace {

constexpr int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
constexpr int64_t clamp(int64_t x, int64_t low, int64_t high) { return min(max(x, low), high); }
constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
constexpr int64_t round_down(int64_t a, int64_t b) { return a / b * b; }

// Operands fit in 32 bits; a 64-bit division is several times slower, and on a GPU takes many registers.
constexpr int64_t divide(int64_t a, int64_t b) { return static_cast<uint32_t>(a) / static_cast<uint32_t>(b); }
constexpr int64_t remainder(int64_t a, int64_t b) { return static_cast<uint32_t>(a) % static_cast<uint32_t>(b); }

// The indices [begin, end); none where end <= begin.
struct Range {
  int64_t begin, end;

  constexpr bool empty() const { return end <= begin; }
  constexpr int64_t count() const { return max(0, end - begin); }
  constexpr bool contains(int64_t i) const { return begin <= i && i < end; }
  constexpr bool lies_in(Range other) const { return other.begin <= begin && end <= other.end; }

  // The part of this range that lies in the other; this range has begin <= end.
  constexpr Range in(Range other) const {
    const int64_t from = clamp(other.begin, begin, end);
    return {from, clamp(other.end, from, end)};
  }

  // The part that lies in [first, first + n), relative to first.
  constexpr Range within(int64_t first, int64_t n) const {
    const int64_t from = clamp(begin - first, 0, n);
    return {from, clamp(end - first, from, n)};
  }
};

// The last i below count for which begins(i) holds, or 0. begins holds up to some i and for none after it.
template <class F>
constexpr int64_t last_that(int64_t count, F begins) {
  int64_t i = 0;
  for (int64_t past = count; past - i > 1;) {
    const int64_t middle = (i + past) / 2;
    (begins(middle) ? i : past) = middle;
  }
  return i;
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
