// Backward for a bias that broadcasts: a thread block takes a tile of dbias and runs over all scores
// that share it, sequence by sequence, query head by query head, tile by tile, recomputing S and dP.
// Sums within the tile that share an element are added up at the end, so every sum has one order.
//
//   dbias[i][j] = sum of dS over the sequences, heads, queries and keys that bias[i][j] stands for
#pragma once

#include "cuda/backward_queries.h"
#include "cuda/bias_items.h"
#include "cuda/block.h"
#include "cuda/fragment.h"
#include "cuda/primitives.h"
#include "cuda/product.h"
#include "cuda/softmax_gradient.h"
#include "cuda/tile_mask.h"
#include "cuda/workspace.h"
#include "shared/mask.h"

namespace pyattn::cuda {
namespace {

template <class S, int kDim, class Score, class Shape = QueriesShape<S, kDim, Score>>
PYATTN_KERNEL(Shape::kThreads)
backward_bias(const __grid_constant__ BackwardParams p) {
  constexpr int kM = Shape::kM, kKeys = Shape::kKeys, kRows = Shape::kRows, kThreads = Shape::kThreads;
  constexpr Layout kLayout = Layout::kQueriesByKeys;
  static_assert(kRows * kKeys * sizeof(float) <= 2 * Shape::QTile::kBytes);
  const BiasItems<kRows, kKeys> tiles(p);
  const BiasItem own(p, tiles, block_index());
  const int warp_row = warp() / Shape::kParts * 16 * kM;
  const typename Shape::Memory shared(p, shared_memory());
  const typename Shape::KTile K = shared.K(0), V = shared.V(0);
  const Score score(p);
  const auto group = static_cast<int>(group_size(p));

  Sums<kM, kKeys / 8> dB = {};
#pragma unroll 1
  for (int64_t b = own.sequences.begin; b < own.sequences.end; ++b)
#pragma unroll 1
    for (int64_t h = own.heads.begin; h < own.heads.end; ++h) {
      const Head head(p, b * p.num_heads_kv + divide(h, group));
      const Mask mask(p, head);
      const int member = static_cast<int>(remainder(h, group)), count = static_cast<int>(head.count);
      const KeyRows<S> k(head, p.k, p.head_dim), v(head, p.v, p.head_dim_v);
      const QueryRows<S> q(head, p.q, p.head_dim, member), dout(head, p.dout, p.head_dim_v, member);
#pragma unroll 1
      for (int64_t q0 = own.queries.begin; q0 < own.queries.end; q0 += kRows) {
        const int r0 = static_cast<int>(q0) * group, rows = min(kRows * group, count - r0);
        bool loaded = false;
        RowTerms terms[2 * kM];
#pragma unroll 1
        for (int64_t n0 = own.keys.begin; n0 < own.keys.end; n0 += kKeys) {
          if (!seen_by_any(mask, r0, rows, n0, kKeys)) continue;
          const TileMask place(mask, r0 + member, n0, count, group);
          k.template load<kThreads>(K, n0), v.template load<kThreads>(V, n0);
          if (!loaded) {
            q.template load<kThreads>(shared.Q, q0), dout.template load<kThreads>(shared.dO, q0);
#pragma unroll
            for (int at = 0; at < 2 * kM; ++at)
              terms[at] =
                  row_terms_of(p, b * p.num_heads_kv + head.h_kv, count)[place.row_of(warp_row + 8 * at + lane() / 4)];
            loaded = true;
          }
          if (shared.dropout.any()) shared.dropout.template draw<kThreads>(head, r0 + member, n0, group);
          wait_for_copies();
          barrier();  // keys, rows and draws are ready
          Sums<kM, kKeys / 8> P = {}, dS = {};
          multiply_rows<S>(P, shared.Q, warp_row, K);
          multiply_rows<S>(dS, shared.dO, warp_row, V);
          to_gradients<S, kLayout>(
              score, shared.dropout, P, dS, warp_row, [&] { return place; }, true,
              [&](int at, int) { return terms[at]; },
              [&](const auto& dS) {
                each_sum<kM, kKeys / 8>([&](int m, int n, int i, int, int) { dB[m][n][i] += dS[m][n][i]; });
              });
          barrier();  // keys, rows and draws are no longer read
        }
      }
    }

  float* sums = reinterpret_cast<float*>(shared.Q.data);  // [kRows][kKeys]
  if (warp() % Shape::kParts == 0)                        // both parts have the same sums
    each_sum<kM, kKeys / 8>(
        [&](int m, int n, int i, int row, int key) { sums[(warp_row + row) * kKeys + key] = dB[m][n][i]; });
  barrier();  // the sums are complete
  const bool each_q = p.dbias.stride_q, each_k = p.dbias.stride_k;
  const int own_rows = each_q ? kRows : 1, own_keys = each_k ? kKeys : 1;
  for (int at = thread_index(); at < own_rows * own_keys; at += kThreads) {
    const int row = at / own_keys, key = at % own_keys;
    if ((each_q && row >= own.queries.count()) || (each_k && key >= own.keys.count())) continue;
    float sum = 0;
#pragma unroll 1
    for (int i = row; i < kRows; i += own_rows)
#pragma unroll 1
      for (int j = key; j < kKeys; j += own_keys) sum += sums[i * kKeys + j];
    const int64_t offset = own.offset(p.dbias) + row * p.dbias.stride_q + key * p.dbias.stride_k;
    with_gradients<S>(p.dbias, [&](auto* elements) { narrow(elements[offset], sum); });
  }
}

}  // namespace
}  // namespace pyattn::cuda
