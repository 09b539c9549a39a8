// Backward for a relative bias. Most scores of a long sequence take an entry at an end of the table: the pass over
// queries adds these up row by row. The others lie on a few diagonals, whose sums have a separate pass: a thread
// block takes a band of diagonals of a query head and runs down it, computing S and dP a third time. Then each entry
// is the sum over the sequences and heads that share it. Every sum has one order, and is in one thread.
#pragma once

#include "cuda/products/fragment.h"
#include "cuda/passes/backward_tile.h"
#include "cuda/ptx/primitives.h"
#include "cuda/products/product.h"
#include "cuda/tiles/relative_bias.h"
#include "cuda/plan/workspace.h"
#include "shared/mask.h"

namespace pyattn::cuda {
namespace {

// The diagonals, j - i, whose distance is less than the reach, and that the mask's formulas show:
// those of the scores whose entry lies between the ends of the table.
PYATTN_DEVICE Range inner_diagonals(const Mask& mask) {
  const Head& head = mask.head;
  const int64_t position = -distance_of(mask.p, head, 0, 0), reach = mask.p.score.reach;
  return {max(max(position - reach + 1, mask.diagonals.begin), 1 - head.seqlen_q),
          min(min(position + reach, mask.diagonals.end), head.seqlen_k)};
}

// Bands of kDiagonals inner diagonals of each sequence and query head: as many for each as any may have.
template <int kDiagonals>
struct Bands {
  int64_t of_head;

  constexpr explicit Bands(const BackwardParams& p)
      : of_head(ceil_div(max(0, min(2 * p.score.reach - 1, p.seqlen_q + p.seqlen_k - 1)), kDiagonals)) {}

  constexpr int64_t count(const BackwardParams& p) const { return p.batch * p.num_heads_q * of_head; }
};

// A band of a query head.
template <int kDiagonals>
struct Band {
  int64_t b, h, number;

  PYATTN_DEVICE Band(const BackwardParams& p, const Bands<kDiagonals>& bands, int64_t at)
      : b(at / bands.of_head / p.num_heads_q), h(at / bands.of_head % p.num_heads_q), number(at % bands.of_head) {}

  PYATTN_DEVICE Range diagonals(const Mask& mask) const {
    const Range all = inner_diagonals(mask);
    const int64_t first = all.begin + number * kDiagonals;
    return {first, min(first + kDiagonals, all.end)};
  }
};

// The queries that have keys on these diagonals.
PYATTN_DEVICE Range queries_on(Range diagonals, const Head& head) {
  return {max(0, 1 - diagonals.end), min(head.seqlen_q, head.seqlen_k - diagonals.begin)};
}

template <class S, int kDim, class Score>
struct BandShape : HeadShape<S, kDim, Score> {
  using Tiles = HeadShape<S, kDim, Score>;
  static constexpr int kDiagonals = 2 * Tiles::kThreads;  // the more, the fewer scores beside the band are computed
  static constexpr int kStride = Tiles::kKeys + 1;        // of rows of dS: neighbouring diagonals hit different banks
  static constexpr int kSums = Tiles::kBytes, kBytes = kSums + Tiles::kRows * kStride * sizeof(float);
  static_assert(kSums % sizeof(float) == 0 && kBytes <= kSharedBytes);
};

template <class S, int kDim, class Score, class Shape = BandShape<S, kDim, Score>>
PYATTN_KERNEL(Shape::kThreads)
backward_relative(const __grid_constant__ BackwardParams p) {
  using Tiles = HeadTiles<S, kDim, Score>;
  constexpr int kM = Shape::kM, kKeys = Shape::kKeys, kRows = Shape::kRows, kThreads = Shape::kThreads;
  constexpr int kOwn = Shape::kDiagonals / kThreads;  // diagonals of a thread
  const Band<Shape::kDiagonals> own(p, Bands<Shape::kDiagonals>(p), block_index());
  const typename Shape::Memory shared(p, shared_memory());
  float* const tile = reinterpret_cast<float*>(shared_memory() + Shape::kSums);  // dS[kRows][kStride]
  const Score score(p);
  Tiles tiles(p, shared, own.b, own.h);
  const Head& head = tiles.mask.head;
  const Range band = own.diagonals(tiles.mask), queries = queries_on(band, head);
  if (band.empty()) return;

  const auto first = static_cast<int>(band.begin), past = static_cast<int>(band.end);
  const auto end = static_cast<int>(queries.end), keys = static_cast<int>(head.seqlen_k);
  float sums[kOwn] = {};
#pragma unroll 1
  for (auto q0 = static_cast<int>(queries.begin); q0 < end; q0 += kRows) {
    const int last = static_cast<int>(min(keys, min(q0 + kRows, end) - 1 + past));
    tiles.begin_rows(q0);
#pragma unroll 1
    for (int n0 = static_cast<int>(round_down(max(0, q0 + first), kDrawKeys)); n0 < last; n0 += kKeys) {
      const bool seen = tiles.visit(score, n0, [&](const auto& dS) {
        if (warp() % Shape::kParts != 0) return;
        each_sum<kM, kKeys / 8>([&](int m, int n, int i, int row, int key) {
          tile[(Tiles::warp_row() + row) * Shape::kStride + key] = dS[m][n][i];
        });
      });
      if (!seen) continue;
#pragma unroll
      for (int d = 0; d < kOwn; ++d) {
        const int diagonal = d * kThreads + thread_index();
        const int above = q0 + first - n0 + diagonal;  // the key of the tile's first row
#pragma unroll
        for (int key = 0; key < kKeys; ++key) {
          const int row = key - above;
          if (0 <= row && row < kRows) sums[d] += tile[row * Shape::kStride + key];
        }
      }
    }
  }
  float* const diagonals = diagonals_of<float>(p, head, own.h);
#pragma unroll
  for (int d = 0; d < kOwn; ++d) {
    const int diagonal = first + d * kThreads + thread_index();
    if (diagonal < past) diagonals[diagonal] = sums[d];
  }
}

constexpr int64_t relative_entries(const BackwardParams& p) {
  const ScoreParams& score = p.score;
  const int64_t tables = (score.relative_stride_b ? p.batch : 1) * (score.relative_stride_h ? p.num_heads_q : 1);
  return tables * (2 * score.reach + 1);
}

inline constexpr int kRelativeThreads = 128;

// Adds up each entry's diagonals, and at the ends of the table its rows, in double. One thread per entry.
template <class T>
PYATTN_KERNEL(kRelativeThreads)
sum_relative(const __grid_constant__ BackwardParams p) {
  const int64_t at = block_index() * kRelativeThreads + thread_index(), last = 2 * p.score.reach;
  if (at >= relative_entries(p)) return;
  const int64_t entry = at % (last + 1), table = at / (last + 1), group = group_size(p);
  const bool each_b = p.score.relative_stride_b, each_h = p.score.relative_stride_h;
  const int64_t tables = each_h ? p.num_heads_q : 1, first_b = table / tables, first_h = table % tables;
  double sum = 0;
  for (int64_t h = first_h; h < (each_h ? first_h + 1 : p.num_heads_q); ++h)
    for (int64_t b = first_b; b < (each_b ? first_b + 1 : p.batch); ++b) {
      const Head head(p, b * p.num_heads_kv + h / group);
      const int64_t diagonal = entry - p.score.reach - distance_of(p, head, 0, 0);
      if (inner_diagonals(Mask(p, head)).contains(diagonal)) sum += diagonals_of<T>(p, head, h)[diagonal];
      if (entry == 0) sum += end_sums_of<T>(p, 0)[b * p.num_heads_q + h];
      if (entry == last) sum += end_sums_of<T>(p, 1)[b * p.num_heads_q + h];
    }
  static_cast<T*>(p.drelative)[at] = static_cast<T>(sum);
}

}  // namespace
}  // namespace pyattn::cuda
