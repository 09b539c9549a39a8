// Tiles of one query head's scores, for passes that compute dS again to add it up in another way than dQ and dK.
#pragma once

#include "cuda/passes/backward_queries.h"
#include "cuda/plan/work.h"
#include "cuda/products/fragment.h"
#include "cuda/ptx/primitives.h"
#include "cuda/products/product.h"
#include "cuda/products/team.h"
#include "cuda/tiles/softmax_gradient.h"
#include "cuda/tiles/tile_mask.h"
#include "cuda/plan/workspace.h"
#include "shared/mask.h"

namespace pyattn::cuda {
namespace {

template <class S, int kDim, class Score>
using HeadShape = QueriesShape<S, kDim, Score, Team::kWarp, 1>;

template <class S, int kDim, class Score, class Shape = HeadShape<S, kDim, Score>>
struct HeadTiles {
  static constexpr int kM = Shape::kM, kKeys = Shape::kKeys, kRows = Shape::kRows, kThreads = Shape::kThreads;

  const BackwardParams& p;
  const typename Shape::Memory& shared;
  Mask mask;
  int group, member, count;
  RowsBefore before;
  KeyRows<S> k, v;
  QueryRows<S> q, dout;
  int q0 = 0;
  bool loaded = false;
  RowTerms terms[2 * kM];

  PYATTN_DEVICE HeadTiles(const BackwardParams& p, const typename Shape::Memory& shared, int64_t b, int64_t h)
      : p(p),
        shared(shared),
        mask(p, Head(p, b * p.num_heads_kv + divide(h, group_size(p)))),
        group(static_cast<int>(mask.head.group)),
        member(static_cast<int>(remainder(h, group))),
        count(static_cast<int>(mask.head.count)),
        before(rows_before(p, static_cast<unsigned>(b * p.num_heads_kv + mask.head.h_kv), mask.head)),
        k(mask.head, p.k, p.head_dim),
        v(mask.head, p.v, p.head_dim_v),
        q(mask.head, p.q, p.head_dim, member),
        dout(mask.head, p.dout, p.head_dim_v, member) {}

  // The next tiles are of the kRows queries from this one on.
  PYATTN_DEVICE void begin_rows(int query) { q0 = query, loaded = false; }

  // The first of the warp's rows in the tile. kParts warps share rows, and have the same sums.
  static PYATTN_DEVICE int warp_row() { return warp() / Shape::kParts * 16 * kM; }

  // Calls see(dS) for the kKeys keys from n0, a multiple of kDrawKeys, on, if some query sees one of them.
  // Ends with a barrier then, and returns whether it does.
  template <class See>
  PYATTN_DEVICE bool visit(const Score& score, int n0, See see) {
    const int r0 = q0 * group;
    if (!seen_by_any(mask, r0, min(kRows * group, count - r0), n0, kKeys)) return false;
    const typename Shape::KTile K = shared.K(0), V = shared.V(0);
    const TileMask place(mask, r0 + member, n0, count, group);
    k.template load<kThreads>(K, n0), v.template load<kThreads>(V, n0);
    if (!loaded) {
      q.template load<kThreads>(shared.Q, q0), dout.template load<kThreads>(shared.dO, q0);
#pragma unroll
      for (int at = 0; at < 2 * kM; ++at)
        terms[at] = row_terms_of(p, before, count)[place.row_of(warp_row() + 8 * at + lane() / 4)];
      loaded = true;
    }
    if (shared.dropout.any()) shared.dropout.template draw<kThreads>(mask.head, r0 + member, n0, group);
    wait_for_copies();
    barrier();  // keys, rows and draws are ready
    Sums<kM, kKeys / 8> P, dS;
    multiply_rows<S, Shape::kTeam>(P, shared.Q, K, dS, shared.dO, V, warp_row());
    to_gradients<S, Layout::kQueriesByKeys>(
        score, shared.dropout, P, dS, warp_row(), [&] { return place; }, true, [&](int at, int) { return terms[at]; },
        see);
    barrier();  // keys, rows and draws are no longer read
    return true;
  }
};

}  // namespace
}  // namespace pyattn::cuda
