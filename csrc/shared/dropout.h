// Dropout: the counter from which a sequence draws, wherever it lies in a larger call. Every
// backend shares this file; everything is constexpr, so device code may call it.
#pragma once

#include "attention.h"

namespace pyattn::PYATTN_ISA {
namespace {

// The counter of key 0, query 0 and head 0 of a sequence. Key + j must be below 2^35, query + i below 2^32.
struct FirstDraw {
  uint64_t head;          // among the heads of all sequences
  uint32_t query, group;  // group: the kDrawKeys neighbouring keys that key 0 is one of
  int shift;              // key 0 is key `shift` of its group

  constexpr FirstDraw(const ForwardParams& p, int64_t b)
      : head(static_cast<uint64_t>(b) * p.num_heads_q), query(0), group(0), shift(0) {
    if (!p.dropout.origins) return;
    const DropoutOrigin& own = p.dropout.origins[b * p.dropout.origins_stride_b];
    const uint64_t sequence = own.sequence + (p.dropout.origins_stride_b ? 0 : static_cast<uint64_t>(b));
    const uint64_t key = own.key;
    head = sequence * own.num_heads_q + own.head, query = static_cast<uint32_t>(own.query);
    group = static_cast<uint32_t>(key / kDrawKeys), shift = static_cast<int>(key % kDrawKeys);
  }
};

}  // namespace
}  // namespace pyattn::PYATTN_ISA
