// Units: how many pieces a pass cuts a KV head into, given the lengths of its sequence.
// The number depends on shapes and constants, never on the number of threads.
#pragma once

#include "cpu/plan/work.h"
#include "cpu/simd/simd.h"
#include "cpu/tiles/strips.h"
#include "shared/distances.h"
#include "shared/mask.h"

namespace pyattn::PYATTN_ISA {
namespace {

// Above 4 rows (bf16 on AVX2) to 11 rows (fp16 on AVX-512) the kernel with queries on the lanes is faster.
inline constexpr int64_t kDecodeRows = 8;

// Whether forward decodes a KV head with this many rows, and backward computes its scores by the same products.
template <class S>
bool few_rows(const ForwardParams& p, int64_t rows) {
  const int64_t lanes = kLanes<Compute<S>>;
  return rows > 0 && rows <= kDecodeRows && !p.dropout.threshold && p.head_dim >= kColumns<S> * lanes &&
         p.head_dim_v >= lanes;
}

// Keys of a work item in decoding: merging costs a thousandth of
// reading them, and 16k keys of one head still feed 16 threads.
inline constexpr int64_t kDecodeSplit = 1024;

// Whether forward divides the keys of a KV head with this many rows among work items: a head that decodes, and one whose
// rows fill at most one block, which would be a single item however many keys it has.
template <class S>
bool splits_keys(const ForwardParams& p, int64_t rows, int64_t seqlen_k) {
  const bool one_block = rows > 0 && rows <= kBlockQ<Compute<S>> && p.head_dim_v >= kLanes<Compute<S>>;
  return few_rows<S>(p, rows) || (one_block && seqlen_k > kDecodeSplit);
}

// Two tiles of 64 queries x 96 keys stay in L2 beside K, V and the operands of
// a query block; 128 x 96, 64 x 192 and 256 x 96 measured 3 to 15 % slower.
inline constexpr int64_t kBackwardBlockK = 96;
static_assert(kBackwardBlockK <= kTileKeys);

// Query rows of a super-block of backward. Its packed copies and dQ take 256 KB at head_dim
// 64, which stay in an L2 of 512 KB. With 2048 rows backward took up to 5 % longer.
inline constexpr int64_t kSuperBlock = 256;

// Backward has at least this many work items: a head with more than one item's share of all
// pairs is split. More items would feed more threads but take more memory: with 8 splits of
// the keys, at head_dim 64, the shares of dQ take 32 MB for every 16k query rows of a head.
inline constexpr int64_t kMinItems = 8;

// head_dim and head_dim_v in whole vectors, the columns of sums.
template <class S>
int64_t columns_k(const ForwardParams& p) {
  return round_up(p.head_dim, kLanes<Compute<S>>);
}
template <class S>
int64_t columns_v(const ForwardParams& p) {
  return round_up(p.head_dim_v, kLanes<Compute<S>>);
}

inline int64_t decode_splits(int64_t seqlen_k) { return max(1, ceil_div(seqlen_k, kDecodeSplit)); }

// The way in which backward splits a KV head among work items: by keys, each
// item with a share of dQ, or by query rows, each item with shares of dK and dV.
struct Splits {
  int64_t count;
  bool by_rows;
};

// Splits by rows where their shares are smaller, as with many query rows to each key.
inline Splits splits_of(const ForwardParams& p, int64_t seqlen_q, int64_t seqlen_k) {
  if (p.pairs == 0 || p.num_heads_kv == 0) return {1, false};
  const int64_t rows = seqlen_q * group_size(p);
  const bool by_rows = rows * p.head_dim > seqlen_k * (p.head_dim + p.head_dim_v);
  const double pairs = static_cast<double>(seqlen_q) * static_cast<double>(seqlen_k);
  const double items = kMinItems * pairs / (p.pairs * static_cast<double>(p.num_heads_kv));
  const auto whole = static_cast<int64_t>(items);
  const int64_t most = by_rows ? ceil_div(rows, kSuperBlock) : ceil_div(seqlen_k, kBackwardBlockK);
  return {clamp(whole + (static_cast<double>(whole) < items), 1, max(1, most)), by_rows};
}

// How many units a KV head has in a sequence of these lengths.
template <class S>
int64_t units_of(const ForwardParams& p, Unit unit, int64_t seqlen_q, int64_t seqlen_k) {
  const int64_t rows = seqlen_q * group_size(p), blocks = ceil_div(rows, kBlockQ<Compute<S>>);
  const bool by_keys = splits_keys<S>(p, rows, seqlen_k);
  const auto [splits, by_rows] = splits_of(p, seqlen_q, seqlen_k);
  const int64_t shares = splits > 1 ? splits : 0, key_blocks = ceil_div(seqlen_k, kBackwardBlockK);
  switch (unit) {
    case Unit::kForward: return by_keys ? decode_splits(seqlen_k) : blocks;
    case Unit::kPartRows: return by_keys ? decode_splits(seqlen_k) * rows : 0;
    case Unit::kMerges: return by_keys;
    case Unit::kSplits: return splits;
    case Unit::kShareColumns:
      return shares * (by_rows ? seqlen_k * (columns_k<S>(p) + columns_v<S>(p)) : rows * columns_k<S>(p));
    case Unit::kShareBlocks: return shares * (by_rows ? key_blocks : ceil_div(rows, kSuperBlock));
    case Unit::kDistances: return splits * group_size(p) * count_distances(p, seqlen_q, seqlen_k);
    case Unit::kReduced: return shares ? (by_rows ? key_blocks : blocks) : 0;
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
