// Forward: a thread block takes kRows query rows of a KV head, loops over the keys that these
// rows see, and applies online softmax (Dao 2023, algorithm 1). While one product runs, the
// keys or values of the next one are prefetched.
#pragma once

#include <type_traits>

#include "cuda/plan/work.h"
#include "cuda/tiles/dropout.h"
#include "cuda/plan/forward_splits.h"
#include "cuda/products/fragment.h"
#include "cuda/ptx/primitives.h"
#include "cuda/products/product.h"
#include "cuda/products/team.h"
#include "cuda/tiles/score.h"
#include "cuda/tiles/softmax.h"
#include "cuda/products/matrix.h"
#include "cuda/tiles/tile_mask.h"
#include "shared/mask.h"

namespace pyattn::cuda {
namespace {

// A head whose keys are split has few rows. A warp takes one tile of rows, so its registers have room for more keys.
template <class S, int kDim, bool kSplit>
using ForwardRows = std::conditional_t<kSplit, RowShape<S, kDim, Team::kWarp, 1>, RowShape<S, kDim, kTeamOf<S, kDim>>>;

// The head dimensions that have kernels, the columns of the tables below.
inline constexpr int kForwardDims[] = {32, 64, 96, 128, 192, 256};

// The keys of a tile: S takes kM * keys / 2 registers of a lane.
inline constexpr int kForwardKeys[][6] = {
    {64, 64, 64, 48, 64, 64},  // 16 bits, Plain
    {64, 64, 64, 64, 64, 64},  //          Plain, splits
    {32, 32, 32, 16, 32, 32},  //          General
    {64, 64, 64, 64, 32, 32},  //          General, splits
    {64, 64, 32, 32, 32, 32},  // float,   Plain
    {64, 64, 32, 32, 32, 32},  //          Plain, splits
    {32, 32, 32, 32, 32, 32},  //          General
    {32, 32, 32, 32, 32, 32},  //          General, splits
};

// Blocks per multiprocessor; 0 lets ptxas choose. For float with general scores or splits, its choice would spill. So
// would one more block than here: 104 bytes for float at 32 columns, 220 and 144 for splits of 16 bits at 64 and 128.
inline constexpr int kForwardBlocks[][6] = {
    {0, 0, 0, 0, 0, 0},  // 16 bits, Plain
    {0, 3, 0, 2, 0, 0},  //          Plain, splits
    {0, 0, 0, 0, 0, 0},  //          General
    {0, 0, 0, 0, 0, 0},  //          General, splits
    {3, 0, 0, 0, 0, 0},  // float,   Plain
    {2, 2, 2, 2, 2, 2},  //          Plain, splits
    {2, 2, 2, 2, 2, 2},  //          General
    {2, 2, 2, 2, 2, 2},  //          General, splits
};

constexpr int column_of(int dim) {
  int column = 0;
  while (kForwardDims[column] != dim) ++column;
  return column;
}

template <class S, int kDim, class Score, bool kSplit>
struct ForwardShape : ForwardRows<S, kDim, kSplit> {
  using typename ForwardRows<S, kDim, kSplit>::QTile;
  static constexpr int kKind = 4 * (sizeof(S) == 4) + 2 * Score::kGeneral + kSplit;
  static constexpr bool kTogether = ForwardShape::kTeam == Team::kWarpgroup;
  static constexpr int kKeys = kTogether ? 64 : kForwardKeys[kKind][column_of(kDim)];
  static constexpr int kBlocks = kTogether ? 1 : kForwardBlocks[kKind][column_of(kDim)];
  static_assert(!kSplit || (kSplitStep % kKeys == 0 && ForwardShape::kRows <= kSplitRows));
  using KTile = SharedMatrix<S, kKeys, kDim>;
  using Dropout = DropoutTile<ForwardShape::kRows, kKeys>;
  static constexpr int kFlags = QTile::kBytes + 2 * KTile::kBytes, kKept = kFlags + kKeys;
  static constexpr int kBytes = kKept + Dropout::kBytes;
  static_assert(kBytes <= kSharedBytes);

  struct Memory {
    QTile Q;          // [kRows][kDim]
    KTile K, V;       // [kKeys][kDim]
    char* flags;      // [kKeys]: rows of V that are not finite
    Dropout dropout;  // [kRows][kKeys]

    PYATTN_DEVICE Memory(const ForwardParams& p, char* memory)
        : Q{memory},
          K{memory + QTile::kBytes},
          V{memory + QTile::kBytes + KTile::kBytes},
          flags(memory + kFlags),
          dropout(p, memory + kKept) {}
  };
};

// Returns the keys that a thread block runs over: all that its rows see or, with kSplit, the part of them in its split.
// With kSplit, the run begins at a multiple of kKeys.
template <bool kSplit, int kKeys>
PYATTN_DEVICE Run keys_of_block(const Mask& mask, int r0, int rows) {
  Run run = keys_of_rows(mask, r0, rows);
  if constexpr (kSplit) {
    const Range split = Splits(mask.head).keys_of(block_index_y());
    run.begin = static_cast<int>(max(round_down(run.begin, kKeys), split.begin));
    run.end = static_cast<int>(min(run.end, split.end));
  }
  return run;
}

// kSplit: a block takes one split of the keys (forward_splits.h) and stores partial O and row statistics, which
// merge_splits combines.
template <class S, int kDim, class Score, bool kSplit, class Shape = ForwardShape<S, kDim, Score, kSplit>>
PYATTN_KERNEL(Shape::kThreads, Shape::kBlocks)
forward(const __grid_constant__ ForwardParams p) {
  constexpr int kM = Shape::kM, kKeys = Shape::kKeys, kRows = Shape::kRows;
  constexpr Layout kLayout = Layout::kQueriesByKeys;
  const RowBlock<kRows> block(p);
  if (block.empty()) return;
  if (!has_keys<kSplit>(Mask(p, block.head))) return;
  const int r0 = block.first();
  const Run keys = keys_of_block<kSplit, kKeys>(Mask(p, block.head), r0, block.rows());
  const int warp_row = warp() / Shape::kParts * 16 * kM;
  const bool idle = kSplit && warp_row >= block.rows();  // the warp has no rows
  const int part = warp() % Shape::kParts;
  const typename Shape::Memory shared(p, shared_memory());
  const Score score(p);

  const KeyRows<S> K(block.head, p.k, p.head_dim), V(block.head, p.v, p.head_dim_v);
  if (!keys.empty()) {  // without keys no loop waits for copies, so none may start
    QueryRows<S>(block.head, p.q, p.head_dim).template load<Shape::kThreads>(shared.Q, r0);
    K.template load<Shape::kThreads>(shared.K, keys.begin);
  }
  Sums<kM, Shape::kColumns / 8> O = {};
  SoftmaxState<kM> state;
  for (int n0 = keys.begin, next; n0 < keys.end; n0 = next) {
    wait_for_copies();
    barrier();  // K has arrived, and V is no longer read
    V.template load<Shape::kThreads>(shared.V, n0);
    if (shared.dropout.any()) {
      const RowBlock<kRows> same(p);
      shared.dropout.template draw<Shape::kThreads>(same.head, same.first(), n0);
    }

    Sums<kM, kKeys / 8> P;
    if (!idle) {
      multiply_rows<S, Shape::kTeam>(P, shared.Q, warp_row, shared.K);
      NoDerivative none;
      score.template to_scores<kLayout>(P, none, warp_row, [&] { return mask_of_rows<kRows>(p, n0); });
    }
    wait_for_copies();
    barrier();  // V has arrived, and K is no longer read
    next = skip_keys<kRows, kKeys>(p, keys, n0 + kKeys);
    if (next < keys.end) K.template load<Shape::kThreads>(shared.K, next);

    const bool masked = !keys.sees_all(n0, kKeys);
    if (!idle) {
      if (masked)
        each_hidden<S, kLayout, kM, kKeys / 8>(mask_of_rows<kRows>(p, n0), warp_row,
                                               [&](int m, int n, int i) { P[m][n][i] = kNegInf; });
      state.update(score, P);
      state.rescale(O);
      shared.dropout.template apply<kLayout>(P, warp_row);
    }
    const bool cleared = masked && clear_nonfinite<Shape::kThreads>(shared.V, shared.flags);
    if (idle) continue;
    multiply_sums<S, Shape::kTeam, Shape::kParts>(O, P, shared.V, part);
    if (cleared) poison<S, kLayout>(O, shared.flags, kKeys, mask_of_rows<kRows>(p, n0), warp_row);
  }

  const RowBlock<kRows> same(p);
  const int first = same.first() + warp_row;
  if constexpr (kSplit) {
    const SplitResults results(p, same.head);
    state.leave(results, block_index_y(), first);
    store_sums<float, Shape::kParts>(
        O, part, same.rows() - warp_row, p.head_dim_v, false,
        [&](int i) { return results.out(block_index_y(), first + i); }, [](int, int) { return 1.0f; });
  } else {
    state.template finish<S>(p, Mask(p, same.head), score, first);
    store_sums<S, Shape::kParts>(
        O, part, same.rows() - warp_row, p.head_dim_v, whole_chunks<S>(p.out),
        [&](int i) { return same.head.template row<S>(p.out, first + i); },
        [&](int m, int half) { return state.row_sum[m][half]; });
  }
}

}  // namespace
}  // namespace pyattn::cuda
