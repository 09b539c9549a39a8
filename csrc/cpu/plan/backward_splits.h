// Splits: where backward has few heads, or one is expensive, the keys of a head, or its query rows,
// are divided among work items. The pass reduce adds up the shares of gradients that these leave.
#pragma once

#include "cpu/plan/units.h"
#include "shared/mask.h"

namespace pyattn::PYATTN_ISA {
namespace {

static_assert(kBackwardBlockK % kDrawKeys == 0);

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
