// The passes before all others where key ranges, a bool mask or a bias are given: the keys that a tensor shows
// each of its rows, and those that each block of query rows sees. The host does not read device memory, so
// later passes find them through params.
#pragma once

#include "cuda/products/fragment.h"
#include "cuda/ptx/primitives.h"
#include "shared/mask.h"

namespace pyattn::cuda {
namespace {

inline constexpr int kMaskWarps = 4, kMaskThreads = kMaskWarps * kWarpLanes;

constexpr int64_t mask_blocks_count(const ForwardParams& p) { return needs_blocks(p) ? Mask::count_blocks(p) : 0; }

// The rows of all tensors that hide keys.
constexpr int64_t mask_rows_count(const ForwardParams& p) {
  int64_t count = 0;
  each_mask_tensor(p, [&](const auto& view, const RowKeys*) { count += OwnRows(p, view).count(); });
  return count;
}

// The bytes that the two passes write at the beginning of params.workspace: the blocks, then each tensor's rows.
constexpr int64_t mask_bytes(const ForwardParams& p) {
  constexpr int64_t kAlignment = 16;  // of what comes after
  return round_up(mask_blocks_count(p) * sizeof(BlockKeys) + mask_rows_count(p) * sizeof(RowKeys), kAlignment);
}

constexpr void place_mask(ForwardParams& p) {
  p.mask.blocks = static_cast<BlockKeys*>(p.workspace);
  auto* next = static_cast<RowKeys*>(static_cast<void*>(p.mask.blocks + mask_blocks_count(p)));
  each_mask_tensor(p, [&](const auto& view, RowKeys*& rows) { rows = next, next += OwnRows(p, view).count(); });
  p.workspace = static_cast<char*>(p.workspace) + mask_bytes(p);
}

// One warp per row of a tensor that hides keys.
template <class S>
PYATTN_KERNEL(kMaskThreads)
mask_rows(const __grid_constant__ ForwardParams p) {
  int64_t at = block_index() * kMaskWarps + warp();
  each_mask_tensor(p, [&](const auto& view, RowKeys* rows) {
    const OwnRows own(p, view);
    const int64_t row = at;
    at -= own.count();
    if (row < 0 || at >= 0) return;
    const Range keys = keys_to_scan(p, own, row);
    int64_t begin = p.seqlen_k, end = 0, count = 0;
    with_elements<S>(view, [&](const auto* elements) {
      elements += own.offset(view, row);
      for (int64_t j = keys.begin + lane(); j < keys.end; j += kWarpLanes)
        if (allows(elements[j * view.stride_k])) begin = min(begin, j), end = j + 1, ++count;
    });
#pragma unroll
    for (int lanes = kWarpLanes / 2; lanes; lanes /= 2)
      begin = min(begin, shuffle_xor(begin, lanes)), end = max(end, shuffle_xor(end, lanes));
    count = sum_lanes(count);
    if (lane() == 0) rows[row] = count ? RowKeys{begin, end, count < end - begin} : RowKeys{0, 0, false};
  });
}

// One thread per block of rows.
template <class S>
PYATTN_KERNEL(kMaskThreads, 1)
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
  if (r0 < head.count) Mask(p, head).summarize<S>(r0, min(kBlockRows, head.count - r0));
}

}  // namespace
}  // namespace pyattn::cuda
