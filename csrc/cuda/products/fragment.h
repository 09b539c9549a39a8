// Fragments: the factors of products on tensor cores, as a warp's lanes hold them (ptx.h has the
// layouts). 16-bit types multiply as they are. A float is the sum of two tf32, and a product of
// floats is three products of tf32. Tensor cores truncate sums, so they add up one slice only, and
// slices are added in float (Ootomo and Yokota 2022): else the error would grow with the number of keys.
#pragma once

#include <type_traits>

#include "storage.h"
#include "cuda/ptx/primitives.h"

namespace pyattn::cuda {
namespace {

PYATTN_DEVICE int lane() { return thread_index() % kWarpLanes; }
PYATTN_DEVICE int warp() { return thread_index() / kWarpLanes; }

// Who multiplies: a warp by mma, or a warpgroup by wgmma.
enum class Team { kWarp, kWarpgroup };

// The sum of x over all lanes, in every lane.
template <class T>
PYATTN_DEVICE T sum_lanes(T x) {
#pragma unroll
  for (int lanes = kWarpLanes / 2; lanes; lanes /= 2) x += shuffle_xor(x, lanes);
  return x;
}

// The columns that one product of fragments sums over.
inline constexpr int kSlice = 16;

// 16 rows of a slice.
template <class S>
struct Left {
  uint32_t data[4];
};
// 8 columns of a slice.
template <class S>
struct Right {
  uint32_t data[2];
};

// float: two times 8 columns, each number the sum of two tf32.
template <>
struct Left<float> {
  uint32_t high[2][4], low[2][4];
};
template <>
struct Right<float> {
  uint32_t high[2][2], low[2][2];
};

PYATTN_DEVICE void split(float x, uint32_t& high, uint32_t& low) {
  high = round_tf32(x);
  low = round_tf32(x - float_of(high));
}

PYATTN_DEVICE void multiply(float (&c)[4], const Left<f16>& a, const Right<f16>& b) { multiply_f16(c, a.data, b.data); }
PYATTN_DEVICE void multiply(float (&c)[4], const Left<bf16>& a, const Right<bf16>& b) {
  multiply_bf16(c, a.data, b.data);
}
PYATTN_DEVICE void multiply(float (&c)[4], const Left<float>& a, const Right<float>& b) {
  float sum[4] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    multiply_tf32(sum, a.low[half], b.high[half]);
    multiply_tf32(sum, a.high[half], b.low[half]);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) multiply_tf32(sum, a.high[half], b.high[half]);
#pragma unroll
  for (int i = 0; i < 4; ++i) c[i] += sum[i];
}

template <class S>
PYATTN_DEVICE uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<S, bf16>)
    return pack_bf16(low, high);
  else
    return pack_f16(low, high);
}

PYATTN_DEVICE double widen(double x) { return x; }
PYATTN_DEVICE float widen(float x) { return x; }
PYATTN_DEVICE float widen(bf16 x) { return float_of(uint32_t{x.bits} << 16); }
PYATTN_DEVICE float widen(f16 x) { return widen_f16(x.bits); }

// to = the nearest number to x.
PYATTN_DEVICE void narrow(double& to, float x) { to = x; }
PYATTN_DEVICE void narrow(float& to, float x) { to = x; }
PYATTN_DEVICE void narrow(bf16& to, float x) { to.bits = static_cast<uint16_t>(pack_bf16(x, 0)); }
PYATTN_DEVICE void narrow(f16& to, float x) { to.bits = static_cast<uint16_t>(pack_f16(x, 0)); }

// Two times 8 columns of sums as a left factor; the product sums over these columns. For
// float the tensor core's columns t and t + 4 are the sums' columns 2t and 2t + 1, so no
// lane needs another's; SummedCursor (product.h) has its rows in the same order.
template <class S>
PYATTN_DEVICE Left<S> as_left(const float (*c)[4]) {
  if constexpr (sizeof(S) == 4) {
    Left<S> a;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < 4; ++i) split(c[half][i % 2 * 2 + i / 2], a.high[half][i], a.low[half][i]);
    return a;
  } else {
    return {
        {pack<S>(c[0][0], c[0][1]), pack<S>(c[0][2], c[0][3]), pack<S>(c[1][0], c[1][1]), pack<S>(c[1][2], c[1][3])}};
  }
}

}  // namespace
}  // namespace pyattn::cuda
