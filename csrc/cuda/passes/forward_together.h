// Forward by warpgroups: as in forward.h, but the tensor cores multiply while warps compute weights. Each turn starts
// the next tile's scores and then P V of this tile; once the scores are there, their weights are next, while P V runs on.
#pragma once

#include "cuda/passes/forward.h"
#include "cuda/plan/work.h"
#include "cuda/products/product.h"
#include "cuda/products/warpgroup.h"
#include "cuda/ptx/primitives.h"
#include "cuda/tiles/dropout.h"
#include "cuda/tiles/softmax.h"
#include "cuda/tiles/tile_mask.h"

namespace pyattn::cuda {
namespace {

template <class S, int kDim, class Score>
struct TogetherShape : RowShape<S, kDim, Team::kWarpgroup> {
  using typename RowShape<S, kDim, Team::kWarpgroup>::QTile;
  static constexpr int kKeys = 128, kStages = 2;
  using KTile = SharedMatrix<S, kKeys, kDim>;
  using Dropout = DropoutTile<TogetherShape::kRows, kKeys>;
  static constexpr int kFlags = QTile::kBytes + 2 * kStages * KTile::kBytes, kKept = kFlags + kKeys;
  static constexpr int kBytes = kKept + Dropout::kBytes;
  static_assert(kBytes <= kSharedBytes);

  struct Memory {
    QTile Q;          // [kRows][kDim]
    char* stages;     // of K, then of V
    char* flags;      // [kKeys]: rows of V that are not finite
    Dropout dropout;  // [kRows][kKeys]

    PYATTN_DEVICE Memory(const ForwardParams& p, char* memory)
        : Q{memory}, stages(memory + QTile::kBytes), flags(memory + kFlags), dropout(p, memory + kKept) {}

    // [kKeys][kDim]
    PYATTN_DEVICE KTile K(unsigned turn) const { return {stages + turn % kStages * KTile::kBytes}; }
    PYATTN_DEVICE KTile V(unsigned turn) const { return {stages + (kStages + turn % kStages) * KTile::kBytes}; }
  };
};

// Stores the block's output and row statistics.
template <class S, int kDim, class Shape, class Score>
PYATTN_DEVICE void finish_rows(const ForwardParams& p, const Score& score, SoftmaxState<1> state,
                               const Sums<1, kDim / 8>& O) {
  const RowBlock<Shape::kRows> same(p);
  const int warp_row = 16 * warp(), first = same.first() + warp_row;
  state.template finish<S>(p, Mask(p, same.head), score, first);
  store_sums<S, 1>(
      O, 0, same.rows() - warp_row, p.head_dim_v, whole_chunks<S>(p.out),
      [&](int i) { return same.head.template row<S>(p.out, first + i); },
      [&](int m, int half) { return state.row_sum[m][half]; });
}

template <class S, int kDim, class Score, class Shape = TogetherShape<S, kDim, Score>>
PYATTN_KERNEL(Shape::kThreads, 1)
forward_together(const __grid_constant__ ForwardParams p) {
  constexpr int kKeys = Shape::kKeys, kRows = Shape::kRows, kThreads = Shape::kThreads;
  constexpr Layout kLayout = Layout::kQueriesByKeys;
  using Weights = Sums<1, kKeys / 8>;
  const RowBlock<kRows> block(p);
  if (block.empty() || !has_keys<false>(Mask(p, block.head))) return;
  const int r0 = block.first(), warp_row = 16 * warp();
  const Run keys = keys_of_rows(Mask(p, block.head), r0, block.rows());
  const typename Shape::Memory shared(p, shared_memory());
  const Score score(p);

  const KeyRows<S> k(block.head, p.k, p.head_dim), v(block.head, p.v, p.head_dim_v);
  const auto after = [&](int n) { return skip_keys<kRows, kKeys>(p, keys, n + kKeys); };
  Sums<1, kDim / 8> O = {};
  SoftmaxState<1> state;
  if (keys.empty()) return finish_rows<S, kDim, Shape>(p, score, state, O);
  int n0 = keys.begin, next = after(n0);
  QueryRows<S>(block.head, p.q, p.head_dim).template load<kThreads>(shared.Q, r0);
  k.template load<kThreads>(shared.K(0), n0);
  wait_for_copies();
  barrier();  // Q and K have arrived
  v.template load<kThreads>(shared.V(0), n0);
  if (next < keys.end) k.template load<kThreads>(shared.K(1), next);
  Weights P;
  Factors<S, kKeys / kSlice> weights;
  multiply_together([&] { start_rows(P[0], shared.Q, warp_row, shared.K(0)); }, P[0]);

  for (unsigned turn = 0; n0 < keys.end; ++turn) {
    if (shared.dropout.any()) {
      const RowBlock<kRows> same(p);
      shared.dropout.template draw<kThreads>(same.head, same.first(), n0);
      barrier();
    }
    NoDerivative none;
    score.template to_scores<kLayout>(P, none, warp_row, [&] { return mask_of_rows<kRows>(p, n0); });
    const bool masked = !keys.sees_all(n0, kKeys);
    if (masked)
      each_hidden<S, kLayout, 1, kKeys / 8>(mask_of_rows<kRows>(p, n0), warp_row,
                                            [&](int m, int n, int i) { P[m][n][i] = kNegInf; });
    state.update(score, P);
    shared.dropout.template apply<kLayout>(P, warp_row);
    wait_for_products<0>(O[0], weights.slice);  // of the previous values
    weights.take(P[0]);
    state.rescale(O);
    wait_for_copies();
    barrier();  // the next K and this V have arrived, this K and the previous V are no longer read
    const int later = after(next);
    if (next < keys.end) v.template load<kThreads>(shared.V(turn + 1), next);
    if (later < keys.end) k.template load<kThreads>(shared.K(turn), later);
    const bool cleared = masked && clear_nonfinite<kThreads>(shared.V(turn), shared.flags);
    begin_products(P[0], O[0], weights.slice);
    start_rows(P[0], shared.Q, warp_row, shared.K(turn + 1));  // after the last tile, numbers that nobody reads
    end_group();
    start_sums(O[0], weights, shared.V(turn));
    end_group();
    wait_for_products<1>(P[0]);
    if (cleared) {
      wait_for_products<0>(O[0], weights.slice);
      poison<S, kLayout>(O, shared.flags, kKeys, mask_of_rows<kRows>(p, n0), warp_row);
    }
    n0 = next, next = later;
  }
  wait_for_products<0>(P[0], O[0], weights.slice);
  finish_rows<S, kDim, Shape>(p, score, state, O);
}

}  // namespace
}  // namespace pyattn::cuda
