// A work item of forward: a block of query rows of one KV head. Tiles are transposed (S^T = K Q^T, O^T = V^T P^T), so
// queries lie on the vector lanes, and K and V can be read in place.
#pragma once

#include "cpu/passes/forward_scratch.h"
#include "cpu/passes/stopwatch.h"
#include "cpu/plan/forward_splits.h"
#include "cpu/products/matrix.h"
#include "cpu/products/operand.h"
#include "cpu/products/pack.h"
#include "cpu/products/product.h"
#include "cpu/simd/simd.h"
#include "cpu/tiles/dropout.h"
#include "cpu/tiles/keys.h"
#include "cpu/tiles/rows_ahead.h"
#include "cpu/tiles/softmax.h"
#include "cpu/tiles/strips.h"
#include "cpu/tiles/tile_mask.h"
#include "shared/mask.h"

namespace pyattn::PYATTN_ISA {
namespace {

// Computes one work item: a block of query rows of one KV head, from row r0 on.
template <class S, class Score, class KV>
class ForwardItem {
  using T = Compute<S>;
  using E = Operand<S>;

 public:
  ForwardItem(const ForwardParams& p, const Head& head, int64_t r0, const ForwardScratch<S>& scratch,
              HeadKeys& head_keys)
      : p(p), mask(p, head), r0(r0), rows(min(kBlockQ<T>, head.count - r0)), s(scratch), head_keys(head_keys) {}

  void run() {
    ahead.add_out();
    const auto out_row = [&](int64_t i) { return head.row<S>(p.out, r0 + i); };
    if (p.cpu.row_invariant)
      add_ranges(), clear_negative_zeros();
    else
      add_keys({0, head.seqlen_k});
    alignas(kScratchAlign) T scale[kBlockQ<T>] = {};
    finish_rows<S>(p, mask, r0, rows, state.row_max, state.row_sum, scale, score);
    unpack_transposed<S>(Matrix<const T>(s.Ot), rows, p.head_dim_v, scale, out_row);
    watch.lap(Phase::kStore);
  }

  // Lets the products prefetch what the next item reads; its head must live as long as this item.
  void prefetch(const Head& next, int64_t next_r0) { ahead.add_next(next, next_r0); }

  // Takes some of the keys, and leaves a partial result for the merge.
  template <class Part>
  void run_part(Range keys, const Part& part) {
    add_keys(keys);
    __builtin_memcpy(part.row_max, state.row_max, rows * sizeof(T));
    __builtin_memcpy(part.row_sum, state.row_sum, rows * sizeof(T));
    store_part<T>(s.Ot, rows, p.head_dim_v, part.O);
    watch.lap(Phase::kStore);
  }

 private:
  const ForwardParams& p;
  const Mask mask;
  const Head& head = mask.head;
  const int64_t r0, rows, lanes = round_up(rows, kLanes<T>);
  const ForwardScratch<S>& s;
  HeadKeys& head_keys;
  const Score score{p};
  ForwardAhead<S> ahead{p, head, r0, rows, head_keys};
  Stopwatch watch{p.cpu.counts};
  SoftmaxState<T> state;
  LaneMask<T> seen;   // of the current tile
  bool first = true;  // no tile is in s.Ot yet

  // Tiles begin at a multiple of this many keys: with tile registers, of the pairs that one holds.
  static constexpr int64_t kTileStart = max(kStripKeys, int64_t{kRegisterTerms} * kColumns<S>);

  // The values of a tile, whose transpose is the left factor in O^T = V^T P.
  struct Values {
    Matrix<const E> V;  // as ForwardScratch packs them
    bool select;        // whether masked keys are left out one by one, because some value is not finite
    Update<T> update;
  };

  // O and the softmax state of invariant rows: those of each range of keys, joined in order.
  void add_ranges() {
    const Range visible = mask.keys_of_any(r0, rows);
    const int64_t first_split = visible.begin / kInvariantSplit, past = ceil_div(visible.end, kInvariantSplit);
    if (past - first_split <= 1) return add_keys(visible);
    SoftmaxState<T> all;
    for (int64_t d = 0; d < p.head_dim_v; ++d) fill_zero(s.joined.at(d), lanes);
    for (int64_t split = first_split; split < past; ++split) {
      state = {}, first = true;
      add_keys(split_keys(p, head, split));
      join_range(all, split + 1 < past ? s.joined : s.Ot);
    }
    state = all;
  }

  // Joins the sums in s.joined, whose state is `all`, with those of the range in s.Ot.
  void join_range(SoftmaxState<T>& all, Matrix<T> O) const {
    for (int64_t j = 0; j < lanes; j += kLanes<T>) {
      const Join<T> join(load(all.row_max + j), load(state.row_max + j), score);
      store(all.row_max + j, join.row_max);
      store(all.row_sum + j, join.sum(load(all.row_sum + j), load(state.row_sum + j)));
      for (int64_t d = 0; d < p.head_dim_v; ++d)
        store(O.at(d) + j, join.sum(load(s.joined.at(d) + j), load(s.Ot.at(d) + j)));
    }
  }

  // O and the softmax state, over some of the keys. Not inlined, because several functions call it.
  [[gnu::noinline]] void add_keys(Range some) {
    const Range all = mask.keys_of_any(r0, rows), visible = some.in(all);
    ahead.begin(all, visible);
    pack_queries<S>(s.Qt, rows, lanes, p.head_dim, score.power,
                    [&](int64_t i) { return head.row<const S>(p.q, r0 + i); });
    const bool fixed = p.cpu.row_invariant;
    for (int64_t n0 = round_down(visible.begin, fixed ? kForwardBlockK : kTileStart), next; n0 < visible.end;
         n0 = next) {
      // Tiles are cut at the first key that every row sees in an interval, so the tiles after it need no mask. Invariant
      // rows have tiles at multiples of kForwardBlockK, whichever rows share the block.
      const int64_t end = fixed ? visible.end : min(round_up(mask.next_of_all(r0, rows, n0), kTileStart), visible.end);
      const Tile tile{r0, rows, lanes, n0, min(kForwardBlockK, end - n0)};
      next = n0 + tile.keys;
      const Strips<T> strips = cut_strips<S>(mask, tile, seen);
      ahead.add_tile(next, kForwardBlockK);
      if (!strips.empty()) add_tile(tile, strips);
    }
    if (first)
      for (int64_t d = 0; d < p.head_dim_v; ++d) fill_zero(s.Ot.data + d * s.Ot.row, lanes);
  }

  // -0 -> 0 in O. A sum that underflowed to -0 becomes 0 in the next tile, even if the row sees none of its keys.
  void clear_negative_zeros() const {
    for (int64_t d = 0; d < p.head_dim_v; ++d)
      for (int64_t j = 0; j < lanes; j += kLanes<T>) {
        T* const o = s.Ot.from(d).data + j;
        store(o, load(o) + vec<T>{});
      }
  }

  void add_tile(const Tile& tile, const Strips<T>& strips) {
    const Range keys{tile.n0, tile.n0 + tile.keys};
    const auto& [type, scale_k, scale_v] = p.cpu.bytes;
    const Matrix<const S> k_rows = tile_rows<S, KV>(p, head, p.k, scale_k, keys, p.head_dim, s.page_K),
                          v_rows = tile_rows<S, KV>(p, head, p.v, scale_v, keys, p.head_dim_v, s.page_V);
    const Matrix<const E> K = s.pack_keys(k_rows, keys, p.head_dim, head_keys.packed_k);
    const Values values{
        s.pack_values(v_rows, keys, p.head_dim_v, head_keys.packed_v),
        strips.masked && !all_finite<S>(tile.keys, p.head_dim_v, [&](int64_t j) { return v_rows.at(j); }),
        Update<T>::decay_and_add_unless(first, state.decay)};
    watch.lap(Phase::kPack);
    score_tile(tile, strips, K);
    strips.each([&](Strip strip) {
      weigh(tile, strip, strips.masked);
      add_values(tile, strip, values);
    });
    first = false;
    head_keys.add_read(keys);
  }

  // s.P = the scores.
  void score_tile(const Tile& tile, const Strips<T>& strips, Matrix<const E> keys) {
    const Strided<E> K = keys.strided();
    score.prefetch(p, head, tile);
    strips.each_keys([&](Strip strip) {
      const auto [j0, j1, begin, end] = strip;
      const int64_t inner = query_terms<S>(p.head_dim);
      if (ahead.at_terms)
        score_gemm<T, E, 1>(end - begin, j0, j1, inner, K.from(begin, 0), s.Qt, s.P.from(begin),
                            ahead.lines.at_terms());
      else
        score_gemm<T>(end - begin, j0, j1, inner, K.from(begin, 0), s.Qt, s.P.from(begin), ahead.lines.before_tiles());
      score.to_scores(p, s.P, head, tile, strip, {});
      watch.lap(Phase::kScores, 2 * strip.pairs() * p.head_dim);
    });
  }

  // Whether softmax writes weights as pairs; dropout multiplies them first.
  bool as_pairs() const { return kPairs<S> && !p.dropout.threshold; }

  // Scores in s.P -> weights, in place or in s.weights.
  void weigh(const Tile& tile, Strip strip, bool masked) {
    const auto softmax = [&](auto weights) {
      if (masked)
        softmax_strip<true>(s.P, strip, seen, score, state, weights);
      else
        softmax_strip<false>(s.P, strip, seen, score, state, weights);
      watch.lap(Phase::kSoftmax);
    };
    if constexpr (kPairs<S>)
      if (as_pairs()) return softmax(AsPairs{s.weights});
    softmax(InPlace{});
    if (!p.dropout.threshold) return;
    draw_dropout<T>(p, head, tile, strip, [P = s.P](int64_t k, int64_t j, vec<T> factor) {
      T* weight = P.from(k).data + j;
      store(weight, load(weight) * factor);
    });
    watch.lap(Phase::kDropout);
  }

  // s.Ot += V^T P.
  void add_values(const Tile& tile, Strip strip, const Values& values) {
    const auto [j0, j1, begin, end] = strip;
    int64_t before = terms<S>(begin), past = terms<S>(end);
    Matrix<const E> weights = as_pairs() ? s.weights : tile_over_keys<S>(s.P, begin, end, j0, j1, s.weights);
    if (kTileRegisters<E> && !values.select) extend_terms(tile, strip, before, past);
    const int64_t inner = past - before;
    weights = weights.from(before);
    const Strided<E> V = values.V.strided(), Vt = (kTileRegisters<E> ? V : V.transposed()).from(0, before);
    watch.lap(Phase::kPack);
    if (values.select)
      gemm_seen<T>(p.head_dim_v, j0, j1, inner, Vt, weights, s.Ot, values.update,
                   [&](int64_t, int64_t j, int64_t k) { return seen.sees(begin + k, j); });
    else if (ahead.at_terms)
      gemm<T, E, Matrix<const E>, 1>(p.head_dim_v, j0, j1, inner, Vt, weights, s.Ot, values.update,
                                     ahead.lines.at_terms());
    else
      gemm<T>(p.head_dim_v, j0, j1, inner, Vt, weights, s.Ot, values.update, ahead.lines.before_tiles());
    watch.lap(Phase::kOut, 2 * strip.pairs() * p.head_dim_v);
  }

  // Extends the terms of a strip to whole registers, within the tile: the other keys have weights of 0, and finite values.
  void extend_terms(const Tile& tile, Strip strip, int64_t& before, int64_t& past) const {
    const auto clear = [&](int64_t from, int64_t to) {
      for (int64_t term = from; term < to; ++term)
        for (int64_t j = strip.j0; j < strip.j1; j += kLanes<T>) store(s.weights.at(term) + j, vec<E>{});
    };
    const int64_t first = round_down(before, kRegisterTerms);
    const int64_t end = min(round_up(past, kRegisterTerms), terms<S>(tile.keys));
    clear(first, before), clear(past, end);
    before = first, past = end;
  }
};

}  // namespace
}  // namespace pyattn::PYATTN_ISA
