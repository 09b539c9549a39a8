// The gradient of a bias in tiles: the scores that each tile stands for where the bias broadcasts.
#pragma once

#include "attention.h"
#include "shared/index.h"

namespace pyattn::cuda {
namespace {

// Tiles of kRows queries and kKeys keys of each sequence and head. Along a dimension
// in which the bias broadcasts, a tile stands for all of it.
template <int kRows, int kKeys>
struct BiasItems {
  int64_t batch, heads, queries, keys;

  constexpr explicit BiasItems(const BackwardParams& p)
      : batch(p.dbias.stride_b ? p.batch : 1),
        heads(p.dbias.stride_h ? p.num_heads_q : 1),
        queries(p.dbias.stride_q ? ceil_div(p.seqlen_q, kRows) : 1),
        keys(p.dbias.stride_k ? ceil_div(p.seqlen_k, kKeys) : 1) {}

  constexpr int64_t count() const { return batch * heads * queries * keys; }
};

// The scores that one tile stands for.
struct BiasItem {
  Range sequences, heads, queries, keys;

  template <int kRows, int kKeys>
  constexpr BiasItem(const BackwardParams& p, const BiasItems<kRows, kKeys>& tiles, int64_t at)
      : sequences(share(p.dbias.stride_b, at / tiles.keys / tiles.queries / tiles.heads, 1, p.batch)),
        heads(share(p.dbias.stride_h, at / tiles.keys / tiles.queries % tiles.heads, 1, p.num_heads_q)),
        queries(share(p.dbias.stride_q, at / tiles.keys % tiles.queries, kRows, p.seqlen_q)),
        keys(share(p.dbias.stride_k, at % tiles.keys, kKeys, p.seqlen_k)) {}

  // The offset of its first element.
  constexpr int64_t offset(const BiasView& dbias) const {
    return sequences.begin * dbias.stride_b + heads.begin * dbias.stride_h + queries.begin * dbias.stride_q +
           keys.begin * dbias.stride_k;
  }

 private:
  static constexpr Range share(int64_t stride, int64_t at, int64_t n, int64_t size) {
    return stride ? Range{at * n, min(at * n + n, size)} : Range{0, size};
  }
};

}  // namespace
}  // namespace pyattn::cuda
