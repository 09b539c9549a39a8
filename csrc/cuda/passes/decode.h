// Decoding: forward of a head with at most 16 query rows, such as one token of a group of query heads, over one split of its keys
// (forward_splits.h). Each warp takes every fourth 16 keys by itself; the block then combines its warps' partial results.
#pragma once

#include "cuda/passes/forward.h"
#include "cuda/plan/forward_splits.h"
#include "cuda/products/direct.h"
#include "cuda/products/product.h"
#include "cuda/ptx/primitives.h"
#include "cuda/tiles/score.h"
#include "cuda/tiles/softmax.h"
#include "cuda/tiles/tile_mask.h"
#include "shared/mask.h"

namespace pyattn::cuda {
namespace {

template <class S, int kDim>
struct DecodeShape {
  static constexpr int kKeys = 16, kWarps = 4, kThreads = kWarps * kWarpLanes, kStep = kWarps * kKeys;
  static constexpr int kQBytes = kDecodeRows * kDim * sizeof(S), kStats = kQBytes;
  static constexpr int kO = kStats + kWarps * kDecodeRows * sizeof(SplitRow);
  static constexpr int kBytes = kO + kWarps * kDecodeRows * kDim * sizeof(float);
  // Blocks per multiprocessor; 0 lets ptxas choose, which would spill up to 236 bytes for one block more than here.
  static constexpr int kBlocks = kDim == 256 ? 1 : kDim == 64 && sizeof(S) == 2 ? 3 : 0;
  using Part = Piece<S, kDim>;
  static_assert(kSplitStep % kStep == 0 && kBytes <= 99 * 1024);

  struct Memory {
    char* q;          // chunks of two rows of each lane, as its warps multiply them
    SplitRow* stats;  // [kWarps][kDecodeRows]
    float* O;         // [kWarps][kDecodeRows][kDim]

    PYATTN_DEVICE explicit Memory(char* memory)
        : q(memory), stats(reinterpret_cast<SplitRow*>(memory + kStats)), O(reinterpret_cast<float*>(memory + kO)) {}

    PYATTN_DEVICE char* chunk(int j, int half) const {
      return q + ((2 * j + half) * kWarpLanes + lane()) * kChunkBytes;
    }
  };
};

// The mask of this block's rows on the keys from n0 on. The head is built again on use, as RowBlock is.
PYATTN_DEVICE TileMask mask_of_decoding(const ForwardParams& p, int n0) {
  const Head same(p, opaque(static_cast<unsigned>(block_index())), opaque_group(p));
  return {Mask(p, same), 0, n0, static_cast<int>(same.count)};
}

// Stores the queries in the lanes' order. The lanes of all warps have the same chunks, so each warp stores a part of them.
template <class S, int kDim>
PYATTN_DEVICE void store_queries(const ForwardParams& p, const Head& head,
                                 const typename DecodeShape<S, kDim>::Memory& to) {
  using Part = Piece<S, kDim>;
  constexpr int kOfLane = Part::kChunks / 4, kOfWarp = Part::kCount * kOfLane * 2 / DecodeShape<S, kDim>::kWarps;
#pragma unroll
  for (int i = 0; i < kOfWarp; ++i) {
    const int at = warp() * kOfWarp + i, j = at / 2, half = at % 2, r = lane() / 4 + 8 * half;
    Chunk chunk = {};
    if (r < head.count)
      chunk =
          DirectRows<S>(head.row<const S>(p.q, r), p.q, 1, p.head_dim).chunk(0, Part::column(j / kOfLane, j % kOfLane));
    *reinterpret_cast<Chunk*>(to.chunk(j, half)) = chunk;
  }
}

// Combines the warps' results, in their order, to those of the split.
template <class Shape, int kDim, class Score>
PYATTN_DEVICE void combine_warps(const ForwardParams& p, const Score& score, const typename Shape::Memory& shared) {
  const Head same(p, opaque(static_cast<unsigned>(block_index())), opaque_group(p));
  const SplitResults results(p, same);
  const int rows = static_cast<int>(same.count);
#pragma unroll 1
  for (int at = thread_index(); at < rows * kDim; at += Shape::kThreads) {
    const int r = at / kDim, c = at % kDim;
    float most = kNegInf, sum = 0, O = 0;
    for (int w = 0; w < Shape::kWarps; ++w) most = fmaxf(most, shared.stats[w * kDecodeRows + r].row_max);
    const float shift = score.shift(most);
    for (int w = 0; w < Shape::kWarps; ++w) {
      const SplitRow part = shared.stats[w * kDecodeRows + r];
      const float weight = score.exp(part.row_max, shift);
      sum = fmaf(weight, part.row_sum, sum);
      O = fmaf(weight, shared.O[(w * kDecodeRows + r) * kDim + c], O);
    }
    if (c < p.head_dim_v) results.out(block_index_y(), r)[c] = O;
    if (c == 0) results.stats_of(block_index_y(), r) = {most, sum};
  }
}

template <class S, int kDim, class Score, class Shape = DecodeShape<S, kDim>>
PYATTN_KERNEL(Shape::kThreads, Shape::kBlocks)
decode(const __grid_constant__ ForwardParams p) {
  using Part = typename Shape::Part;
  constexpr int kKeys = Shape::kKeys, kOfLane = Part::kChunks / 4;
  constexpr Layout kLayout = Layout::kQueriesByKeys;
  const Head head(p, block_index());
  const Mask mask(p, head);
  if (!decodes(p, head) || !Splits(head).used(mask).contains(block_index_y())) return;
  const int rows = static_cast<int>(head.count);
  const Run keys = keys_of_block<true, Shape::kStep>(mask, 0, rows);
  const typename Shape::Memory shared(shared_memory());
  const Score score(p);
  const DirectRows<S> K(head.key<const S>(p.k, 0), p.k, head.seqlen_k, p.head_dim);
  const DirectRows<S> V(head.key<const S>(p.v, 0), p.v, head.seqlen_k, p.head_dim_v);

  // The first of the warp's keys from n on that summaries do not hide from all rows.
  const auto seen_from = [&](int n) {
    if (p.mask.blocks)
      while (n < keys.end && !seen_by_any(mask_of_decoding(p, n).mask, 0, rows, n, kKeys)) n += Shape::kStep;
    return n;
  };
  int n0 = seen_from(keys.begin + warp() * kKeys);
  // Two pieces are always on their way: once one is multiplied, its registers take the next but one.
  Part pieces[2];
  const auto load = [&](int n, int piece) {
    if (piece < Part::kCount)
      pieces[piece % 2].load_keys(K, n, piece);
    else
      pieces[piece % 2].load_values(V, n, piece - Part::kCount);
  };
  if (n0 < keys.end) load(n0, 0), load(n0, 1);
  store_queries<S, kDim>(p, head, shared);
  barrier();  // the queries are stored

  Sums<1, kDim / 8> O = {};
  SoftmaxState<1> state;
  while (n0 < keys.end) {
    const int next = seen_from(n0 + Shape::kStep);
    const auto load_second = [&](int piece) {  // the one after the next
      if (piece + 2 < 2 * Part::kCount)
        load(n0, piece + 2);
      else if (next < keys.end)
        load(next, piece + 2 - 2 * Part::kCount);
    };
    Sums<1, kKeys / 8> P = {};
#pragma unroll
    for (int piece = 0; piece < Part::kCount; ++piece) {
      const Part& part = pieces[piece % 2];
#pragma unroll
      for (int j = 0; j < kOfLane; ++j) {
        Chunk q[2];
#pragma unroll
        for (int half = 0; half < 2; ++half)
          load_words(q[half].words, shared_address(shared.chunk(piece * kOfLane + j, half)));
#pragma unroll
        for (int s = 0; s < Part::kSlices; ++s) {
          const Left<S> a = left_of<S>(q, s);
#pragma unroll
          for (int n = 0; n < kKeys / 8; ++n) multiply(P[0][n], a, right_of<S>(part.chunks[n * kOfLane + j], s));
        }
      }
      load_second(piece);
    }
    NoDerivative none;
    score.template to_scores<kLayout>(P, none, 0, [&] { return mask_of_decoding(p, n0); });
    const bool masked = !keys.sees_all(n0, kKeys);
    if (masked)
      each_hidden<S, kLayout, 1, kKeys / 8>(mask_of_decoding(p, n0), 0,
                                            [&](int m, int n, int i) { P[m][n][i] = kNegInf; });
    state.update(score, P);
    state.rescale(O);
    const Left<S> weights = as_left<S>(P[0]);
    unsigned bad = 0;  // a bit for each key whose value is not finite
#pragma unroll
    for (int piece = 0; piece < Part::kCount; ++piece) {
      Part& part = pieces[(Part::kCount + piece) % 2];
      if (masked) bad |= part.clear_nonfinite();
#pragma unroll
      for (int j = 0; j < Part::kChunks / 8; ++j)
#pragma unroll
        for (int e = 0; e < Part::kElements; ++e)
          multiply(O[0][(piece * Part::kChunks / 8 + j) * Part::kElements + e], weights,
                   right_of_values<S>(part.chunks + 4 * j, e));
      load_second(Part::kCount + piece);
    }
    if (masked) {
#pragma unroll
      for (int lanes = kWarpLanes / 2; lanes; lanes /= 2) bad |= shuffle_xor(bad, lanes);
      if (bad) poison<S, kLayout>(O, KeyBits{bad}, kKeys, mask_of_decoding(p, n0), 0);
    }
    n0 = next;
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = reduce_row(state.row_sum[0][half], [](float x, float y) { return x + y; });
    const int r = lane() / 4 + 8 * half, at = warp() * kDecodeRows + r;
    if (r >= rows) continue;
    if (lane() % 4 == 0) shared.stats[at] = {state.row_max[0][half], sum};
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int j = n / Part::kElements, first = Part::column_of_value(0, j, lane() % 4 * 2 + i);
        shared.O[at * kDim + first + n % Part::kElements] = O[0][n][2 * half + i];
      }
  }
  barrier();  // the warps' results are stored
  combine_warps<Shape, kDim>(p, score, shared);
}

}  // namespace
}  // namespace pyattn::cuda
