#include "tensor_core.h"

#include <bit>
#include <cstring>

#include "threads.h"

namespace emulation {
namespace {

// A row of a product: 8 columns.
typedef float Floats __attribute__((vector_size(32)));
typedef double Doubles __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(32)));
typedef int64_t Longs __attribute__((vector_size(64)));

template <class To, class From>
To convert(From x) {
  return __builtin_convertvector(x, To);
}

Doubles magnitude(Doubles x) { return (Doubles)((Longs)x & INT64_MAX); }

// x, truncated to float.
Floats truncate(Doubles x) {
  const Floats nearest = convert<Floats>(x);
  const Ints beyond = convert<Ints>(magnitude(convert<Doubles>(nearest)) > magnitude(x));
  return (Floats)((Ints)nearest + (beyond & (nearest - nearest == 0)));  // one less in its bits is nearer to 0
}

// One step of a tensor core: each addend is aligned to the largest and truncated kExtraBits
// below the last bit that the largest has in float, and so is their sum (Fasi, Higham,
// Mikaitis and Pranesh 2021, Numerical behavior of NVIDIA tensor cores). From compute
// capability 8.0 on, the A100 is the least accurate: one extra bit, and a step adds the
// accumulator and 8 products of 16 bits, or 4 of tf32. (The H100 has two extra bits, and
// adds all products of an instruction in one step.)
constexpr int kExtraBits = 1;

template <int kCount>
Floats add_aligned(const Doubles (&addends)[kCount]) {
  constexpr int kUnits = 1 << (23 + kExtraBits);
  Doubles largest = {}, sum = {};
#pragma GCC unroll 16
  for (Doubles x : addends) largest = magnitude(x) > largest ? magnitude(x) : largest, sum += x;
  const Longs power = (Longs)largest & 0x7ff0000000000000;
  const Doubles scale = kUnits * (Doubles)(0x7fe0000000000000 - power);  // kUnits / power
  Ints units = {};
#pragma GCC unroll 16
  for (Doubles x : addends) units += convert<Ints>(x * scale);
  const Ints exact = convert<Ints>((largest == 0) | (sum - sum != 0));  // only zeros; or infinity or NaN
  return exact ? convert<Floats>(sum) : truncate(convert<Doubles>(units) * (Doubles)power / kUnits);
}

// The words of a lane: its parts of a, b and c.
constexpr int kA = 0, kB = 4, kC = 6, kCount = 10;

// c += a b for the fragments of a warp's lanes, once for all of them. widen(word, term) is one of a word's kTerms columns.
template <int kTerms, auto widen>
void multiply_warp(Words& words) {
  constexpr int kDepth = 4 * kTerms;  // of a step, which takes one word of b and two of a
  for (int half = 0; half < 2; ++half) {
    Doubles b[kDepth];
    for (int t = 0; t < 4; ++t)
      for (int k = 0; k < kTerms; ++k)
        for (int column = 0; column < 8; ++column)
          b[t * kTerms + k][column] = widen(words[4 * column + t][kB + half], k);
    for (int row = 0; row < 16; ++row) {
      uint32_t (*const lanes)[kMaxWords] = words + row % 8 * 4;
      const int below = row / 8, c = kC + 2 * below;
      Doubles addends[kDepth + 1];
      Floats sums;
      for (int t = 0; t < 4; ++t) {
        for (int k = 0; k < kTerms; ++k)
          addends[t * kTerms + k] = double{widen(lanes[t][kA + 2 * half + below], k)} * b[t * kTerms + k];
        for (int i = 0; i < 2; ++i) sums[2 * t + i] = std::bit_cast<float>(lanes[t][c + i]);
      }
      addends[kDepth] = convert<Doubles>(sums);
      sums = add_aligned(addends);
      for (int t = 0; t < 4; ++t)
        for (int i = 0; i < 2; ++i) lanes[t][c + i] = std::bit_cast<uint32_t>(sums[2 * t + i]);
    }
  }
}

template <int kTerms, auto widen>
void multiply_add(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  uint32_t mine[kCount];
  std::memcpy(mine + kA, a, sizeof a), std::memcpy(mine + kB, b, sizeof b), std::memcpy(mine + kC, c, sizeof c);
  std::memcpy(c, exchange(mine, kCount, multiply_warp<kTerms, widen>)[lane()] + kC, sizeof c);
}

float widen_f16(uint32_t x, int term) {
  return static_cast<float>(std::bit_cast<_Float16>(static_cast<uint16_t>(x >> 16 * term)));
}
float widen_bf16(uint32_t x, int term) { return std::bit_cast<float>(term ? x & 0xffff0000 : x << 16); }
float widen_tf32(uint32_t x, int) { return std::bit_cast<float>(x & 0xffffe000); }

}  // namespace

void multiply_f16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  multiply_add<2, widen_f16>(c, a, b);
}
void multiply_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  multiply_add<2, widen_bf16>(c, a, b);
}
void multiply_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  multiply_add<1, widen_tf32>(c, a, b);
}

}  // namespace emulation
