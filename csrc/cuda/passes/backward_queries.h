// Backward for dQ: a thread block takes kRows query rows of a KV head and runs over the keys that
// they see, recomputing S and dP. These two of backward's seven products are the price of adding
// up dQ in one place, in one order.
//
//   dP = dO V^T      P, dS as in softmax_gradient.h      dQ += dS K
#pragma once

#include "cuda/plan/work.h"
#include "cuda/tiles/dropout.h"
#include "cuda/products/fragment.h"
#include "cuda/ptx/primitives.h"
#include "cuda/products/product.h"
#include "cuda/products/team.h"
#include "cuda/tiles/relative_bias.h"
#include "cuda/tiles/score.h"
#include "cuda/tiles/softmax.h"
#include "cuda/tiles/softmax_gradient.h"
#include "cuda/products/matrix.h"
#include "cuda/tiles/tile_mask.h"
#include "cuda/plan/workspace.h"
#include "shared/mask.h"

namespace pyattn::cuda {
namespace {

// The terms of the lane's rows in dslopes: each the sum of dS times minus the distance.
template <int kM>
struct SlopeTerms {
  float sum[2 * kM] = {};

  template <int kN>
  PYATTN_DEVICE void add(const BackwardParams& p, const Sums<kM, kN>& dS, const TileMask& place, int first) {
    each_query<Layout::kQueriesByKeys, kM, kN>(first, [&](int at, int row, auto each_key) {
      const int64_t r = place.row_of(row);
      each_key([&](int m, int n, int i, int key) {
        sum[at] =
            fmaf(dS[m][n][i], static_cast<float>(minus_distance(p, place.mask.head, r, place.key_of(key))), sum[at]);
      });
    });
  }

  // The warp's rows begin at row `first` of the head.
  PYATTN_DEVICE void store(const BackwardParams& p, const Head& head, int first) const {
#pragma unroll
    for (int at = 0; at < 2 * kM; ++at) {
      const float total = reduce_row(sum[at], [](float x, float y) { return x + y; });
      const int r = first + 8 * at + lane() / 4;
      if (lane() % 4 == 0 && r < head.count) slope_terms_of<float>(p)[head.index(p, r)] = total;
    }
  }
};

// Adds the warp's part of dS to each row's terms of the relative bias at the ends of its table. They stay in memory,
// because a lane has no register left for them; one lane reads and writes a row's.
template <int kM, int kN>
PYATTN_DEVICE void add_ends(const BackwardParams& p, const Sums<kM, kN>& dS, const TileMask& place, int first,
                            bool writes) {
  const Head& head = place.mask.head;
  each_query<Layout::kQueriesByKeys, kM, kN>(first, [&](int, int row, auto each_key) {
    const int64_t r = place.row_of(row);
    const RelativeRow<float> bias(p, head, r, place.n0);
    float ends[2] = {};
    each_key([&](int m, int n, int i, int key) {
      if (bias.at_first(key))
        ends[0] += dS[m][n][i];
      else if (bias.at_last(key))
        ends[1] += dS[m][n][i];
    });
#pragma unroll
    for (int end = 0; end < 2; ++end) {
      const float sum = reduce_row(ends[end], [](float x, float y) { return x + y; });
      if (writes && lane() % 4 == 0 && place.r0 + row < place.rows && sum != 0)
        end_terms_of<float>(p, end)[head.index(p, r)] += sum;
    }
  });
}

template <class S, int kDim, class Score, Team kTeamOfRows = kTeamOf<S, kDim>, int kMostStages = 2>
struct QueriesShape : RowShape<S, kDim, kTeamOfRows> {
  using typename RowShape<S, kDim, kTeamOfRows>::QTile;
  // S and dP together take twice the registers that S takes in forward.
  static constexpr int kKeys =
      (!Score::kGeneral && (sizeof(S) == 2 || kDim <= 64) ? 32 : 16) * (kTeamOfRows == Team::kWarpgroup ? 2 : 1);
  // 2 prefetch the next keys, if shared memory has room; with 3, the product of the previous ones may still run.
  static constexpr int kStages = kTeamOfRows == Team::kWarpgroup ? 3 : kDim > 192 ? 1 : kMostStages;
  // Blocks per multiprocessor; 0 lets ptxas choose. For float at 64 columns with general scores, it would choose four on 8.0 and
  // spill 316 bytes.
  static constexpr int kBlocks = sizeof(S) == 4 && kDim == 64 && Score::kGeneral ? 3 : 0;
  using KTile = SharedMatrix<S, kKeys, kDim>;
  using Dropout = DropoutTile<QueriesShape::kRows, kKeys>;
  static constexpr int kFlags = 2 * QTile::kBytes + 2 * kStages * KTile::kBytes, kKept = kFlags + kKeys;
  static constexpr int kBytes = kKept + Dropout::kBytes;
  static_assert(kBytes <= kSharedBytes);

  struct Memory {
    QTile Q, dO;      // [kRows][kDim]
    char* stages;     // kStages of K and V
    char* flags;      // [kKeys]: rows of K that are not finite
    Dropout dropout;  // [kRows][kKeys]

    PYATTN_DEVICE Memory(const ForwardParams& p, char* memory)
        : Q{memory},
          dO{memory + QTile::kBytes},
          stages(memory + 2 * QTile::kBytes),
          flags(memory + kFlags),
          dropout(p, memory + kKept) {}

    // [kKeys][kDim]
    PYATTN_DEVICE KTile K(int stage) const { return {stages + 2 * stage * KTile::kBytes}; }
    PYATTN_DEVICE KTile V(int stage) const { return {stages + (2 * stage + 1) * KTile::kBytes}; }
  };
};

template <class S, int kDim, class Score, class Shape = QueriesShape<S, kDim, Score>>
PYATTN_KERNEL(Shape::kThreads, Shape::kBlocks)
backward_queries(const __grid_constant__ BackwardParams p) {
  constexpr int kM = Shape::kM, kKeys = Shape::kKeys, kRows = Shape::kRows;
  constexpr bool kTogether = Shape::kTeam == Team::kWarpgroup && !Score::kGeneral;
  constexpr Layout kLayout = Layout::kQueriesByKeys;
  const RowBlock<kRows> block(p);
  if (block.empty()) return;
  const int r0 = block.first();
  const Run keys = keys_of_rows(Mask(p, block.head), r0, block.rows());
  const int warp_row = warp() / Shape::kParts * 16 * kM;
  const int part = warp() % Shape::kParts;
  const typename Shape::Memory shared(p, shared_memory());
  const Score score(p);

  const KeyRows<S> k(block.head, p.k, p.head_dim), v(block.head, p.v, p.head_dim_v);
  const auto load_keys = [&](int stage, int n0) {
    k.template load<Shape::kThreads>(shared.K(stage), n0);
    v.template load<Shape::kThreads>(shared.V(stage), n0);
  };
  if (!keys.empty()) {  // without keys no loop waits for copies, so none may start
    QueryRows<S>(block.head, p.q, p.head_dim).template load<Shape::kThreads>(shared.Q, r0);
    QueryRows<S>(block.head, p.dout, p.head_dim_v).template load<Shape::kThreads>(shared.dO, r0);
    load_keys(0, keys.begin);
  }
  RowTerms terms[2 * kM];
  const RowsBefore before = rows_before(p, block.number / block.blocks, block.head);
#pragma unroll
  for (int at = 0; at < 2 * kM; ++at) {
    const int64_t r = r0 + warp_row + 8 * at + lane() / 4;
    terms[at] = row_terms_of(p, before, block.head.count)[min(r, block.head.count - 1)];
  }

  Sums<kM, Shape::kColumns / 8> dQ = {};
  [[maybe_unused]] Factors<S, kKeys / kSlice> gradients;  // of a product that still runs
  [[maybe_unused]] SlopeTerms<kM> slopes;
  int turn = 0;
  for (int n0 = keys.begin, next; n0 < keys.end; n0 = next) {
    const typename Shape::KTile K = shared.K(turn), V = shared.V(turn);
    next = skip_keys<kRows, kKeys>(p, keys, n0 + kKeys);
    wait_for_copies();
    barrier();  // these keys have arrived, and the previous ones are no longer read
    if (Shape::kStages > 1) {
      turn = (turn + 1) % Shape::kStages;
      if (next < keys.end) load_keys(turn, next);
    }
    if (shared.dropout.any()) {
      const RowBlock<kRows> same(p);
      shared.dropout.template draw<Shape::kThreads>(same.head, same.first(), n0);
      barrier();
    }

    Sums<kM, kKeys / 8> P, dS;
    if constexpr (kTogether) wait_for_products<0>(dQ[0], gradients.slice);  // of the previous keys
    multiply_rows<S, Shape::kTeam>(P, shared.Q, K, dS, shared.dO, V, warp_row);
    const bool masked = !keys.sees_all(n0, kKeys);
    const auto place = [&] { return mask_of_rows<kRows>(p, n0); };
    to_gradients<S, kLayout>(
        score, shared.dropout, P, dS, warp_row, place, masked, [&](int at, int) { return terms[at]; },
        [&](const auto& dS) {
          if constexpr (Score::kGeneral) {
            if (p.dslopes) slopes.add(p, dS, place(), warp_row);
            if (p.drelative) add_ends(p, dS, place(), warp_row, part == 0);
          }
        });

    if constexpr (kTogether)
      if (!masked) {
        gradients.take(dS[0]);
        begin_products(dQ[0], gradients.slice);
        start_sums(dQ[0], gradients, K);
        end_group();
        continue;
      }
    const bool cleared = masked && clear_nonfinite<Shape::kThreads>(K, shared.flags);
    multiply_sums<S, Shape::kTeam, Shape::kParts>(dQ, dS, K, part);
    if (cleared) poison<S, kLayout>(dQ, shared.flags, kKeys, place(), warp_row);
    if (Shape::kStages == 1) {
      barrier();  // the keys are no longer read
      if (next < keys.end) load_keys(0, next);
    }
  }

  if constexpr (kTogether) wait_for_products<0>(dQ[0], gradients.slice);
  const RowBlock<kRows> same(p);
  const int first = same.first() + warp_row;
  if constexpr (Score::kGeneral)
    if (p.dslopes && part == 0) slopes.store(p, same.head, first);
  const float scale = score.dscale();
  with_written<S>(p, [&](auto type) {
    using R = decltype(type);
    store_sums<S, Shape::kParts>(
        dQ, part, same.rows() - warp_row, p.head_dim, whole_chunks<R>(p.dq),
        [&](int i) { return same.head.template row<R>(p.dq, first + i); }, [&](int, int) { return scale; });
  });
}

}  // namespace
}  // namespace pyattn::cuda
