// One tile of backward: P and dS of a block of query rows and a block of keys.
#pragma once

#include "cpu/passes/packed_queries.h"
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
#include "cpu/tiles/keys.h"
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

// Q[rows][few_terms(cols)], K[keys][cols] -> out[keys][queries] = (Q K^T)^T
// for the keys of a strip. Backward must repeat the scores of forward bit
// for bit, or its weights would not add up to 1.
template <class S>
void few_products(Matrix<const Operand<S>> Q, Matrix<const S> K, int64_t rows, int64_t cols, Strip strip,
                  Matrix<Compute<S>> out) {
  constexpr int L = kLanes<Compute<S>>;
  Compute<S> block[kDecodeRows][L];
  for (int64_t j = strip.begin; j < strip.end; j += L) {
    dots<S>(rows, strip.end - j, cols, Q, K.from(j), {block[0], L},
            [&](int64_t i, int64_t n) { prefetch_later_keys(K, j + i, n, cols); });
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
      : p(p), mask(mask), s(s), score(score), watch(watch) {}

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
        few_products<S>(s.few_Q, k_rows, tile.rows, p.head_dim, strip, s.P);
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

}  // namespace
}  // namespace pyattn::PYATTN_ISA
