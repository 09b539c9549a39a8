#include "tensor_core.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "threads.h"

namespace emulation {
namespace {

// x, truncated to what float holds.
float truncate(double x) {
  const float nearest = static_cast<float>(x);
  return std::abs(nearest) > std::abs(x) && std::isfinite(nearest) ? std::nextafterf(nearest, 0) : nearest;
}

// One step of a tensor core: each addend is aligned to the largest and truncated kExtraBits
// below the last bit that the largest has in float, and so is their sum (Fasi, Higham,
// Mikaitis and Pranesh 2021, Numerical behavior of NVIDIA tensor cores). From compute
// capability 8.0 on the A100 is the least accurate: one extra bit, and a step takes the
// accumulator and 8 products of 16 bits, or 4 of tf32. (The H100 has two extra bits, and
// takes all products of an instruction in one step.)
constexpr int kExtraBits = 1;

template <int kCount>
float add_aligned(const double (&addends)[kCount]) {
  double largest = 0, sum = 0;
  for (double x : addends) largest = std::max(largest, std::abs(x)), sum += x;
  if (largest == 0 || !std::isfinite(sum)) return static_cast<float>(sum);
  const double power = std::bit_cast<double>(std::bit_cast<uint64_t>(largest) & 0x7ff0000000000000);
  const double scale = (1 << (23 + kExtraBits)) / power;
  double units = 0;
  for (double x : addends) units += std::trunc(x * scale);
  return truncate(units / scale);
}

// widen makes kTerms columns of a word. The lanes exchange
// them widened, six words each: a's four, then b's two.
template <int kTerms, class Widen>
void multiply_add(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Widen widen) {
  float mine[6 * kTerms];
  for (int w = 0; w < 6; ++w) widen(w < 4 ? a[w] : b[w - 4], mine + w * kTerms);
  const auto& words = exchange(reinterpret_cast<const uint32_t*>(mine), 6 * kTerms);
  const int g = lane() / 4, t = lane() % 4;
  for (int i = 0; i < 4; ++i) {
    const int column = 2 * t + i % 2;
    // half: the columns that word half of b, and words 2 half and 2 half + 1 of a, hold.
    for (int half = 0; half < 2; ++half) {
      double addends[4 * kTerms + 1];
      for (int lane = 0; lane < 4; ++lane) {
        const uint32_t* left = words[4 * g + lane] + (2 * half + i / 2) * kTerms;
        const uint32_t* right = words[4 * column + lane] + (4 + half) * kTerms;
        for (int k = 0; k < kTerms; ++k)
          addends[lane * kTerms + k] = double{std::bit_cast<float>(left[k])} * double{std::bit_cast<float>(right[k])};
      }
      addends[4 * kTerms] = c[i];
      c[i] = add_aligned(addends);
    }
  }
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
