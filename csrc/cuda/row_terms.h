// The first pass of backward: what the others need to know of
// each row, above all delta = rowsum(dO * O). One warp per row.
#pragma once

#include <cstdint>

#include "attention.h"
#include "fragment.h"
#include "gradient.h"
#include "heads.h"
#include "mask.h"
#include "primitives.h"

namespace pyattn::cuda {
namespace {

inline constexpr int kRowTermsWarps = 4;

// (batch * num_heads_kv, rows), at the beginning of params.workspace.
PYATTN_DEVICE RowTerms* row_terms_of(const BackwardParams& p, unsigned head, unsigned rows) {
  return static_cast<RowTerms*>(p.workspace) + uint64_t{head} * rows;
}

template <class S, class Score>
PYATTN_KERNEL(kRowTermsWarps* kWarpLanes)
row_terms(const __grid_constant__ BackwardParams p) {
  const int64_t count = p.seqlen_q * group_size(p), at = block_index() * kRowTermsWarps + warp();
  if (at >= p.batch * p.num_heads_kv * count) return;
  const Head head(p, at / count);
  const int64_t r = at % count, index = head.index(p, r);
  const S *out = head.row<const S>(p.out, r), *dout = head.row<const S>(p.dout, r);
  float delta = 0;
  for (int64_t c = lane(); c < p.head_dim_v; c += kWarpLanes) delta = fmaf(widen(dout[c]), widen(out[c]), delta);
  delta = sum_lanes(delta);
  if (lane() != 0) return;
  const bool alone = Mask(p, head).keys_of(r).count() == 1;
  const float dlse = p.dlse ? static_cast<const float*>(p.dlse)[index] : 0;
  const float row_max = static_cast<const float*>(p.row_max)[index],
              row_sum = static_cast<const float*>(p.row_sum)[index];
  const Score score(p);
  *(row_terms_of(p, static_cast<unsigned>(at / count), static_cast<unsigned>(count)) + r) = {
      score.shift(row_max), 1 / row_sum, (alone ? 0 : delta) - dlse, alone ? 0.0f : 1.0f};
}

}  // namespace
}  // namespace pyattn::cuda
