// Splits: where backward has few heads, the keys of a head are divided among work items, and
// reduce_dq adds up the shares of dQ that they leave.
#pragma once

#include <cstdint>

#include "attention.h"
#include "dropout.h"
#include "heads.h"
#include "mask.h"
#include "matrix.h"
#include "pack.h"
#include "scratch.h"
#include "simd.h"
#include "stopwatch.h"
#include "strips.h"

namespace pyattn::PYATTN_ISA {
namespace {

// Two tiles of 64 queries x 96 keys beside K, V and the operands of a query block stay in L2; 128 x
// 96, 64 x 192 and 256 x 96 measured 3 to 15 % slower.
inline constexpr int64_t kBackwardBlockK = 96;
static_assert(kBackwardBlockK % kDrawKeys == 0 && kBackwardBlockK <= kTileKeys);

// With fewer KV heads than this, the keys of a head are split among work items, each with a dQ of
// its own. More items would feed more threads and take more memory: 8 of them, at head_dim 64, take
// 32 MB for every 16k queries of the head's group.
inline constexpr int64_t kMinItems = 8;

// Query rows of a super-block, whose packed copies and dQ are kept at a time: 256 KB at
// head_dim 64, which stay in an L2 of 512 KB. With 2048 rows backward took up to 5 % longer.
inline constexpr int64_t kSuperBlock = 256;

int64_t key_splits(const BackwardParams& p) {
  const int64_t heads = p.batch * p.num_heads_kv;
  if (heads == 0) return 1;
  return min(ceil_div(kMinItems, heads), max(1, ceil_div(p.seqlen_k, kBackwardBlockK)));
}

// What the keys before the given one cost in backward, in units of its own: rows of each key block that
// they see, or pairs.
int64_t cost_before(const Mask& mask, int64_t key) {
  if (mask.p.mask.blocks) return mask.pairs_before(key);
  int64_t rows = 0;
  for (int64_t j = 0; j < key; j += kBackwardBlockK)
    rows += mask.rows_of_any(j, min(kBackwardBlockK, mask.head.seqlen_k - j)).count();
  return rows;
}

// The first key of split s. Splits are whole key blocks, of about equal cost.
int64_t split_begin(const Mask& mask, int64_t s, int64_t splits) {
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

// The largest number of keys of a work item.
int64_t longest_split(const BackwardParams& p) {
  const int64_t splits = key_splits(p);
  if (splits == 1) return p.seqlen_k;
  int64_t longest = 0;
  for (int64_t head = 0; head < p.batch * p.num_heads_kv; ++head) {
    const Mask mask(p, Head(p, head));
    for (int64_t s = 0, begin = 0; s < splits; ++s) {
      const int64_t end = split_begin(mask, s + 1, splits);
      longest = max(longest, end - begin), begin = end;
    }
  }
  return longest;
}

// The shares of dQ in the workspace, one for each split of each head: [shares][rows][cols], and
// behind them for each super-block of rows whether a share has them: some row sees a key of the split.
template <class T>
struct DqShares {
  int64_t count, rows, cols, super_blocks;
  bool split;  // whether there are any
  void* workspace;

  explicit DqShares(const BackwardParams& p)
      : count(p.batch * p.num_heads_kv * key_splits(p)),
        rows(p.seqlen_q * group_size(p)),
        cols(round_up(p.head_dim, kLanes<T>)),
        super_blocks(ceil_div(rows, kSuperBlock)),
        split(key_splits(p) > 1),
        workspace(p.workspace) {}

  int64_t bytes() const {
    return split ? round_up(count * (rows * cols * static_cast<int64_t>(sizeof(T)) + super_blocks), kScratchAlign) : 0;
  }

  // A share from row r0 on.
  Matrix<T> from(int64_t share, int64_t r0) const {
    return {static_cast<T*>(workspace) + (share * rows + r0) * cols, cols};
  }

  char& has(int64_t share, int64_t r0) const {
    return reinterpret_cast<char*>(from(count, 0).data)[share * super_blocks + r0 / kSuperBlock];
  }
};

// Behind them, a work item's shares of the gradients of slopes, one for each query head of its group.
template <class T>
double* slope_shares(const BackwardParams& p, int64_t item) {
  char* shares = static_cast<char*>(p.workspace) + DqShares<T>(p).bytes();
  return reinterpret_cast<double*>(shares) + item * group_size(p);
}

template <class S>
Plan plan_reduce_dq(const BackwardParams& p) {
  if (key_splits(p) == 1) return {0, 0, 0};
  return {p.batch * p.num_heads_kv * query_blocks<S>(p), 0, 0};
}

// Adds up the splits' shares of dQ, in their order, in the first one. Work items: (batch, KV head,
// block of query rows).
template <class S, template <class> class Score>
void reduce_dq(const BackwardParams& p, int64_t begin, int64_t end, void*) {
  using T = Compute<S>;
  const int64_t splits = key_splits(p), blocks = query_blocks<S>(p);
  const DqShares<T> shares(p);
  const Score<S> score(p);
  Stopwatch watch(p.counts);
  for (int64_t item = begin; item < end; ++item) {
    const Head head(p, item / blocks);
    const int64_t r0 = item % blocks * kBlockQ<T>, rows = min(kBlockQ<T>, head.count - r0);
    const int64_t begin = item / blocks * splits, end = begin + splits;
    int64_t first = begin;
    while (first < end && !shares.has(first, r0)) ++first;
    const Matrix<T> sum = shares.from(min(first, end - 1), r0);
    if (first == end) fill_zero(sum.data, rows * sum.row);
    for (int64_t share = first + 1; share < end; ++share)
      for (int64_t i = 0; shares.has(share, r0) && i < rows * sum.row; i += kLanes<T>)
        store(sum.data + i, load(sum.data + i) + load(shares.from(share, r0).data + i));
    unpack_rows<S>(Matrix<const T>(sum), rows, p.head_dim, score.dscale,
                   [&](int64_t i) { return head.row<S>(p.dq, r0 + i); });
  }
  watch.lap(Phase::kStore);
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
