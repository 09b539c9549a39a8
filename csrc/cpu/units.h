// Units: into how many pieces a pass cuts a KV head, by the lengths of its sequence. It depends on
// shapes and constants, never on the number of threads.
#pragma once

#include <cstdint>

#include "attention.h"
#include "dots.h"
#include "heads.h"
#include "mask.h"
#include "simd.h"
#include "strips.h"
#include "work.h"

namespace pyattn::PYATTN_ISA {
namespace {

// Keys of a work item of decoding: merging costs a thousandth of reading them, and 16k keys of one
// head still feed 16 threads.
inline constexpr int64_t kDecodeSplit = 1024;

// Two tiles of 64 queries x 96 keys beside K, V and the operands of a query block stay in L2; 128 x
// 96, 64 x 192 and 256 x 96 measured 3 to 15 % slower.
inline constexpr int64_t kBackwardBlockK = 96;
static_assert(kBackwardBlockK <= kTileKeys);

// Query rows of a super-block of backward, whose packed copies and dQ are kept at a time: 256 KB at
// head_dim 64, which stay in an L2 of 512 KB. With 2048 rows backward took up to 5 % longer.
inline constexpr int64_t kSuperBlock = 256;

// Backward has at least so many work items: the keys of a head whose share of all pairs is larger than
// an item's are split, each split with a dQ of its own. More items would feed more threads and take
// more memory: 8 of them, at head_dim 64, take 32 MB for every 16k queries of the head's group.
inline constexpr int64_t kMinItems = 8;

inline int64_t decode_splits(int64_t seqlen_k) { return max(1, ceil_div(seqlen_k, kDecodeSplit)); }

inline int64_t key_splits(const ForwardParams& p, int64_t seqlen_q, int64_t seqlen_k) {
  if (p.pairs == 0 || p.num_heads_kv == 0) return 1;
  const double pairs = static_cast<double>(seqlen_q) * static_cast<double>(seqlen_k);
  const double items = kMinItems * pairs / (p.pairs * static_cast<double>(p.num_heads_kv));
  const auto whole = static_cast<int64_t>(items);
  return clamp(whole + (static_cast<double>(whole) < items), 1, max(1, ceil_div(seqlen_k, kBackwardBlockK)));
}

// How many units a KV head has in a sequence of these lengths.
template <class S>
int64_t units_of(const ForwardParams& p, Unit unit, int64_t seqlen_q, int64_t seqlen_k) {
  const int64_t rows = seqlen_q * group_size(p), blocks = ceil_div(rows, kBlockQ<Compute<S>>);
  const bool few = few_rows<S>(p, rows);
  const auto where_split = [&](int64_t units) { return key_splits(p, seqlen_q, seqlen_k) > 1 ? units : 0; };
  switch (unit) {
    case Unit::kForward: return few ? decode_splits(seqlen_k) : blocks;
    case Unit::kPartRows: return few ? decode_splits(seqlen_k) * rows : 0;
    case Unit::kMerges: return few;
    case Unit::kSplits: return key_splits(p, seqlen_q, seqlen_k);
    case Unit::kShareRows: return where_split(key_splits(p, seqlen_q, seqlen_k) * rows);
    case Unit::kShareBlocks: return where_split(key_splits(p, seqlen_q, seqlen_k) * ceil_div(rows, kSuperBlock));
    case Unit::kReduced: return where_split(blocks);
    case Unit::kSummaries: return ceil_div(rows, kBlockRows);
  }
  return 0;
}

template <class S>
Work work_of(const ForwardParams& p, Unit unit) {
  return {p, unit, units_of<S>(p, unit, p.seqlen_q, p.seqlen_k)};
}

template <class S>
int64_t first_unit_of(const ForwardParams& p, Unit unit, const Head& head) {
  return first_unit(p, unit, head, units_of<S>(p, unit, head.seqlen_q, head.seqlen_k));
}

template <class S>
Plan plan_count_units(const ForwardParams& p) {
  return {1, 0, (p.batch + 1) * static_cast<int64_t>(sizeof(Units))};
}

// Writes params.packed.before, in one work item.
template <class S>
void count_units(const ForwardParams& p, int64_t, int64_t, void*) {
  Units sum{};
  for (int64_t b = 0; b < p.batch && p.num_heads_kv > 0; ++b) {
    p.packed.before[b] = sum;
    const Head head(p, b * p.num_heads_kv);
    for (int unit = 0; unit < kNumUnits; ++unit)
      sum.of[unit] += units_of<S>(p, static_cast<Unit>(unit), head.seqlen_q, head.seqlen_k);
  }
  p.packed.before[p.batch] = sum;
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
