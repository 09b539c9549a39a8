// Defaults: the values of options that the caller leaves out.
#pragma once

#include <cstdint>

namespace pyattn {

// Bottom-right: the last query is at the last key.
constexpr int64_t default_q_offset(int64_t seqlen_q, int64_t seqlen_k) { return seqlen_k - seqlen_q; }

// 1 where head_dim is 0: there is nothing to sum over.
constexpr double default_softmax_scale(int64_t head_dim) {
  return head_dim ? 1 / __builtin_sqrt(static_cast<double>(head_dim)) : 1;
}

}  // namespace pyattn
