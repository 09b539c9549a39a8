// Backward of queries that list blocks of keys, block by block: the rows of all queries of an item that list a block share
// tiles, whose dV and dK are added to the sums of all keys in place (plan/selected_sums.h). dQ waits in scratch.
#pragma once

#include "cpu/passes/backward/gradients.h"
#include "cpu/passes/backward/tile.h"
#include "cpu/passes/listed/block_lists.h"
#include "cpu/passes/stopwatch.h"
#include "cpu/plan/selected_sums.h"
#include "cpu/plan/units.h"
#include "cpu/tiles/softmax_gradient.h"

namespace pyattn::PYATTN_ISA {
namespace {

template <class S>
struct BlockBackwardScratch {
  using T = Compute<S>;
  using E = Operand<S>;
  Carver carver;
  BlockLists lists;
  Matrix<E> K, V, left_K;           // as in BackwardScratch
  Matrix<S> listed_K, listed_V;     // [keys][cols]: copies of keys that are not a whole block
  Matrix<E> Qt, dOt;                // [terms(cols)][rows of a tile]
  Matrix<E> Q, dO;                  // [terms(rows of a tile)][cols]
  Matrix<T> P, dP;                  // [keys][rows of a tile]
  Matrix<E> left_P, left_dS;        // [keys][terms(rows)]: P and dS as left factors, as bf16 pairs
  Matrix<E> summed_dS;              // [terms(keys)][rows]: dS for a sum over keys, as bf16 pairs
  Matrix<T> dK, dV;                 // [keys][cols]: 0 but for keys that are not a whole block
  Matrix<T> tile_dQ;                // [rows of a tile][cols_k]
  Matrix<T> dQ;                     // [rows][cols_k]
  Matrix<T> row_terms, tile_terms;  // [BlockTerms][rows], [..][rows of a tile]
  int64_t bytes;

  static constexpr int64_t kTerms = 6;

  BlockBackwardScratch(const BackwardParams& p, void* base)
      : carver(base), lists(p, backward_block_queries(p), carver) {
    constexpr int64_t kRows = kBlockQ<T>, kKeys = kTileKeys, kPaired = kPairs<S> ? kKeys : 0;
    const int64_t cols_k = columns_k<S>(p), cols_v = columns_v<S>(p), rows = backward_block_queries(p) * group_size(p);
    K = carver.take_spread<E>(summed_in_place<S>(p.k, p.head_dim) ? 0 : terms<S>(kKeys), cols_k);
    V = carver.take<E>(kInPlace<S> ? 0 : kKeys, cols_v);
    left_K = carver.take<E>(kPaired, cols_k);
    listed_K = carver.take<S>(kKeys, cols_k);
    listed_V = carver.take<S>(kKeys, cols_v);
    Qt = carver.take<E>(query_terms<S>(p.head_dim), kRows);
    dOt = carver.take<E>(query_terms<S>(p.head_dim_v), kRows);
    Q = carver.take_spread<E>(terms<S>(kRows), cols_k);
    dO = carver.take_spread<E>(terms<S>(kRows), cols_v);
    P = carver.take<T>(kKeys, kRows);
    dP = carver.take_spread<T>(kKeys, kRows);
    left_P = carver.take<E>(kPaired, terms<S>(kRows));
    left_dS = carver.take<E>(kPaired, terms<S>(kRows));
    summed_dS = carver.take_spread<E>(terms<S>(kPaired), kRows);
    dK = carver.take<T>(kKeys, cols_k);
    dV = carver.take<T>(kKeys, cols_v);
    tile_dQ = carver.take<T>(kRows, cols_k);
    dQ = carver.take<T>(rows, cols_k);
    row_terms = carver.take<T>(kTerms, rows);
    tile_terms = carver.take<T>(kTerms, kRows);
    bytes = carver.bytes();
  }
};

template <class S>
Plan plan_block_backward(const BackwardParams& p) {
  return {SelectedSums<S>::items(p), BlockBackwardScratch<S>(p, nullptr).bytes, SelectedSums<S>::bytes(p)};
}

// Queries of an item of backward, whose dK and dV are added to `all`.
template <class S, class Score>
class BlockBackwardItem {
  using T = Compute<S>;
  using E = Operand<S>;
  static constexpr int L = kLanes<T>;
  static_assert(kTileKeys == kBackwardBlockK);  // a query with so few keys gets delta from its weights

 public:
  BlockBackwardItem(const BackwardParams& p, const SelectedSums<S>& all, BlockBackwardScratch<S>& s)
      : p(p), all(all), s(s) {
    fill_zero(s.dK.data, kTileKeys * s.dK.row);
    fill_zero(s.dV.data, kTileKeys * s.dV.row);
  }

  void run(Range heads) {
    s.lists.begin(heads, kTileKeys);
    const Head first = s.lists.first();
    for (int64_t i = 0; i < heads.count(); ++i) begin(first.later(i), i);
    fill_zero(s.dQ.data, heads.count() * group * s.dQ.row);
    watch.lap(Phase::kPack);
    const int64_t most = kBlockQ<T> / group, step = block_tile(p), block_keys = p.cpu.selected.block;
    s.lists.each_block([&](int64_t n) {
      for (int64_t n0 = 0; n0 < block_keys; n0 += step) {
        const int64_t keys = min(step, block_keys - n0), key = n * block_keys + n0;
        const KeyBlock<S> block = operands(block_rows<S>(p, first, p.k, n, n0), block_rows<S>(p, first, p.v, n, n0),
                                           keys, all.dK().from(key), all.dV().from(key));
        s.lists.each_tile(n, most,
                          [&](const int32_t* queries, int64_t count) { add(first, queries, count, block, keys); });
      }
    });
    s.lists.each_rest([&](int64_t i, Range places) {
      const Head head = first.later(i);
      const auto query = static_cast<int32_t>(i);
      for (int64_t n0 = places.begin; n0 < places.end; n0 += kTileKeys) {
        const int64_t keys = min(kTileKeys, places.end - n0);
        const Range some{n0, n0 + keys};
        const KeyBlock<S> block =
            operands(whole_rows<S>(p, head, p.k, some, p.head_dim, s.listed_K),
                     whole_rows<S>(p, head, p.v, some, p.head_dim_v, s.listed_V), keys, s.dK, s.dV);
        add(first, &query, 1, block, keys);
        all.take(head, n0, keys, s.dK, s.dV);
        watch.lap(Phase::kStore);
      }
    });
    for (int64_t i = 0; i < heads.count(); ++i)
      write_rows<S>(p, first.later(i), 0, s.dQ.from(i * group), group, score.dscale);
    watch.lap(Phase::kStore);
  }

 private:
  const BackwardParams& p;
  const SelectedSums<S>& all;
  BlockBackwardScratch<S>& s;
  const int64_t group = group_size(p);
  const Score score{p};
  Stopwatch watch{p.cpu.counts};
  LaneMask<T> unmasked;  // softmax without a mask reads none

  static BlockTerms<T> terms_at(Matrix<T> terms, int64_t row) {
    return {terms.at(0) + row, terms.at(1) + row, terms.at(2) + row,
            terms.at(3) + row, terms.at(4) + row, terms.at(5) + row};
  }

  void begin(const Head& head, int64_t i) const {
    const Range keys = s.lists.seen(i);
    for (int64_t r = 0; r < group; ++r) {
      RowTerms<T> terms = {};
      if (!keys.empty()) terms = terms_of_row<S>(p, head, r, keys.count() <= kTileKeys, score);
      const T found[] = {terms.row_max, terms.inverse_sum, terms.at_once ? T(1) : T(0),
                         terms.sink,    terms.delta,       terms.dlse};
      for (int64_t n = 0; n < s.kTerms; ++n) s.row_terms.at(n)[i * group + r] = found[n];
    }
  }

  KeyBlock<S> operands(Matrix<const S> k_rows, Matrix<const S> v_rows, int64_t keys, Matrix<T> dK, Matrix<T> dV) const {
    const bool in_place = summed_in_place<S>(p.k, p.head_dim);
    const Matrix<const E> K = summed_keys<S>(k_rows, keys, p.head_dim, in_place, s.K);
    return {k_rows,
            K,
            kPairs<S> ? left_keys<S>(k_rows, keys, p.head_dim, s.left_K) : K.strided(),
            left_keys<S>(v_rows, keys, p.head_dim_v, s.V),
            dK,
            dV};
  }

  // Adds the products of these queries, at most a tile of them, with the keys of a block.
  void add(const Head& first, const int32_t* queries, int64_t count, const KeyBlock<S>& block, int64_t keys) {
    const int64_t rows = count * group, lanes = round_up(rows, L);
    const int64_t flops_k = 2 * rows * keys * p.head_dim, flops_v = 2 * rows * keys * p.head_dim_v;
    const S *q_rows[kBlockQ<T>], *do_rows[kBlockQ<T>];
    for (int64_t n = 0; n < count; ++n) {
      const Head head = first.later(queries[n]);
      for (int64_t r = 0; r < group; ++r) {
        q_rows[n * group + r] = head.row<const S>(p.q, r);
        do_rows[n * group + r] = head.row<const S>(p.dout, r);
      }
      for (int64_t t = 0; t < s.kTerms; ++t)
        __builtin_memcpy(s.tile_terms.at(t) + n * group, s.row_terms.at(t) + queries[n] * group, group * sizeof(T));
    }
    for (int64_t t = 0; t < s.kTerms; ++t) fill_zero(s.tile_terms.at(t) + rows, lanes - rows);
    const auto q_row = [&](int64_t r) { return q_rows[r]; };
    const auto do_row = [&](int64_t r) { return do_rows[r]; };
    pack_queries<S>(s.Qt, rows, lanes, p.head_dim, score.power, q_row);
    pack_queries<S>(s.dOt, rows, lanes, p.head_dim_v, T(1), do_row);
    pack_summed_rows<S>(s.Q, rows, p.head_dim, q_row);
    pack_summed_rows<S>(s.dO, rows, p.head_dim_v, do_row);
    watch.lap(Phase::kPack);
    score_gemm<T>(keys, 0, lanes, terms<S>(p.head_dim), block.left_K, s.Qt, s.P);
    watch.lap(Phase::kScores, flops_k);
    score_gemm<T>(keys, 0, lanes, terms<S>(p.head_dim_v), block.left_V, s.dOt, s.dP);
    watch.lap(Phase::kdP, flops_v);
    softmax_gradient<false>(s.P, s.dP, Strip{0, lanes, 0, keys}, unmasked, score, terms_at(s.tile_terms, 0));
    watch.lap(Phase::kSoftmax);
    const Strided<E> P = tile_over_lanes<S>(s.P, 0, keys, 0, rows, s.left_P);
    const Strided<E> dS = tile_over_lanes<S>(s.dP, 0, keys, 0, rows, s.left_dS);
    gemm<T>(keys, 0, s.dV.row, terms<S>(rows), P, s.dO, block.dV, Update<T>::add());
    watch.lap(Phase::kdV, flops_v);
    gemm<T>(keys, 0, s.dK.row, terms<S>(rows), dS, s.Q, block.dK, Update<T>::add());
    watch.lap(Phase::kdK, flops_k);
    const Strided<E> dSt = tile_over_keys<S>(s.dP, 0, keys, 0, lanes, s.summed_dS).strided().transposed();
    gemm<T>(rows, 0, s.dQ.row, terms<S>(keys), dSt, block.K, s.tile_dQ, Update<T>::add_unless(true));
    for (int64_t n = 0; n < count; ++n) {
      T *const sum = s.dQ.at(queries[n] * group), *const more = s.tile_dQ.at(n * group);
      for (int64_t d = 0; d < group * s.dQ.row; d += L) store(sum + d, load(sum + d) + load(more + d));
    }
    watch.lap(Phase::kdQ, flops_k);
  }
};

// Each work item is some of the queries of a KV head.
template <class S, class Score>
void block_backward(const BackwardParams& p, int64_t begin, int64_t end, void* scratch) {
  BlockBackwardScratch<S> s(p, scratch);
  for (int64_t item = begin; item < end; ++item) {
    const SelectedSums<S> all(p, item);
    const Range heads = all.heads_of_queries();
    all.clear();
    BlockBackwardItem<S, Score> queries(p, all, s);
    const int64_t each = backward_block_queries(p);
    for (int64_t first = heads.begin; first < heads.end; first += each)
      queries.run({first, min(first + each, heads.end)});
  }
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
