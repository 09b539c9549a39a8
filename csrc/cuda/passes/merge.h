// Merge: combines the partial results of a head's splits into out and the row statistics. A block takes one row, and its warps
// every eighth split each: one warp would wait for memory split after split, longer than forward takes.
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

// The shared memory of a block.
constexpr int merge_bytes(const ForwardParams& few) {
  return static_cast<int>(kMergeWarps * SplitResults::columns(few) * sizeof(float));
}

// Each warp's sums are in the order of the keys, and so are their sums, whichever block of forward finished first.
//
//   row_max = max_s row_max_s      w_s = exp(row_max_s - row_max)      row_sum = sum_s w_s row_sum_s      O = sum_s w_s O_s
template <class S, class Score>
PYATTN_KERNEL(kMergeWarps* kWarpLanes)
merge_splits(const __grid_constant__ ForwardParams p) {
  const Head head(p, block_index());
  const int64_t r = block_index_y();
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
  const float factor = finish_row(p, head, score, r, sees, row_max, sum_lanes(row_sum), thread_index() == 0);

  struct alignas(16) Vector {
    float x[SplitResults::kVector];
  };
  float* sums = reinterpret_cast<float*>(shared_memory());  // [kMergeWarps][cols]
  for (int64_t c = lane() * SplitResults::kVector; c < results.cols; c += kWarpLanes * SplitResults::kVector) {
    Vector O = {};
#pragma unroll 8
    for (int64_t s = used.begin + warp(); s < used.end; s += kMergeWarps) {
      const float weight = score.exp(results.stats_of(s, r).row_max, shift);
      const Vector part = *reinterpret_cast<const Vector*>(results.out(s, r) + c);
      for (int i = 0; i < SplitResults::kVector; ++i) O.x[i] = fmaf(weight, part.x[i], O.x[i]);
    }
    *reinterpret_cast<Vector*>(sums + warp() * results.cols + c) = O;
  }
  barrier();  // the warps' sums are stored
  S* out = head.row<S>(p.out, r);
  for (int64_t c = thread_index(); c < p.head_dim_v; c += kMergeWarps * kWarpLanes) {
    float O = 0;
#pragma unroll
    for (int w = 0; w < kMergeWarps; ++w) O += sums[w * results.cols + c];
    narrow(out[c], O * factor);
  }
}

}  // namespace
}  // namespace pyattn::cuda
