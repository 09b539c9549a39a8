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
#include "simd.h"
#include "stopwatch.h"
#include "strips.h"

namespace pyattn::PYATTN_ISA {
namespace {

// Two tiles of 64 queries x 96 keys beside K, V and the operands of a query block stay in L2; 128 x
// 96, 64 x 192 and 256 x 96 measured 3 to 15 % slower.
inline constexpr int64_t kBackwardBlockK = 96;
static_assert(kBackwardBlockK % kDrawKeys == 0);

// With fewer KV heads than this, the keys of a head are split among work items, each with a dQ of
// its own. More items would feed more threads and take more memory: 8 of them, at head_dim 64, take
// 32 MB for every 16k queries of the head's group.
inline constexpr int64_t kMinItems = 8;

int64_t key_splits(const BackwardParams& p) {
  const int64_t heads = p.batch * p.num_heads_kv;
  if (heads == 0) return 1;
  return min(ceil_div(kMinItems, heads), max(1, ceil_div(p.seqlen_k, kBackwardBlockK)));
}

// The first key of split s. Splits are whole key blocks, about as many rows against keys in each.
int64_t split_begin(const Mask& mask, int64_t s, int64_t splits) {
  const int64_t seqlen_k = mask.head.seqlen_k;
  const auto cost = [&](int64_t j) { return mask.rows_of_any(j, min(kBackwardBlockK, seqlen_k - j)).count(); };
  int64_t total = 0, before = 0, j = 0;
  for (int64_t i = 0; i < seqlen_k; i += kBackwardBlockK) total += cost(i);
  for (; j < seqlen_k && before * splits < total * s; j += kBackwardBlockK) before += cost(j);
  return s == splits ? seqlen_k : min(j, seqlen_k);
}

// The largest number of keys of a work item.
int64_t longest_split(const BackwardParams& p) {
  const int64_t splits = key_splits(p);
  if (splits == 1) return p.seqlen_k;
  int64_t longest = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Mask mask(p, Head(p, b * p.num_heads_kv));  // the heads of a sequence are split alike
    for (int64_t s = 0; s < splits; ++s)
      longest = max(longest, split_begin(mask, s + 1, splits) - split_begin(mask, s, splits));
  }
  return longest;
}

template <class S>
Plan plan_reduce_dq(const BackwardParams& p) {
  if (key_splits(p) == 1) return {0, 0, 0};
  return {p.batch * p.num_heads_kv * query_blocks<S>(p), 0, 0};
}

// Adds up the splits' shares [splits][rows][ld] of dQ, in their order. Work
// items: (batch, KV head, block of query rows).
template <class S, template <class> class Score>
void reduce_dq(const BackwardParams& p, int64_t begin, int64_t end, void*) {
  using T = Compute<S>;
  const int64_t splits = key_splits(p), ld = round_up(p.head_dim, kLanes<T>);
  const int64_t blocks = query_blocks<S>(p);
  const Score<T> score(p);
  Stopwatch watch(p.counts);
  for (int64_t item = begin; item < end; ++item) {
    const Head head(p, item / blocks);
    const int64_t r0 = item % blocks * kBlockQ<T>, rows = min(kBlockQ<T>, head.count - r0);
    T* parts = static_cast<T*>(p.workspace) + (item / blocks * splits * head.count + r0) * ld;
    for (int64_t split = 1; split < splits; ++split)
      for (int64_t i = 0; i < rows * ld; i += kLanes<T>)
        store(parts + i, load(parts + i) + load(parts + split * head.count * ld + i));
    unpack_rows<S>(Matrix<const T>{parts, ld}, rows, p.head_dim, score.dscale,
                   [&](int64_t i) { return head.row<S>(p.dq, r0 + i); });
  }
  watch.lap(Phase::kStore);
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
