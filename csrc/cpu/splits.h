// Backward where there are few heads: the keys of a head split among work items, and the dQ that each of them leaves added up.
#pragma once

namespace pyattn::PYATTN_ISA {
namespace {

// Two tiles of 64 queries x 96 keys beside K, V and the operands of a query block stay in L2; 128 x 96, 64 x 192 and
// 256 x 96 measured 3 to 15 % slower.
inline constexpr int64_t kBackwardBlockK = 96;
static_assert(kBackwardBlockK % kDrawKeys == 0);

// With fewer KV heads than this, the keys of a head are split among work items, each with a dQ of its own: more items
// would feed more threads and take more memory (8 of them, at head_dim 64, 32 MB for every 16k queries of the head's group).
inline constexpr int64_t kMinItems = 8;

int64_t key_splits(const BackwardParams& p) {
  const int64_t heads = max(1, p.batch * p.num_heads_kv);
  return min(ceil_div(kMinItems, heads), max(1, ceil_div(p.seqlen_k, kBackwardBlockK)));
}

// The first key of split s: whole key blocks, so divided that the splits have about equal numbers of visible pairs.
int64_t split_begin(const HeadRows& head, int64_t s, int64_t splits) {
  const auto pairs = [&](int64_t j) { return head.count - head.first_row(j); };
  int64_t total = 0, before = 0, j = 0;
  for (int64_t i = 0; i < head.seqlen_k; i += kBackwardBlockK) total += pairs(i);
  for (; j < head.seqlen_k && before * splits < total * s; j += kBackwardBlockK) before += pairs(j);
  return s == splits ? head.seqlen_k : min(j, head.seqlen_k);
}

// The most keys that a work item has.
int64_t longest_split(const BackwardParams& p) {
  const int64_t splits = key_splits(p);
  if (splits == 1) return p.seqlen_k;
  int64_t longest = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    const HeadRows head(p, b * p.num_heads_kv);  // the heads of a sequence are split alike
    for (int64_t s = 0; s < splits; ++s)
      longest = max(longest, split_begin(head, s + 1, splits) - split_begin(head, s, splits));
  }
  return longest;
}

template <class S>
Plan plan_reduce_dq(const BackwardParams& p) {
  if (key_splits(p) == 1) return {0, 0, 0};
  return {p.batch * p.num_heads_kv * query_blocks<S>(p), 0, 0};
}

// dQ = softmax_scale * the sum of the splits' shares, in their order.
// Work items: (batch, KV head, block of query rows).
template <class S>
void reduce_dq(const BackwardParams& p, int64_t begin, int64_t end, void*) {
  using T = Compute<S>;
  const int64_t splits = key_splits(p), ld = round_up(p.head_dim, kLanes<T>);
  const int64_t blocks = query_blocks<S>(p);
  Stopwatch watch(p.counts);
  for (int64_t item = begin; item < end; ++item) {
    const HeadRows head(p, item / blocks);
    const int64_t r0 = item % blocks * kBlockQ<T>, rows = min(kBlockQ<T>, head.count - r0);
    T* parts = static_cast<T*>(p.workspace) + (item / blocks * splits * head.count + r0) * ld;
    for (int64_t split = 1; split < splits; ++split)
      for (int64_t i = 0; i < rows * ld; i += kLanes<T>)
        store(parts + i, load(parts + i) + load(parts + split * head.count * ld + i));
    unpack_rows<S>(Rows<const T>{parts, ld}, rows, p.head_dim, static_cast<T>(p.softmax_scale),
                   [&](int64_t i) { return head.row<S>(p.dq, r0 + i); });
  }
  watch.lap(Phase::kStore);
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
