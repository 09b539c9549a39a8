// The gradient of a bias that broadcasts: each element sums dS over all scores that share it. A
// work item owns elements and visits the scores that share them in order, recomputing the tiles of
// backward. If each element belongs to one score, backward itself writes it (tiles/tile_bias.h); if
// heads are short, backward sums dS in groups of heads (plan/bias_groups.h), which are added up here.
#pragma once

#include "cpu/passes/backward/tile.h"
#include "cpu/passes/stopwatch.h"
#include "cpu/plan/bias_groups.h"
#include "cpu/plan/shares.h"
#include "cpu/products/matrix.h"
#include "cpu/products/operand.h"
#include "cpu/products/scratch.h"
#include "cpu/simd/simd.h"
#include "cpu/tiles/bias_sums.h"
#include "cpu/tiles/keys.h"
#include "cpu/tiles/strips.h"
#include "shared/mask.h"

namespace pyattn::PYATTN_ISA {
namespace {

// Keys of a work item, for which a block of query rows is packed once.
inline constexpr int64_t kBiasKeys = 4 * kBackwardBlockK;

// How dbias is divided into work items.
template <class S>
struct BiasItems {
  int64_t queries, keys;                     // of an item
  int64_t batch, heads, blocks, key_blocks;  // items along each dimension

  // About as many rows as a block has, in whole BlockKeys; all queries if they share elements.
  explicit BiasItems(const BackwardParams& p)
      : queries(p.dbias.stride_q ? kBlockRows * max(1, kBlockQ<Compute<S>> / (kBlockRows * group_size(p)))
                                 : p.seqlen_q),
        keys(p.dbias.stride_k ? kBiasKeys : p.seqlen_k),
        batch(p.dbias.stride_b ? p.batch : 1),
        heads(p.dbias.stride_h ? p.num_heads_kv : 1),
        blocks(ceil_div(p.seqlen_q, queries)),
        key_blocks(ceil_div(p.seqlen_k, keys)) {}

  BiasItem of(const BackwardParams& p, int64_t i) const {
    const int64_t n = i % key_blocks, m = i / key_blocks % blocks, h = i / key_blocks / blocks % heads,
                  b = i / key_blocks / blocks / heads;
    return {batch > 1 ? Range{b, b + 1} : Range{0, p.batch}, heads > 1 ? Range{h, h + 1} : Range{0, p.num_heads_kv},
            Range{m * queries, min((m + 1) * queries, p.seqlen_q)}, Range{n * keys, min((n + 1) * keys, p.seqlen_k)}};
  }
};

// Adds the scores of one head to the sums of a work item.
template <class S, class Score>
void add_head(const BackwardParams& p, const Head& head, const BiasItem& item, const BackwardScratch<S>& s,
              BiasSums<S>& sums) {
  using T = Compute<S>;
  using E = Operand<S>;
  const Mask mask(p, head);
  const Score score(p);
  Stopwatch watch(p.cpu.counts);
  BackwardTile<S, Score> weights{p, mask, s, score, watch};
  if (dotted_rows<S>(p, head.count))
    pack_few_queries<S>(s.few_Q, head.count, p.head_dim, score.power,
                        [&](int64_t r) { return head.row<const S>(p.q, r); });
  const int64_t end = item.queries.end * head.group;
  for (int64_t r0 = item.queries.begin * head.group; r0 < end; r0 += kBlockQ<T>) {
    const int64_t rows = min(kBlockQ<T>, end - r0);
    const Range keys = mask.keys_of_any(r0, rows).in(item.keys);
    if (keys.empty()) continue;
    s.queries.pack(mask, score, r0, 0, rows);
    for (int64_t n0 = round_down(keys.begin, kBackwardBlockK); n0 < keys.end; n0 += kBackwardBlockK) {
      const Tile tile{r0, rows, round_up(rows, kLanes<T>), n0, min(kBackwardBlockK, keys.end - n0)};
      const Strips<T> strips = weights.cut(tile);
      if (strips.empty()) continue;
      const Matrix<const S> k_rows = key_rows<const S>(head, p.k, n0), v_rows = key_rows<const S>(head, p.v, n0);
      const Strided<E> K = left_keys<S>(k_rows, tile.keys, p.head_dim, kPairs<S> ? s.left_K : s.K);
      const Strided<E> V = left_keys<S>(v_rows, tile.keys, p.head_dim_v, s.V);
      watch.lap(Phase::kPack);
      weights.make(tile, strips, 0, k_rows, K, V, [&](Strip strip) { sums.add(s.dP, tile, strip); });
    }
  }
}

template <class S>
struct BiasScratch {
  Carver carver;
  BiasSums<S> sums;
  BackwardScratch<S> tiles;

  BiasScratch(const BackwardParams& p, const BiasItem& item, void* base)
      : carver(base),
        sums(p, item, carver),
        tiles(p, false, 0, base ? static_cast<char*>(base) + carver.bytes() : nullptr) {}

  int64_t bytes() const { return carver.bytes() + tiles.bytes; }
};

// Adds up the groups of each owner of elements, in order.
template <class S>
void add_groups(const BackwardParams& p, const BiasGroups<S>& groups, int64_t begin, int64_t end, void* scratch) {
  const GroupScratch<S> own(groups, scratch);
  for (int64_t owner = begin; owner < end; ++owner) {
    const auto sums_of = [&](int64_t n) { return groups.sums(owner * groups.count + n, group_sums<S>(p), own.sums); };
    BiasSums<S> sums = sums_of(0);
    for (int64_t n = 1; n < groups.count; ++n) sums.add(sums_of(n));
    sums.write(own.tile);
  }
}

template <class S>
Plan plan_bias_gradient(const BackwardParams& p) {
  if (!p.dbias.data || one_score_each(p)) return {0, 0, 0};
  if (const BiasGroups<S> groups(p); groups.used())
    return {groups.count > 1 ? groups.owners : 0, GroupScratch<S>(groups, nullptr).bytes, 0};
  const BiasItems<S> items(p);
  const BiasItem first = items.of(p, 0);  // none is larger
  return {items.batch * items.heads * items.blocks * items.key_blocks, BiasScratch<S>(p, first, nullptr).bytes(), 0};
}

// Each work item is a (sequence, KV head, block of queries, block of keys), in the dimensions that the bias has.
template <class S, template <class> class Score>
void bias_gradient(const BackwardParams& p, int64_t begin, int64_t end, void* scratch) {
  if (const BiasGroups<S> groups(p); groups.used()) return add_groups(p, groups, begin, end, scratch);
  const BiasItems<S> items(p);
  for (int64_t i = begin; i < end; ++i) {
    const BiasItem item = items.of(p, i);
    BiasScratch<S> carved(p, item, scratch);
    carved.sums.clear();
    for (int64_t b = item.sequences.begin; b < item.sequences.end; ++b)
      for (int64_t h = item.kv_heads.begin; h < item.kv_heads.end; ++h)
        add_head<S, Score<S>>(p, Head(p, b * p.num_heads_kv + h), item, carved.tiles, carved.sums);
    carved.sums.write(carved.tiles.dP);
  }
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
