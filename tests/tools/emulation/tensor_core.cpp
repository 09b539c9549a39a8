#include "tensor_core.h"

#include <bit>

#include "threads.h"

namespace emulation {
namespace {

// A lane's part of a product: two rows of two columns.
typedef float Floats __attribute__((vector_size(16)));
typedef double Doubles __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(16)));
typedef int64_t Longs __attribute__((vector_size(32)));

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

// widen turns a word into kTerms columns. The lanes exchange
// six widened words each: a's four, then b's two.
template <int kTerms, class Widen>
void multiply_add(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Widen widen) {
  float mine[6 * kTerms];
  for (int w = 0; w < 6; ++w) widen(w < 4 ? a[w] : b[w - 4], mine + w * kTerms);
  const auto& words = exchange(reinterpret_cast<const uint32_t*>(mine), 6 * kTerms);
  const auto float_of = [&](int lane, int word) { return std::bit_cast<float>(words[lane][word]); };
  const int g = lane() / 4, t = lane() % 4;
  Floats sums = {c[0], c[1], c[2], c[3]};
  // half: the columns in word `half` of b, and in words 2 half and 2 half + 1 of a.
  for (int half = 0; half < 2; ++half) {
    Doubles addends[4 * kTerms + 1];
#pragma GCC unroll 4
    for (int lane = 0; lane < 4; ++lane)
      for (int k = 0; k < kTerms; ++k) {
        const int in_a = 2 * half * kTerms + k, in_b = (4 + half) * kTerms + k;
        const float above = float_of(4 * g + lane, in_a), below = float_of(4 * g + lane, in_a + kTerms);
        const float left = float_of(8 * t + lane, in_b), right = float_of(8 * t + 4 + lane, in_b);
        const Floats rows = {above, above, below, below}, columns = {left, right, left, right};
        addends[lane * kTerms + k] = convert<Doubles>(rows) * convert<Doubles>(columns);
      }
    addends[4 * kTerms] = convert<Doubles>(sums);
    sums = add_aligned(addends);
  }
  for (int i = 0; i < 4; ++i) c[i] = sums[i];
}

float widen_f16(uint32_t x) { return static_cast<float>(std::bit_cast<_Float16>(static_cast<uint16_t>(x))); }
float widen_bf16(uint32_t x) { return std::bit_cast<float>(x << 16); }
float widen_tf32(uint32_t x) { return std::bit_cast<float>(x & 0xffffe000); }

}  // namespace

void multiply_f16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  multiply_add<2>(c, a, b, [](uint32_t w, float* x) { x[0] = widen_f16(w), x[1] = widen_f16(w >> 16); });
}
void multiply_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  multiply_add<2>(c, a, b, [](uint32_t w, float* x) { x[0] = widen_bf16(w), x[1] = widen_bf16(w >> 16); });
}
void multiply_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  multiply_add<1>(c, a, b, [](uint32_t w, float* x) { *x = widen_tf32(w); });
}

}  // namespace emulation
