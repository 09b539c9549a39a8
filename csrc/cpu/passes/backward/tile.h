// One tile of backward: P and dS of a block of query rows and a block of keys, and its products that add to gradients:
//
//   dV += P^T dO      dK += dS^T Q      dQ += dS K
#pragma once

#include "cpu/passes/backward/packed_queries.h"
#include "cpu/passes/stopwatch.h"
#include "cpu/plan/units.h"
#include "cpu/products/dots.h"
#include "cpu/products/lines_ahead.h"
#include "cpu/products/matrix.h"
#include "cpu/products/operand.h"
#include "cpu/products/pack.h"
#include "cpu/products/product.h"
#include "cpu/products/scratch.h"
#include "cpu/simd/simd.h"
#include "cpu/tiles/dropout.h"
#include "cpu/tiles/rows_ahead.h"
#include "cpu/tiles/softmax_gradient.h"
#include "cpu/tiles/strips.h"
#include "cpu/tiles/tile_mask.h"
#include "shared/mask.h"

namespace pyattn::PYATTN_ISA {
namespace {

// The scratch of backward: packed queries, operands of a block of keys, the tiles, and the sums.
template <class S>
struct BackwardScratch {
  using T = Compute<S>;
  using E = Operand<S>;
  int64_t cols_k, cols_v;  // head_dim and head_dim_v in whole vectors
  Carver carver;
  PackedQueries<S> queries;
  Matrix<E> K, V;                // [terms(keys)][cols_k], [keys][cols_v]: copies, if the tensor can't be read in place
  Matrix<S> listed_K, listed_V;  // [keys][cols_k], [keys][cols_v] in the storage type, if keys are selected
  Matrix<E> few_Q;               // [rows][few_terms(head_dim)], if rows are few
  Matrix<E> left_K;              // [keys][cols_k]: K as a left factor, which bf16 pairs lay out differently
  Matrix<E> left_P, left_dS;     // [keys][terms(queries)]: P and dS as left factors, as bf16 pairs
  Matrix<E> summed_dS;           // [terms(keys)][queries]: dS for a sum over keys, as bf16 pairs
  Matrix<T> P, dP;               // [keys][queries]
  Matrix<T> kept;                // [keys][queries], dropout factors
  Matrix<T> derivative;          // [keys][queries], derivative of the softcap
  Matrix<T> dQ;                  // [rows of a super-block][cols_k], if the item sums all of dQ
  Matrix<T> dK, dV;              // [keys of the item][cols_k], [keys of the item][cols_v]
  int64_t bytes;

  BackwardScratch(const BackwardParams& p, bool whole, int64_t keys, void* base)
      : cols_k(columns_k<S>(p)), cols_v(columns_v<S>(p)), carver(base), queries(p, carver) {
    const int64_t pairs = kPairs<S>;
    K = carver.take_spread<E>(summed_in_place<S>(p.k, p.head_dim) ? 0 : terms<S>(kBackwardBlockK), cols_k);
    V = carver.take<E>(kInPlace<S> ? 0 : kBackwardBlockK, cols_v);
    listed_K = carver.take<S>(is_selected(p) ? kBackwardBlockK : 0, cols_k);
    listed_V = carver.take<S>(is_selected(p) ? kBackwardBlockK : 0, cols_v);
    few_Q = carver.take<E>(dotted_rows<S>(p, 1) ? kDecodeRows : 0, few_terms<S>(p.head_dim));
    left_K = carver.take<E>(pairs * kBackwardBlockK, cols_k);
    left_P = carver.take<E>(pairs * kBackwardBlockK, terms<S>(kBlockQ<T>));
    left_dS = carver.take<E>(pairs * kBackwardBlockK, terms<S>(kBlockQ<T>));
    summed_dS = carver.take_spread<E>(pairs * terms<S>(kBackwardBlockK), kBlockQ<T>);
    P = carver.take<T>(kBackwardBlockK, kBlockQ<T>);
    dP = carver.take_spread<T>(kBackwardBlockK, kBlockQ<T>);
    kept = carver.take<T>(p.dropout.threshold ? kBackwardBlockK : 0, kBlockQ<T>);
    derivative = carver.take<T>(p.score.softcap ? kBackwardBlockK : 0, kBlockQ<T>);
    dQ = carver.take<T>(whole ? PackedQueries<S>::super_block_rows(p) : 0, cols_k);
    dK = carver.take<T>(keys, cols_k);
    dV = carver.take<T>(keys, cols_v);
    bytes = carver.bytes();
  }
};

// Prefetch distance in rows of K where several are read side by side; without it, 12 GB/s instead of 28.
inline constexpr int64_t kPrefetchKeys = 16;

// Q[rows][few_terms(cols)], K[keys][cols] -> out[keys][queries] = (Q K^T)^T
// for the keys of a strip. Backward must repeat the scores of forward bit
// for bit, or its weights would not add up to 1.
template <class S>
void few_products(Matrix<const Operand<S>> Q, Matrix<const S> K, int64_t rows, int64_t cols, Strip strip,
                  Matrix<Compute<S>> out, bool to_l2) {
  constexpr int L = kLanes<Compute<S>>;
  Compute<S> block[kDecodeRows][L];
  for (int64_t j = strip.begin; j < strip.end; j += L) {
    RowsAhead<Matrix<const S>> ahead(K.from(j + kPrefetchKeys), L, cols, 1, 0, to_l2);
    dots<S>(rows, strip.end - j, cols, Q, K.from(j), {block[0], L}, ahead);
    for (int64_t k = j; k < min(j + L, strip.end); ++k)
      for (int64_t r = strip.j0; r < strip.j1; ++r) out.from(k).data[r] = r < rows ? block[r][k - j] : 0;
  }
}

// Computes the tiles of one head.
template <class S, class Score>
struct BackwardTile {
  using T = Compute<S>;
  using E = Operand<S>;

  const BackwardParams& p;
  const Mask& mask;
  const BackwardScratch<S>& s;
  const Score& score;
  Stopwatch& watch;
  LaneMask<T> seen;  // of the current tile
  LinesAhead lines;  // prefetched by the products

  BackwardTile(const BackwardParams& p, const Mask& mask, const BackwardScratch<S>& s, const Score& score,
               Stopwatch& watch)
      : p(p),
        mask(mask),
        s(s),
        score(score),
        watch(watch),
        lines(p.cpu.prefetch_to_l2, pace<S>(mask.head.count, mask.head.seqlen_k)) {}

  // Cuts the tile into strips; none if nothing is visible.
  Strips<T> cut(const Tile& tile) { return cut_strips<S>(mask, tile, seen); }

  // Computes P in s.P and dS in s.dP, both [keys][queries], from Q K^T and dO V^T,
  // for the queries packed at place i. k_rows: K as it is stored. Calls finish(strip) after each strip.
  template <class Finish>
  void make(const Tile& tile, const Strips<T>& strips, int64_t i, Matrix<const S> k_rows, Strided<E> K, Strided<E> V,
            Finish finish) {
    const Head& head = mask.head;
    score.prefetch(p, head, tile);
    strips.each([&](Strip strip) {
      const auto [j0, j1, begin, end] = strip;
      if (dotted_rows<S>(p, head.count))
        few_products<S>(s.few_Q, k_rows, tile.rows, p.head_dim, strip, s.P, p.cpu.prefetch_to_l2);
      else
        score_gemm<T>(end - begin, j0, j1, terms<S>(p.head_dim), K.from(begin, 0), s.queries.Qt(i), s.P.from(begin),
                      lines.before_tiles());
      score.to_scores(p, s.P, head, tile, strip, s.derivative);
      watch.lap(Phase::kScores, 2 * strip.pairs() * p.head_dim);
      score_gemm<T>(end - begin, j0, j1, terms<S>(p.head_dim_v), V.from(begin, 0), s.queries.dOt(i), s.dP.from(begin),
                    lines.before_tiles());
      watch.lap(Phase::kdP, 2 * strip.pairs() * p.head_dim_v);
      if (p.dropout.threshold) {
        draw_dropout<T>(p, head, tile, strip, [&](int64_t k, int64_t j, vec<T> factor) {
          T* dp = s.dP.from(k).data + j;
          store(dp, load(dp) * factor);
          store(s.kept.from(k).data + j, factor);
        });
        watch.lap(Phase::kDropout);
      }
      const BlockTerms<T> row_terms = s.queries.terms_of(i);
      if (strips.masked)
        softmax_gradient<true>(s.P, s.dP, strip, seen, score, row_terms);
      else
        softmax_gradient<false>(s.P, s.dP, strip, seen, score, row_terms);
      finish(strip);
      watch.lap(Phase::kSoftmax);
    });
  }
};

// The operands of a block of keys, and the sums of its gradients.
template <class S, class E = Operand<S>>
struct KeyBlock {
  Matrix<const S> rows;       // [keys][head_dim]: K as it is stored
  Matrix<const E> K;          // [terms(keys)][head_dim], the right factor in dQ
  Strided<E> left_K, left_V;  // [keys][head_dim], [keys][head_dim_v], the left factors in S and dP
  Matrix<Compute<S>> dK, dV;
};

// The operands of a block of query rows, and the sum of its gradient.
template <class S, class E = Operand<S>>
struct RowBlock {
  Matrix<const E> Q, dO;  // [terms(rows)][cols], the right factors in dK and dV
  Matrix<Compute<S>> dQ;
  Update<Compute<S>> update;  // whether a product replaces dQ or is added to it
};

// Whether the tile's K, Q and dO are finite, so a product may multiply them by the 0 of a masked pair.
template <class S, class Score>
bool finite(const BackwardTile<S, Score>& weights, const Tile& tile, const KeyBlock<S>& block) {
  const BackwardParams& p = weights.p;
  const Head& head = weights.mask.head;
  const auto k_row = [&](int64_t j) { return block.rows.at(j); };
  const auto q_row = [&](int64_t r) { return head.row<const S>(p.q, tile.r0 + r); };
  const auto do_row = [&](int64_t r) { return head.row<const S>(p.dout, tile.r0 + r); };
  return all_finite<S>(tile.keys, p.head_dim, k_row) && all_finite<S>(tile.rows, p.head_dim, q_row) &&
         all_finite<S>(tile.rows, p.head_dim_v, do_row);
}

// Adds the products of a tile strip by strip.
template <class S, class Score>
void add_strips(BackwardTile<S, Score>& weights, const Tile& tile, const Strips<Compute<S>>& strips,
                const KeyBlock<S>& block, const RowBlock<S>& queries) {
  using T = Compute<S>;
  using E = Operand<S>;
  auto& [p, mask, s, score, watch, seen, lines] = weights;
  strips.each_keys([&](Strip strip) {
    const auto [j0, j1, begin, end] = strip;
    const int64_t first = terms<S>(j0), rows = min(j1, tile.rows) - j0, inner = terms<S>(rows);
    const Strided<E> P = tile_over_lanes<S>(s.P, begin, end, j0, j0 + rows, s.left_P);
    const Strided<E> dS = tile_over_lanes<S>(s.dP, begin, end, j0, j0 + rows, s.left_dS);
    watch.lap(Phase::kPack);
    gemm<T>(end - begin, 0, s.cols_v, inner, P.from(begin, first), queries.dO.from(first), block.dV.from(begin),
            Update<T>::add(), lines.before_tiles());
    watch.lap(Phase::kdV, 2 * strip.keys() * rows * p.head_dim_v);
    gemm<T>(end - begin, 0, s.cols_k, inner, dS.from(begin, first), queries.Q.from(first), block.dK.from(begin),
            Update<T>::add(), lines.before_tiles());
    watch.lap(Phase::kdK, 2 * strip.keys() * rows * p.head_dim);
  });
  strips.each([&](Strip strip) {
    const auto [j0, j1, begin, end] = strip;
    const Strided<E> dS = tile_over_keys<S>(s.dP, begin, end, j0, j1, s.summed_dS).strided().transposed();
    const int64_t first = terms<S>(begin), inner = terms<S>(end) - first, rows = min(j1, tile.rows) - j0;
    watch.lap(Phase::kPack);
    gemm<T>(rows, 0, s.cols_k, inner, dS.from(j0, first), block.K.from(first), queries.dQ.from(j0), queries.update,
            lines.before_tiles());
    watch.lap(Phase::kdQ, 2 * strip.keys() * rows * p.head_dim);
  });
}

// Adds the products of a tile, leaving masked pairs out one by one: for tiles whose K, Q or dO holds NaN or inf.
template <class S, class Score>
void add_seen_pairs(BackwardTile<S, Score>& weights, const Tile& tile, const KeyBlock<S>& block,
                    const RowBlock<S>& queries) {
  using T = Compute<S>;
  using E = Operand<S>;
  auto& [p, mask, s, score, watch, seen, lines] = weights;
  const auto key_row = [&](int64_t j, int64_t, int64_t r) { return seen.lane_sees(j, r); };
  const auto row_key = [&](int64_t r, int64_t, int64_t j) { return seen.lane_sees(j, r); };
  if constexpr (kTileRegisters<E>) clear_masked(s.P, tile, seen), clear_masked(s.dP, tile, seen);
  const Strided<E> P = tile_over_lanes<S>(s.P, 0, tile.keys, 0, tile.rows, s.left_P);
  const Strided<E> dS = tile_over_lanes<S>(s.dP, 0, tile.keys, 0, tile.rows, s.left_dS);
  const Strided<E> dSt = tile_over_keys<S>(s.dP, 0, tile.keys, 0, tile.lanes, s.summed_dS).strided().transposed();
  const int64_t pairs = tile.keys * tile.rows;
  watch.lap(Phase::kPack);
  gemm_seen<T>(tile.keys, 0, s.cols_v, terms<S>(tile.rows), P, queries.dO, block.dV, Update<T>::add(), key_row);
  watch.lap(Phase::kdV, 2 * pairs * p.head_dim_v);
  gemm_seen<T>(tile.keys, 0, s.cols_k, terms<S>(tile.rows), dS, queries.Q, block.dK, Update<T>::add(), key_row);
  watch.lap(Phase::kdK, 2 * pairs * p.head_dim);
  gemm_seen<T>(tile.rows, 0, s.cols_k, terms<S>(tile.keys), dSt, block.K, queries.dQ, queries.update, row_key);
  watch.lap(Phase::kdQ, 2 * pairs * p.head_dim);
}

// Adds the products of a tile.
template <class S, class Score>
void add_products(BackwardTile<S, Score>& weights, const Tile& tile, const Strips<Compute<S>>& strips,
                  const KeyBlock<S>& block, const RowBlock<S>& queries) {
  if (strips.masked && !finite(weights, tile, block))
    add_seen_pairs(weights, tile, block, queries);
  else
    add_strips(weights, tile, strips, block, queries);
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
