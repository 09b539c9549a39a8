// What a block of threads works on: a tile of query rows, or of keys, of one KV head.
#pragma once

#include "cuda/primitives.h"
#include "cuda/tile.h"
#include "shared/heads.h"

namespace pyattn::cuda {
namespace {

// Shared memory that every architecture from 8.0 on gives a block.
inline constexpr int kSharedBytes = 99 * 1024;

// How the four warps of a block share query rows. A lane has 255 registers, of which it
// needs about 60 for other things than sums. With kM = 2 a warp has 32 rows and reads each
// fragment of K and V once for two products, which the shared memory of an A100 keeps up
// with; 16-bit rows of 128 columns then take 128 registers of output. Where they would take
// more, kM is 1, and the columns of wide float rows are divided between two warps.
template <class S, int kDim, int kWarpTiles = sizeof(S) == 2 && kDim <= 128 ? 2 : 1>
struct RowShape {
  static constexpr int kM = kWarpTiles;
  static constexpr int kParts = sizeof(S) == 4 && kDim > 128 ? 2 : 1, kColumns = kDim / kParts;
  static constexpr int kWarps = 4, kThreads = kWarps * kWarpLanes;
  static constexpr int kRows = 16 * kM * kWarps / kParts;
  using QTile = Tile<S, kRows, kDim>;
};

PYATTN_DEVICE unsigned opaque_group(const ForwardParams& p) {
  return opaque(static_cast<unsigned>(p.num_heads_q)) / static_cast<unsigned>(p.num_heads_kv);
}

// kRows query rows of a head, its last ones first: under a causal mask they see most keys.
// Kernels construct it again where they need it again: what it divides is opaque to the
// compiler, for registers are scarcer than divisions.
template <int kRows>
struct RowBlock {
  unsigned number, group, blocks;
  Head head;

  PYATTN_DEVICE explicit RowBlock(const ForwardParams& p)
      : number(opaque(static_cast<unsigned>(block_index()))),
        group(opaque_group(p)),
        blocks(static_cast<unsigned>(ceil_div(p.seqlen_q * group, kRows))),
        head(p, number / blocks, group) {}

  PYATTN_DEVICE int first() const { return static_cast<int>(blocks - 1 - number % blocks) * kRows; }
  PYATTN_DEVICE int rows() const { return static_cast<int>(min(kRows, head.count - first())); }

  // Packed sequences have as many blocks as the longest may have; those that a sequence does not fill leave at once.
  PYATTN_DEVICE bool empty() const { return PYATTN_PACKED && first() >= head.count; }
};

// kKeys keys of a head, its first ones first: under a causal mask most rows see them.
template <int kKeys>
struct KeyBlock {
  unsigned number, blocks;
  Head head;

  PYATTN_DEVICE explicit KeyBlock(const ForwardParams& p)
      : number(opaque(static_cast<unsigned>(block_index()))),
        blocks(static_cast<unsigned>(ceil_div(opaque(static_cast<unsigned>(p.seqlen_k)), kKeys))),
        head(p, number / blocks, opaque_group(p)) {}

  PYATTN_DEVICE int first() const { return static_cast<int>(number % blocks) * kKeys; }
  PYATTN_DEVICE int keys() const { return static_cast<int>(min(kKeys, head.seqlen_k - first())); }
  PYATTN_DEVICE bool empty() const { return PYATTN_PACKED && first() >= head.seqlen_k; }
};

// The keys, or values, of a head.
template <class S>
struct KeyRows {
  const View& view;
  const S* first;
  int count, cols;

  PYATTN_DEVICE KeyRows(const Head& head, const View& view, int64_t cols)
      : view(view),
        first(head.key<const S>(view, 0)),
        count(static_cast<int>(head.seqlen_k)),
        cols(static_cast<int>(cols)) {}

  // Begins to copy those from n0 on.
  template <int kThreads, int kRows, int kCols>
  PYATTN_DEVICE void load(Tile<S, kRows, kCols> tile, int n0) const {
    load_tile<kThreads>(tile, count - n0, cols, whole_chunks<S>(view),
                        [&](int j) { return first + (n0 + j) * view.stride_s; });
  }
};

// The query rows of a head: what Head::row says, in fewer registers.
template <class S>
struct QueryRows {
  const View& view;
  const S* first;
  unsigned group;
  int count, cols;

  PYATTN_DEVICE QueryRows(const Head& head, const View& view, int64_t cols)
      : view(view),
        first(head.row<const S>(view, 0)),
        group(static_cast<unsigned>(head.group)),
        count(static_cast<int>(head.count)),
        cols(static_cast<int>(cols)) {}

  // The rows of one query head of the group.
  PYATTN_DEVICE QueryRows(const Head& head, const View& view, int64_t cols, int member)
      : view(view),
        first(head.row<const S>(view, member)),
        group(1),
        count(static_cast<int>(head.seqlen_q)),
        cols(static_cast<int>(cols)) {}

  // Begins to copy those from r0 on.
  template <int kThreads, int kRows, int kCols>
  PYATTN_DEVICE void load(Tile<S, kRows, kCols> tile, int r0) const {
    load_tile<kThreads>(tile, count - r0, cols, whole_chunks<S>(view), [&](int i) {
      const unsigned r = r0 + i, query = group == 1 ? r : r / group;
      return first + query * view.stride_s + (r - query * group) * view.stride_h;
    });
  }
};

}  // namespace
}  // namespace pyattn::cuda
