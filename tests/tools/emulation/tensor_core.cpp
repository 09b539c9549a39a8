#include "tensor_core.h"

#include <cstring>

#include "threads.h"

namespace emulation {
namespace {

// A row of a product: 8 columns.
typedef float Floats __attribute__((vector_size(32)));
typedef double Doubles __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(32)));
typedef int64_t Longs __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(32)));
typedef uint16_t HalfWords __attribute__((vector_size(16)));
typedef _Float16 Halves __attribute__((vector_size(16)));

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

// The fragments of a warp, in rows of 8 columns. Lane 4 row + t has words [row][t] of a and
// c, [t][row] of b, whose column is the row.
struct Fragments {
  uint32_t a[4][8][4];
  uint32_t b[2][4][8];
  float c[2][8][4][2];
};
static_assert(sizeof(Fragments) == kStagingBytes);

template <class To, class From>
To load(const From* p) {
  To x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

// c += a b, once for all lanes. widen(words, term) is one of each word's kTerms columns.
template <int kTerms, auto widen>
void multiply_warp(Fragments& f) {
  constexpr int kDepth = 4 * kTerms;  // of a step, which takes one word of b and two of a
  for (int half = 0; half < 2; ++half) {
    Doubles b[kDepth];
    for (int t = 0; t < 4; ++t)
      for (int k = 0; k < kTerms; ++k) b[t * kTerms + k] = convert<Doubles>(widen(load<Words>(f.b[half][t]), k));
    for (int below = 0; below < 2; ++below) {
      double a[kTerms][8][4];
      for (int row = 0; row < 8; row += 2)
        for (int k = 0; k < kTerms; ++k) {
          const Doubles two_rows = convert<Doubles>(widen(load<Words>(f.a[2 * half + below][row]), k));
          std::memcpy(a[k][row], &two_rows, sizeof two_rows);
        }
      for (int row = 0; row < 8; ++row) {
        Doubles addends[kDepth + 1];
        for (int t = 0; t < 4; ++t)
          for (int k = 0; k < kTerms; ++k) addends[t * kTerms + k] = a[k][row][t] * b[t * kTerms + k];
        addends[kDepth] = convert<Doubles>(load<Floats>(f.c[below][row]));
        const Floats sums = add_aligned(addends);
        std::memcpy(f.c[below][row], &sums, sizeof sums);
      }
    }
  }
}

template <int kTerms, auto widen>
void multiply_add(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  Fragments& f = staged<Fragments>();
  const int row = lane() / 4, t = lane() % 4;
  for (int i = 0; i < 4; ++i) f.a[i][row][t] = a[i];
  for (int i = 0; i < 2; ++i) f.b[i][t][row] = b[i];
  for (int i = 0; i < 2; ++i) std::memcpy(f.c[i][row][t], c + 2 * i, sizeof f.c[i][row][t]);
  if (lane() == kWarpLanes - 1) multiply_warp<kTerms, widen>(f);
  exchange();
  for (int i = 0; i < 2; ++i) std::memcpy(c + 2 * i, f.c[i][row][t], sizeof f.c[i][row][t]);
}

Floats widen_f16(Words x, int term) { return convert<Floats>((Halves)convert<HalfWords>(x >> 16 * term)); }
Floats widen_bf16(Words x, int term) { return (Floats)(term ? x & 0xffff0000 : x << 16); }
Floats widen_tf32(Words x, int) { return (Floats)(x & 0xffffe000); }

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
