// Splits of backward: where there are few heads, or one is expensive, the keys of a head, or its query rows,
// are divided among work items. The pass reduce adds up the shares of gradients that these leave.
#pragma once

#include "cpu/tiles/strips.h"
#include "shared/mask.h"

namespace pyattn::PYATTN_ISA {
namespace {

// Two tiles of 64 queries x 96 keys stay in L2 beside K, V and the operands of
// a query block; 128 x 96, 64 x 192 and 256 x 96 measured 3 to 15 % slower.
inline constexpr int64_t kBackwardBlockK = 96;
static_assert(kBackwardBlockK % kDrawKeys == 0 && kBackwardBlockK == kTileKeys);

// Query rows of a super-block of backward. Its packed copies and dQ take 192 KB at head_dim 64 in float, 352 KB
// where Q and dO are copied, which stay in an L2 of 512 KB. With 2048 rows backward took up to 5 % longer.
inline constexpr int64_t kSuperBlock = 256;

// Backward has at least this many work items: a head with more than one item's share of all
// pairs is split. More items would feed more threads but take more memory: with 8 splits of
// the keys, at head_dim 64, the shares of dQ take 32 MB for every 16k query rows of a head.
inline constexpr int64_t kMinItems = 8;

// The way in which backward splits a KV head among work items: by keys, each
// item with a share of dQ, or by query rows, each item with shares of dK and dV.
struct Splits {
  int64_t count;
  bool by_rows;
};

// Splits by rows where their shares are smaller, as with many query rows to each key, and where rows are invariant:
// their dQ is then one sum over blocks of keys at fixed places, whatever the number of heads.
inline Splits splits_of(const ForwardParams& p, int64_t seqlen_q, int64_t seqlen_k) {
  if (p.cpu.pairs == 0 || p.num_heads_kv == 0 || is_selected(p)) return {1, false};
  const int64_t rows = seqlen_q * group_size(p);
  const bool by_rows = p.cpu.row_invariant || rows * p.head_dim > seqlen_k * (p.head_dim + p.head_dim_v);
  const double pairs = static_cast<double>(seqlen_q) * static_cast<double>(seqlen_k);
  const double items = kMinItems * pairs / (p.cpu.pairs * static_cast<double>(p.num_heads_kv));
  const auto whole = static_cast<int64_t>(items);
  const int64_t most = by_rows ? ceil_div(rows, kSuperBlock) : ceil_div(seqlen_k, kBackwardBlockK);
  return {clamp(whole + (static_cast<double>(whole) < items), 1, max(1, most)), by_rows};
}

// The cost in backward of the keys before the given one, in
// arbitrary units: rows that see each key block, or pairs.
int64_t cost_before(const Mask& mask, int64_t key) {
  if (mask.p.mask.blocks) return mask.pairs_before(key);
  int64_t rows = 0;
  for (int64_t j = 0; j < key; j += kBackwardBlockK)
    rows += mask.rows_of_any(j, min(kBackwardBlockK, mask.head.seqlen_k - j)).count();
  return rows;
}

// The first key of split s if keys are split: splits are whole key blocks, of about equal cost.
int64_t first_key(const Mask& mask, int64_t s, int64_t splits) {
  const int64_t seqlen_k = mask.head.seqlen_k, total = cost_before(mask, seqlen_k);
  int64_t low = 0, high = s == 0 ? 0 : ceil_div(seqlen_k, kBackwardBlockK);  // the key block lies between
  while (s < splits && low < high) {
    const int64_t middle = (low + high) / 2;
    if (cost_before(mask, middle * kBackwardBlockK) * splits < total * s)
      low = middle + 1;
    else
      high = middle;
  }
  return min(high * kBackwardBlockK, seqlen_k);
}

// The first query row of split s if rows are split: splits are whole super-blocks,
// of about equal cost. A super-block costs about as much as the number of keys that it sees.
int64_t first_row(const Mask& mask, int64_t s, int64_t splits) {
  const int64_t rows = mask.head.count;
  const auto cost = [&](int64_t r) {
    int64_t keys = 0;
    for (int64_t n = 0; n < mask.intervals(); ++n) keys += mask.keys_of_any(r, min(kSuperBlock, rows - r), n).count();
    return keys;
  };
  int64_t total = 0;
  for (int64_t r = 0; r < rows; r += kSuperBlock) total += cost(r);
  int64_t row = s < splits ? 0 : rows;
  for (int64_t sum = 0; row < rows && sum * splits < total * s; row += kSuperBlock) sum += cost(row);
  return min(row, rows);
}

// The rows and the keys of a work item.
struct Split {
  Range rows, keys;
};

inline Split split_of(const Mask& mask, Splits splits, int64_t s) {
  const Range rows{0, mask.head.count}, keys{0, mask.head.seqlen_k};
  if (splits.by_rows) return {{first_row(mask, s, splits.count), first_row(mask, s + 1, splits.count)}, keys};
  return {rows, {first_key(mask, s, splits.count), first_key(mask, s + 1, splits.count)}};
}

// The largest number of keys whose dK and dV a work item keeps in its scratch.
int64_t most_summed_keys(const BackwardParams& p) {
  if (is_selected(p)) return kBackwardBlockK;  // each block of keys is added to the sums of all keys
  int64_t most = 0;
  for (int64_t i = 0; i < p.batch * p.num_heads_kv; ++i) {
    const Head head(p, i);
    const Splits splits = splits_of(p, head.seqlen_q, head.seqlen_k);
    if (splits.count == 1) {
      most = max(most, head.seqlen_k);
      continue;
    }
    if (splits.by_rows) continue;
    const Mask mask(p, head);
    for (int64_t s = 0, begin = 0; s < splits.count; ++s) {
      const int64_t end = first_key(mask, s + 1, splits.count);
      most = max(most, end - begin), begin = end;
    }
  }
  return most;
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
