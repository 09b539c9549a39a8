// The passes before all others where key ranges or a bias are given: what the bias leaves of each of
// its rows, and what each block of query rows sees. Device memory is not read on the host, so every
// pass finds them in params.
#pragma once

#include <cstdint>

#include "attention.h"
#include "bias.h"
#include "fragment.h"
#include "heads.h"
#include "mask.h"
#include "primitives.h"

namespace pyattn::cuda {
namespace {

inline constexpr int kMaskWarps = 4, kMaskThreads = kMaskWarps * kWarpLanes;

// Whether formulas do not tell what a block of rows sees.
constexpr bool needs_summaries(const ForwardParams& p) {
  return p.mask.key_ranges || p.score.bias.type != BiasType::kNone;
}

constexpr int64_t bias_rows_count(const ForwardParams& p) {
  return p.score.bias.type == BiasType::kNone ? 0 : BiasRows(p).count();
}
constexpr int64_t mask_blocks_count(const ForwardParams& p) { return needs_summaries(p) ? Mask::count_blocks(p) : 0; }

// What the two passes write, at the beginning of params.workspace: the blocks, then the bias's rows.
constexpr int64_t mask_bytes(const ForwardParams& p) {
  constexpr int64_t kAlignment = 16;  // of what comes behind
  return round_up(mask_blocks_count(p) * sizeof(BlockKeys) + bias_rows_count(p) * sizeof(RowKeys), kAlignment);
}

// A warp to a row of the bias.
template <class S>
PYATTN_KERNEL(kMaskThreads)
bias_rows(const __grid_constant__ ForwardParams p) {
  const BiasRows rows(p);
  const int64_t at = block_index() * kMaskWarps + warp();
  if (at >= rows.count()) return;
  const BiasView& bias = p.score.bias;
  const int64_t offset = rows.offset(bias, at);
  int64_t begin = p.seqlen_k, end = 0, count = 0;
  with_elements<S>(bias, [&](const auto* elements) {
    for (int64_t j = lane(); j < p.seqlen_k; j += kWarpLanes)
      if (allows(elements[offset + j * bias.stride_k])) begin = min(begin, j), end = j + 1, ++count;
  });
#pragma unroll
  for (int lanes = kWarpLanes / 2; lanes; lanes /= 2)
    begin = min(begin, shuffle_xor(begin, lanes)), end = max(end, shuffle_xor(end, lanes));
  count = sum_lanes(count);
  if (lane() == 0) p.mask.bias_rows[at] = count ? RowKeys{begin, end, count < end - begin} : RowKeys{0, 0, false};
}

// A thread to a block of rows.
template <class S>
PYATTN_KERNEL(kMaskThreads)
mask_blocks(const __grid_constant__ ForwardParams p) {
  const int64_t at = block_index() * kMaskThreads + thread_index(), count = Mask::count_blocks(p);
  if (at >= count || !p.batch) return;
  const int64_t blocks = count / (p.num_heads_kv * (is_packed(p) ? 1 : p.batch));
  int64_t number = at / blocks, n = at % blocks;
  if (is_packed(p)) {
    const auto first = [&](int64_t b) { return Mask::first_block_of(p.packed.sequences[b].first_q, group_size(p), b); };
    const int64_t b = last_that(p.batch, [&](int64_t b) { return first(b) <= n; });
    number += b * p.num_heads_kv, n -= first(b);
  }
  const Head head(p, number);
  const int64_t r0 = n * kBlockRows;
  if (r0 < head.count) p.mask.blocks[at] = Mask(p, head).summary_of<S>(r0, min(kBlockRows, head.count - r0));
}

}  // namespace
}  // namespace pyattn::cuda
