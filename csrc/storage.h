// Storage: the types of numbers in tensors, and views of tensors by address and strides.
#pragma once

#include <cstdint>

namespace pyattn {

// Storage formats without arithmetic: kernels widen to float on load and round once on store.
struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

// Storage formats of 8 bits, which caches of keys and values have: a row times its scale is the numbers of a key.
struct i8 {
  int8_t value;
};
struct f8 {  // e4m3fn: no infinity, and one NaN of either sign
  uint8_t bits;
};

enum class DType : int { kFloat64, kFloat32, kBFloat16, kFloat16 };
inline constexpr int kNumDTypes = 4;

// A (batch, head, position, column) tensor. Strides count elements; columns are contiguous.
struct View {
  void* data;
  int64_t stride_b, stride_h, stride_s;
};

// A (batch, query head, query, key) tensor with any strides; a stride of 0 broadcasts.
struct BroadcastView {
  void* data;
  int64_t stride_b, stride_h, stride_q, stride_k;
};

// The storage type of a bias.
enum class BiasType : int { kNone, kLikeQ, kFloat32 };

struct BiasView : BroadcastView {
  BiasType type;
};

// The type of keys and values in 8 bits.
enum class ByteType : int { kNone, kInt8, kFloat8 };

// A number for each position of a tensor with KV heads; strides as in View, in pages too.
struct ScaleView {
  const float* data;
  int64_t stride_b, stride_h, stride_s;
};

}  // namespace pyattn
