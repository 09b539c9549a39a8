// One tile of backward: P and dS of a block of query rows and a block of keys.
#pragma once

#include <cstdint>

#include "attention.h"
#include "cpu/passes/backward_scratch.h"
#include "cpu/products/dots.h"
#include "cpu/tiles/dropout.h"
#include "cpu/products/product.h"
#include "shared/heads.h"
#include "shared/mask.h"
#include "cpu/products/matrix.h"
#include "cpu/products/operand.h"
#include "cpu/passes/packed_queries.h"
#include "cpu/simd/simd.h"
#include "cpu/tiles/softmax_gradient.h"
#include "cpu/passes/stopwatch.h"
#include "cpu/tiles/strips.h"

namespace pyattn::PYATTN_ISA {
namespace {

// Makes tiles of one head.
template <class S, class Score>
struct BackwardTile {
  using T = Compute<S>;
  using E = Operand<S>;

  const BackwardParams& p;
  const Mask& mask;
  const BackwardScratch<S>& s;
  const Score& score;
  Stopwatch& watch;
  LaneMask<T> seen;  // of the tile in work

  // Cuts the tile into strips; none where nothing is seen.
  Strips<T> cut(const Tile& tile) { return cut_strips<S>(mask, tile, seen); }

  // s.P and s.dP, which becomes dS, from Q K^T and dO V^T, the queries being those packed at place i;
  // finish(strip) follows each strip.
  template <class Finish>
  void make(const Tile& tile, const Strips<T>& strips, int64_t i, Strided<E> K, Strided<E> V, Finish finish) const {
    const Head& head = mask.head;
    score.prefetch(p, head, tile);
    strips.each([&](Strip strip) {
      const auto [j0, j1, begin, end] = strip;
      if (few_rows<S>(p, head.count))
        few_products<S>(s.few_Q, key_rows<S>(head, p.k, tile.n0), tile.rows, p.head_dim, strip, s.P);
      else
        score_gemm<T>(end - begin, j0, j1, terms<S>(p.head_dim), K.from(begin, 0), s.queries.Qt(i), s.P.from(begin));
      score.to_scores(p, s.P, head, tile, strip, s.derivative);
      watch.lap(Phase::kScores, 2 * strip.pairs() * p.head_dim);
      score_gemm<T>(end - begin, j0, j1, terms<S>(p.head_dim_v), V.from(begin, 0), s.queries.dOt(i), s.dP.from(begin));
      watch.lap(Phase::kdP, 2 * strip.pairs() * p.head_dim_v);
      if (p.dropout.threshold) {
        draw_dropout<T>(p, head, tile, strip, [&](int64_t k, int64_t j, vec<T> factor) {
          T* dp = s.dP.from(k).data + j;
          store(dp, load(dp) * factor);
          store(s.kept.from(k).data + j, factor);
        });
        watch.lap(Phase::kDropout);
      }
      const RowTerms<T> row_terms = s.queries.terms_of(i);
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
