// Backward for a bias that broadcasts: a thread block takes a tile of dbias and runs over all scores
// that share it, sequence by sequence, query head by query head, tile by tile, recomputing S and dP.
// Sums within the tile that share an element are added up at the end, so every sum has one order.
//
//   dbias[i][j] = sum of dS over the sequences, heads, queries and keys that bias[i][j] stands for
#pragma once

#include "cuda/plan/bias_items.h"
#include "cuda/products/fragment.h"
#include "cuda/passes/backward_tile.h"
#include "cuda/ptx/primitives.h"
#include "cuda/products/product.h"
#include "cuda/tiles/softmax_gradient.h"

namespace pyattn::cuda {
namespace {

template <class S, int kDim, class Score, class Shape = HeadShape<S, kDim, Score>>
PYATTN_KERNEL(Shape::kThreads)
backward_bias(const __grid_constant__ BackwardParams p) {
  using Tiles = HeadTiles<S, kDim, Score>;
  constexpr int kM = Shape::kM, kKeys = Shape::kKeys, kRows = Shape::kRows, kThreads = Shape::kThreads;
  static_assert(kRows * kKeys * sizeof(float) <= 2 * Shape::QTile::kBytes);
  const BiasItems<kRows, kKeys> items(p);
  const BiasItem own(p, items, block_index());
  const typename Shape::Memory shared(p, shared_memory());
  const Score score(p);

  Sums<kM, kKeys / 8> dB = {};
#pragma unroll 1
  for (int64_t b = own.sequences.begin; b < own.sequences.end; ++b)
#pragma unroll 1
    for (int64_t h = own.heads.begin; h < own.heads.end; ++h) {
      Tiles tiles(p, shared, b, h);
#pragma unroll 1
      for (int64_t q0 = own.queries.begin; q0 < own.queries.end; q0 += kRows) {
        tiles.begin_rows(q0);
#pragma unroll 1
        for (int64_t n0 = own.keys.begin; n0 < own.keys.end; n0 += kKeys)
          tiles.visit(score, n0, [&](const auto& dS) {
            each_sum<kM, kKeys / 8>([&](int m, int n, int i, int, int) { dB[m][n][i] += dS[m][n][i]; });
          });
      }
    }

  float* sums = reinterpret_cast<float*>(shared.Q.data);  // [kRows][kKeys]
  if (warp() % Shape::kParts == 0)                        // both parts have the same sums
    each_sum<kM, kKeys / 8>(
        [&](int m, int n, int i, int row, int key) { sums[(Tiles::warp_row() + row) * kKeys + key] = dB[m][n][i]; });
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
