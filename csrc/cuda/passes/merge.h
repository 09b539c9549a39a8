// Merge: combines the partial results of a head's splits into out and the row statistics. One warp per row.
#pragma once

#include "cuda/plan/forward_splits.h"
#include "cuda/products/fragment.h"
#include "cuda/ptx/primitives.h"
#include "cuda/tiles/score.h"
#include "cuda/tiles/softmax.h"
#include "shared/mask.h"

namespace pyattn::cuda {
namespace {

inline constexpr int kMergeWarps = 8;

// Sums over splits are in the order of the keys, whichever block finished first.
//
//   row_max = max_s row_max_s      w_s = exp(row_max_s - row_max)      row_sum = sum_s w_s row_sum_s      O = sum_s w_s O_s
template <class S, class Score>
PYATTN_KERNEL(kMergeWarps* kWarpLanes)
merge_splits(const __grid_constant__ ForwardParams p) {
  const Head head(p, block_index());
  const int64_t r = block_index_y() * kMergeWarps + warp();
  if (r >= head.count) return;
  const Mask mask(p, head);
  if (Splits(head).count <= 1) return;
  const Range used = Splits(head).used(mask);
  const SplitResults results(p, head);
  const Score score(p);
  float row_max = kNegInf, row_sum = 0;
  for (int64_t s = used.begin + lane(); s < used.end; s += kWarpLanes)
    row_max = fmaxf(row_max, results.stats_of(s, r).row_max);
#pragma unroll
  for (int lanes = kWarpLanes / 2; lanes; lanes /= 2) row_max = fmaxf(row_max, shuffle_xor(row_max, lanes));
  const float shift = score.shift(row_max);
  for (int64_t s = used.begin + lane(); s < used.end; s += kWarpLanes) {
    const SplitRow part = results.stats_of(s, r);
    row_sum = fmaf(score.exp(part.row_max, shift), part.row_sum, row_sum);
  }
  const bool sees = !mask.exact_keys_of<S>(r).empty();
  const float factor = finish_row(p, head, score, r, sees, row_max, sum_lanes(row_sum), lane() == 0);

  struct alignas(16) Vector {
    float x[SplitResults::kVector];
  };
  S* out = head.row<S>(p.out, r);
  for (int64_t c = lane() * SplitResults::kVector; c < p.head_dim_v; c += kWarpLanes * SplitResults::kVector) {
    Vector O = {};
#pragma unroll 8
    for (int64_t s = used.begin; s < used.end; ++s) {
      const float weight = score.exp(results.stats_of(s, r).row_max, shift);
      const Vector part = *reinterpret_cast<const Vector*>(results.out(s, r) + c);
      for (int i = 0; i < SplitResults::kVector; ++i) O.x[i] = fmaf(weight, part.x[i], O.x[i]);
    }
    for (int i = 0; i < SplitResults::kVector; ++i)
      if (c + i < p.head_dim_v) narrow(out[c + i], O.x[i] * factor);
  }
}

}  // namespace
}  // namespace pyattn::cuda
