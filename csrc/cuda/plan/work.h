// The work of a thread block: a tile of query rows, or of keys, of one KV head.
#pragma once

#include "cuda/ptx/primitives.h"
#include "cuda/products/matrix.h"
#include "shared/heads.h"

namespace pyattn::cuda {
namespace {

// The shared memory that a block can have: on every architecture from 8.0 on, or on 9.0.
inline constexpr int kSharedBytes = (PYATTN_WARPGROUPS ? 227 : 99) * 1024;

// The head dimensions that warpgroups multiply, in kernels for compute capability 9.0. Wider sums would not fit the registers.
template <class S, int kDim>
inline constexpr Team kTeamOf =
    PYATTN_WARPGROUPS && sizeof(S) == 2 && (kDim == 64 || kDim == 128) ? Team::kWarpgroup : Team::kWarp;

// How the four warps of a block share query rows. A lane has 255 registers, and needs
// about 60 of them for other things than sums. With kM = 2, a warp has 32 rows and reads each
// fragment of K and V once for two products, and the shared memory of an A100 keeps up; the
// output of 16-bit rows of 128 columns then takes 128 registers. If it would take more, kM
// is 1, and two warps share the columns of wide float rows.
//
// A warpgroup has 64 rows, 16 a warp, and a block two of them: one computes weights while tensor cores multiply for the other.
template <class S, int kDim, Team kTeamOfRows = Team::kWarp, int kWarpTiles = sizeof(S) == 2 && kDim <= 128 ? 2 : 1>
struct RowShape {
  static constexpr Team kTeam = kTeamOfRows;
  static constexpr int kM = kTeam == Team::kWarpgroup ? 1 : kWarpTiles;
  static constexpr int kParts = sizeof(S) == 4 && kDim > 128 ? 2 : 1, kColumns = kDim / kParts;
  static constexpr int kWarps = kTeam == Team::kWarpgroup ? 8 : 4, kThreads = kWarps * kWarpLanes;
  static constexpr int kRows = 16 * kM * kWarps / kParts;
  using QTile = SharedMatrix<S, kRows, kDim>;
};

PYATTN_DEVICE unsigned opaque_group(const ForwardParams& p) {
  return opaque(static_cast<unsigned>(p.num_heads_q)) / static_cast<unsigned>(p.num_heads_kv);
}

// kRows query rows of a head, the last ones first: under a causal mask they see the most keys.
// Kernels rebuild it on use, from operands that are opaque to the compiler: recomputing a
// division is cheaper than holding a register.
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

  // Each packed sequence has as many blocks as the longest may have; those past its end exit at once.
  PYATTN_DEVICE bool empty() const { return PYATTN_PACKED && first() >= head.count; }
};

// kKeys keys of a head, the first ones first: under a causal mask the most rows see them.
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

  // Starts to copy those from n0 on.
  template <int kThreads, int kRows, int kCols>
  PYATTN_DEVICE void load(SharedMatrix<S, kRows, kCols> tile, int n0) const {
    load_tile<kThreads>(tile, count - n0, cols, whole_chunks<S>(view), first + n0 * view.stride_s, view.stride_s);
  }
};

// The query rows of a head: Head::row in fewer registers.
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

  // Starts to copy those from r0 on.
  template <int kThreads, int kRows, int kCols>
  PYATTN_DEVICE void load(SharedMatrix<S, kRows, kCols> tile, int r0) const {
    if (group == 1)
      return load_tile<kThreads>(tile, count - r0, cols, whole_chunks<S>(view), first + r0 * view.stride_s,
                                 view.stride_s);
    load_tile<kThreads>(tile, count - r0, cols, whole_chunks<S>(view), [&](int i) {
      const unsigned r = r0 + i, query = r / group;
      return first + query * view.stride_s + (r - query * group) * view.stride_h;
    });
  }
};

}  // namespace
}  // namespace pyattn::cuda
