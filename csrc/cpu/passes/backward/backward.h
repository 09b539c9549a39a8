// Backward, in one pass over the keys. With P = exp(S - row_max) / row_sum and
// delta = rowsum(P * dP) = rowsum(dO * O):
//
//   dV += (P * D)^T dO      dP = dO V^T * D      dS = P * (dP - delta + dlse)      dK += dS^T Q      dQ += dS K
//
// D is the dropout factor: 0 for a dropped weight and 1 / (1 - p) for a kept one; without
// dropout D is 1. S and dP are computed transposed, with queries on the lanes; dV, dK and
// dQ have their columns on the lanes. dQ and dK are scaled when they are written out.
#pragma once

#include "cpu/passes/backward/gradients.h"
#include "cpu/passes/backward/tile.h"
#include "cpu/plan/bias_groups.h"
#include "cpu/plan/selected_sums.h"
#include "cpu/plan/shares.h"
#include "cpu/tiles/rows_ahead.h"
#include "cpu/tiles/tile_bias.h"

namespace pyattn::PYATTN_ISA {
namespace {

template <class S>
Plan plan_backward(const BackwardParams& p) {
  const BiasGroups<S> groups(p);
  const int64_t scratch = BackwardScratch<S>(p, true, most_summed_keys(p), nullptr).bytes;
  if (is_selected(p)) return {SelectedSums<S>::items(p), scratch, SelectedSums<S>::bytes(p)};
  if (groups.used())
    return {groups.items(), GroupScratch<S>(groups, nullptr).bytes + scratch, bytes_of_shares<S>(p) + groups.bytes()};
  return {work_of<S>(p, Unit::kSplits).count(), scratch, bytes_of_shares<S>(p)};
}

// Computes one work item: the query rows and keys in one split of a KV head.
template <class S, class Score>
class BackwardItem {
  using T = Compute<S>;
  using E = Operand<S>;

 public:
  // next: the KV head of the item after this one. bias: sums to which dS is added, or null. all: with selected keys, the
  // sums to which dK and dV are added.
  BackwardItem(const BackwardParams& p, const Place& place, int64_t next, BiasSums<S>* bias, const SelectedSums<S>* all,
               void* scratch)
      : p(p),
        mask(p, Head(p, place.head)),
        next(p, next),
        bias(bias),
        all(all),
        split(place.n),
        own(split_of(mask, shares.splits, split)),
        s(p, dQ_whole,
          all         ? kBackwardBlockK
          : dKV_whole ? own.keys.count()
                      : 0,
          scratch) {}

  void run() {
    if (dotted_rows<S>(p, head.count))
      pack_few_queries<S>(s.few_Q, head.count, p.head_dim, score.power,
                          [&](int64_t r) { return head.row<const S>(p.q, r); });
    const int64_t summed = all ? kBackwardBlockK : sums.keys.count();
    fill_zero(sums.dK.data, summed * sums.dK.row);
    fill_zero(sums.dV.data, summed * sums.dV.row);
    if (p.dslopes) fill_zero(head_sums.slopes, head.group);
    if (p.drelative) fill_zero(head_sums.relative, head.group * count_distances(p, head.seqlen_q, head.seqlen_k));
    for (int64_t r0 = own.rows.begin; r0 < own.rows.end; r0 += kSuperBlock)
      super_block(r0, min(kSuperBlock, own.rows.end - r0));
    if (dKV_whole && !all) {
      write_keys<S>(p, head, p.dk, sums.keys.begin, sums.dK, sums.keys.count(), p.head_dim, score.dscale);
      write_keys<S>(p, head, p.dv, sums.keys.begin, sums.dV, sums.keys.count(), p.head_dim_v, T(1));
    }
    watch.lap(Phase::kStore);
  }

 private:
  // The sums of dK and dV over the item's query rows, for the keys in `keys`; with selected keys, of one block of them.
  struct Sums {
    Range keys;
    Matrix<T> dK, dV;  // [keys][cols_k], [keys][cols_v]
  };

  const BackwardParams& p;
  const Mask mask;
  const Head& head = mask.head;
  const Head next;
  BiasSums<S>* const bias;
  const SelectedSums<S>* const all;
  const Shares<S> shares{p, head};
  const int64_t split;
  const Split own;
  // Whether the item computes the whole sum of its dQ, and of its dK and dV, or only a share.
  const bool dQ_whole = shares.splits.count == 1 || shares.splits.by_rows;
  const bool dKV_whole = shares.splits.count == 1 || !shares.splits.by_rows;
  const BackwardScratch<S> s;
  const Sums sums = sums_of_keys();
  const HeadSums head_sums = sums_of<S>(p, head, split);
  const Score score{p};
  Stopwatch watch{p.cpu.counts};
  BackwardTile<S, Score> weights{p, mask, s, score, watch};

  // A share of dK and dV covers only the key blocks in which some row of the item sees a key.
  Sums sums_of_keys() const {
    if (dKV_whole) return {own.keys, s.dK, s.dV};
    const Range seen = own.keys.in(mask.keys_of_any(own.rows.begin, own.rows.count()));
    const Range keys{round_down(seen.begin, kBackwardBlockK), min(round_up(seen.end, kBackwardBlockK), own.keys.end)};
    for (int64_t n0 = own.keys.begin; n0 < own.keys.end; n0 += kBackwardBlockK)
      shares.has_keys(split, n0) = keys.contains(n0);
    return {keys, shares.dK(split, keys.begin), shares.dV(split, keys.begin)};
  }

  // Adds the products of the query rows [r0, r0 + rows) with all keys of the item.
  void super_block(int64_t r0, int64_t rows) {
    const Range keys = own.keys.in(mask.keys_of_any(r0, rows));
    no_scores({r0, r0 + rows}, {own.keys.begin, keys.begin});
    no_scores({r0, r0 + rows}, {keys.end, own.keys.end});
    if (!dQ_whole && !(shares.has_rows(split, r0) = !keys.empty())) return;
    const Matrix<T> dQ = dQ_whole ? s.dQ : shares.dQ(split, r0);
    int64_t written = 0;  // how many rows of dQ hold sums already; later key blocks add to these
    if (!keys.empty()) {
      const Range seen = mask.rows_of_any(own.keys.begin, own.keys.count(), {r0, r0 + rows}).within(r0, rows);
      for (int64_t i = round_down(seen.begin, kBlockQ<T>); i < seen.end; i += kBlockQ<T>)
        s.queries.pack(mask, score, r0 + i, i, min(kBlockQ<T>, rows - i));
      watch.lap(Phase::kPack);
      for (int64_t n = round_down(keys.begin, kBackwardBlockK); n < keys.end; n += kBackwardBlockK) {
        prefetch_after(min(n + kBackwardBlockK, keys.end), keys, r0, rows);
        written = key_block(n, min(kBackwardBlockK, keys.end - n), r0, rows, dQ, written);
      }
    }
    fill_zero(dQ.from(written).data, (rows - written) * dQ.row);
    if (dQ_whole) write_rows<S>(p, head, r0, dQ, rows, score.dscale);
    watch.lap(Phase::kStore);
  }

  // Lets the products of a block of keys prefetch what follows: the next block, the next super-block or the next item,
  // and the rows that are then written.
  void prefetch_after(int64_t end, Range keys, int64_t r0, int64_t rows) {
    if (all) return;
    LinesAhead& lines = weights.lines;
    if (end < keys.end) {
      const int64_t more = min(kBackwardBlockK, keys.end - end), sum = end - sums.keys.begin;
      add_key_rows<S>(lines, head, p.k, end, more, p.head_dim);
      add_key_rows<S>(lines, head, p.v, end, more, p.head_dim_v);
      lines.add(Matrix<const T>(sums.dK.from(sum)), more, s.cols_k);
      lines.add(Matrix<const T>(sums.dV.from(sum)), more, s.cols_v);
      return;
    }
    if (!p.part) add_query_rows<S>(lines, head, p.dq, r0, rows, p.head_dim);
    if (r0 + rows < own.rows.end) return add_rows_of(head, r0 + rows, min(kSuperBlock, own.rows.end - r0 - rows));
    if (!p.part && keys.count() <= kBackwardBlockK) {
      add_key_rows<S>(lines, head, p.dk, keys.begin, keys.count(), p.head_dim);
      add_key_rows<S>(lines, head, p.dv, keys.begin, keys.count(), p.head_dim_v);
    }
    add_rows_of(next, 0, min(kSuperBlock, next.count));
    add_key_rows<S>(lines, next, p.k, 0, min(kBackwardBlockK, next.seqlen_k), p.head_dim);
    add_key_rows<S>(lines, next, p.v, 0, min(kBackwardBlockK, next.seqlen_k), p.head_dim_v);
  }

  // Query rows that are packed later; rows of several blocks of keys read out as well.
  void add_rows_of(const Head& some, int64_t r, int64_t rows) {
    add_query_rows<S>(weights.lines, some, p.q, r, rows, p.head_dim);
    add_query_rows<S>(weights.lines, some, p.dout, r, rows, p.head_dim_v);
    if (some.seqlen_k > kBackwardBlockK) add_query_rows<S>(weights.lines, some, p.out, r, rows, p.head_dim_v);
  }

  // Sets dbias to 0 for these rows and keys, of which tiles write none, or a masked tile only some.
  void no_scores(Range rows, Range keys) const {
    if (p.dbias.data && one_score_each(p)) clear_bias_gradient<S>(p, head, rows, keys);
  }

  // Adds the products of the keys [n0, n0 + keys) with those rows of the super-block that see some of them.
  // `written`: how many rows of dQ hold sums already. Returns how many hold sums afterwards.
  int64_t key_block(int64_t n0, int64_t keys, int64_t r0, int64_t rows, Matrix<T> dQ, int64_t written) {
    const Range seeing = mask.rows_of_any(n0, keys, {r0, r0 + rows}).within(r0, rows);
    const int64_t first = round_down(seeing.begin, kBlockQ<T>), past = min(round_up(seeing.end, kBlockQ<T>), rows);
    no_scores({r0, r0 + (seeing.empty() ? rows : first)}, {n0, n0 + keys});
    if (seeing.empty()) return written;
    no_scores({r0 + past, r0 + rows}, {n0, n0 + keys});
    const bool in_place = summed_in_place<S>(p.k, p.head_dim);
    const Range block_keys{n0, n0 + keys};
    const Matrix<const S> k_rows = whole_rows<S>(p, head, p.k, block_keys, p.head_dim, s.listed_K),
                          v_rows = whole_rows<S>(p, head, p.v, block_keys, p.head_dim_v, s.listed_V);
    const Matrix<const E> K = summed_keys<S>(k_rows, keys, p.head_dim, in_place, s.K);
    const int64_t sum = all ? 0 : n0 - sums.keys.begin;
    const KeyBlock<S> block{k_rows,
                            K,
                            kPairs<S> ? left_keys<S>(k_rows, keys, p.head_dim, s.left_K) : K.strided(),
                            left_keys<S>(v_rows, keys, p.head_dim_v, s.V),
                            sums.dK.from(sum),
                            sums.dV.from(sum)};
    const Matrix<const E> Q = s.queries.Q(head, r0), dO = s.queries.dO(head, r0);
    if (written < first) fill_zero(dQ.from(written).data, (first - written) * dQ.row);
    for (int64_t i = first; i < seeing.end; i += kBlockQ<T>) {
      const int64_t m = min(kBlockQ<T>, rows - i);
      const Tile tile{r0 + i, m, round_up(m, kLanes<T>), n0, keys};
      const RowBlock<S> queries{Q.from(terms<S>(i)), dO.from(terms<S>(i)), dQ.from(i),
                                Update<T>::add_unless(i >= written)};
      const Strips<T> strips = weights.cut(tile);
      if (strips.masked) no_scores({tile.r0, tile.r0 + m}, {n0, n0 + keys});
      watch.lap(Phase::kPack);
      if (strips.empty()) {
        if (i >= written) fill_zero(dQ.from(i).data, m * dQ.row);
        continue;
      }
      weights.make(tile, strips, i, block.rows, block.left_K, block.left_V, [&](Strip strip) {
        if (bias) bias->add(s.dP, tile, strip);
        score.to_products(p, s.dP, head, tile, strip, s.derivative, head_sums);
        watch.lap(Phase::kSoftmax);
        if (!p.dropout.threshold) return;
        multiply_strip(s.P, s.kept, strip);
        watch.lap(Phase::kDropout);
      });
      add_products(weights, tile, strips, block, queries);
    }
    if (all) all->take(head, n0, keys, block.dK, block.dV);
    return max(written, past);
  }
};

// Each work item is one split of a KV head, a group of heads that share elements of a bias, or with selected keys some
// of the queries of a KV head.
template <class S, template <class> class Score>
void backward(const BackwardParams& p, int64_t begin, int64_t end, void* scratch) {
  if (is_selected(p)) {
    for (int64_t item = begin; item < end; ++item) {
      const SelectedSums<S> all(p, item);
      const Range heads = all.heads_of_queries();
      all.clear();
      for (int64_t n = heads.begin; n < heads.end; ++n)
        BackwardItem<S, Score<S>>(p, {n, 0, 1}, n, nullptr, &all, scratch).run();
    }
    return;
  }
  if (const BiasGroups<S> groups(p); groups.used()) {
    const GroupScratch<S> own(groups, scratch);
    void* const of_heads = static_cast<char*>(scratch) + own.bytes;
    for (int64_t item = begin; item < end; ++item) {
      BiasSums<S> sums = groups.sums(item, group_sums<S>(p), own.sums);
      sums.clear();
      groups.each_head(item, [&](int64_t head, int64_t next) {
        BackwardItem<S, Score<S>>(p, {head, 0, 1}, next, &sums, nullptr, of_heads).run();
      });
      if (groups.count == 1) sums.write(own.tile);
    }
    return;
  }
  const Work work = work_of<S>(p, Unit::kSplits);
  Place place = work.at(begin);
  for (int64_t item = begin; item < end; ++item) {
    const Place next = work.at(min(item + 1, work.count() - 1));
    BackwardItem<S, Score<S>>(p, place, next.head, nullptr, nullptr, scratch).run();
    place = next;
  }
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
