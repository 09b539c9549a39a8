// The factors of products on tensor cores, as a warp's lanes hold them (ptx.h has the layouts). 16-bit types multiply as they
// are. float multiplies as three products of tf32, high and low halves of each factor, and adds in float what the tensor
// cores, which round sums towards zero, add up for one slice alone (Ootomo and Yokota 2022): without that the error would
// grow with the number of keys.
#pragma once

namespace pyattn::cuda {
namespace {

PYATTN_DEVICE int lane() { return thread_index() % kWarpLanes; }
PYATTN_DEVICE int warp() { return thread_index() / kWarpLanes; }

// x of all lanes, added up, in every lane.
template <class T>
PYATTN_DEVICE T sum_lanes(T x) {
#pragma unroll
  for (int lanes = kWarpLanes / 2; lanes; lanes /= 2) x += shuffle_xor(x, lanes);
  return x;
}

// Columns that one product of fragments sums over: 32 bytes of a row.
template <class S>
inline constexpr int kSlice = 32 / sizeof(S);

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
template <>
struct Left<float> {
  uint32_t high[4], low[4];
};
template <>
struct Right<float> {
  uint32_t high[2], low[2];
};

PYATTN_DEVICE void multiply(float (&c)[4], const Left<f16>& a, const Right<f16>& b) { multiply_f16(c, a.data, b.data); }
PYATTN_DEVICE void multiply(float (&c)[4], const Left<bf16>& a, const Right<bf16>& b) {
  multiply_bf16(c, a.data, b.data);
}
PYATTN_DEVICE void multiply(float (&c)[4], const Left<float>& a, const Right<float>& b) {
  float sum[4] = {};
  multiply_tf32(sum, a.low, b.high);
  multiply_tf32(sum, a.high, b.low);
  multiply_tf32(sum, a.high, b.high);
#pragma unroll
  for (int i = 0; i < 4; ++i) c[i] += sum[i];
}

// From the words of a slice as they lie in memory.
template <int kWords>
PYATTN_DEVICE void split(uint32_t (&high)[kWords], uint32_t (&low)[kWords], const uint32_t* words) {
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    high[i] = round_tf32(float_of(words[i]));
    low[i] = round_tf32(float_of(words[i]) - float_of(high[i]));
  }
}

template <class S>
PYATTN_DEVICE Left<S> make_left(const uint32_t (&words)[4]) {
  Left<S> a;
  if constexpr (sizeof(S) == 4) {
    split(a.high, a.low, words);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) a.data[i] = words[i];
  }
  return a;
}

template <class S>
PYATTN_DEVICE Right<S> make_right(uint32_t word0, uint32_t word1) {
  const uint32_t words[2] = {word0, word1};
  Right<S> b;
  if constexpr (sizeof(S) == 4)
    split(b.high, b.low, words);
  else
    b.data[0] = word0, b.data[1] = word1;
  return b;
}

template <class S>
PYATTN_DEVICE uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<S, bf16>)
    return pack_bf16(low, high);
  else
    return pack_f16(low, high);
}

PYATTN_DEVICE float widen(float x) { return x; }
PYATTN_DEVICE float widen(bf16 x) { return float_of(uint32_t{x.bits} << 16); }
PYATTN_DEVICE float widen(f16 x) { return widen_f16(x.bits); }

// Sums c as a left factor, their columns being what is summed over: kSlice / 8 of them, one after the other. Of float the
// tensor core's columns t and t + 4 are c's 2t and 2t + 1, so that no lane needs another's: load_summed (tile.h) agrees.
template <class S>
PYATTN_DEVICE Left<S> as_left(const float (*c)[4]) {
  if constexpr (sizeof(S) == 4) {
    const uint32_t words[4] = {bits_of(c[0][0]), bits_of(c[0][2]), bits_of(c[0][1]), bits_of(c[0][3])};
    return make_left<S>(words);
  } else {
    return {
        {pack<S>(c[0][0], c[0][1]), pack<S>(c[0][2], c[0][3]), pack<S>(c[1][0], c[1][1]), pack<S>(c[1][2], c[1][3])}};
  }
}

}  // namespace
}  // namespace pyattn::cuda
