// Splits: one block of threads to a KV head leaves most of a GPU idle where few query rows meet many keys,
// as in decoding. The keys are then divided among blocks (flash-decoding, Dao et al. 2023), and merge.h
// combines what they leave. A head's own lengths say how, neither the batch nor the GPU, so that a sequence
// has the same bits alone, in a batch and packed with others, and the host needs no length.
#pragma once

#include "cuda/primitives.h"
#include "shared/mask.h"

namespace pyattn::cuda {
namespace {

// Query rows of a head whose keys are split, at most: a tile of them.
inline constexpr int64_t kSplitRows = 64;
// Keys of a split, at least: four tiles, so that 16k keys of 8 heads make four blocks for each
// multiprocessor of an H100.
inline constexpr int64_t kSplitKeys = 256;
// Keys for each row, at least: the float output of a split is then an eighth of its 16-bit keys and
// values, written and read.
inline constexpr int64_t kSplitKeysOfRow = 16;
// Splits of a head, at most: one head of a large cache fills a large GPU, and most blocks of a cache that
// is nearly empty have nothing to do.
inline constexpr int64_t kMostSplits = 128;
// Splits begin at multiples of it, which every tile of keys divides.
inline constexpr int64_t kSplitStep = 64;

// round_up, which the pass over keys calls with one step alone: with a second one nvcc 13 no longer knows that step
// where it inlines the other call.
constexpr int64_t whole(int64_t a, int64_t step) { return ceil_div(a, step) * step; }

// The keys [s * keys, (s + 1) * keys) are split s of a head; count 1: the head is not split.
struct Splits {
  int64_t keys, count;

  constexpr Splits(int64_t rows, int64_t seqlen_k)
      : keys(whole(max(max(kSplitKeys, kSplitKeysOfRow * rows), ceil_div(seqlen_k, kMostSplits)), kSplitStep)),
        count(rows > kSplitRows ? 1 : ceil_div(seqlen_k, keys)) {}
  constexpr explicit Splits(const Head& head) : Splits(head.count, head.seqlen_k) {}

  constexpr Range keys_of(int64_t s) const { return {s * keys, (s + 1) * keys}; }

  // The splits with keys that some row of the head sees; none if it is not split.
  constexpr Range used(const Mask& mask) const {
    if (count <= 1) return {0, 0};
    const Range any = mask.keys_of_any(0, mask.head.count);
    return any.empty() ? Range{0, 0} : Range{divide(any.begin, keys), divide(any.end - 1, keys) + 1};
  }
};

// The params for heads that are split: packed, for sequences with few query rows.
constexpr ForwardParams with_few_rows(const ForwardParams& p) {
  ForwardParams few = p;
  if (is_packed(p)) few.seqlen_q = min(p.seqlen_q, kSplitRows / max(group_size(p), 1));
  return few;
}

// The most splits of a head.
constexpr int64_t most_splits(const ForwardParams& few) {
  if (is_packed(few)) return few.seqlen_q ? min(ceil_div(few.seqlen_k, kSplitKeys), kMostSplits) : 1;
  return Splits(most_rows(few), few.seqlen_k).count;
}

// Whether a block of threads, of all keys or of a split, has work on this head.
template <bool kSplit>
PYATTN_DEVICE bool has_keys(const Mask& mask) {
  if constexpr (kSplit) return Splits(mask.head).used(mask).contains(block_index_y());
  return !PYATTN_PACKED || Splits(mask.head).count <= 1;
}

struct SplitRow {
  float row_max, row_sum;
};

// What splits leave in params.workspace: O[row][column], not yet divided by the sum, in rows of whole
// vectors, then a SplitRow of each; the rows of a head split by split.
struct SplitResults {
  static constexpr int64_t kVector = 4;  // floats

  float* O;
  SplitRow* stats;
  int64_t cols, rows;  // of O, of the head

  constexpr SplitResults(const ForwardParams& few, const Head& head)
      : O(static_cast<float*>(few.workspace)), stats(nullptr), cols(columns(few)), rows(head.count) {
    stats = static_cast<SplitRow*>(static_cast<void*>(O + count(few) * cols));
    const int64_t first = is_packed(few) ? head.h_kv * room(few, few.packed.total_k) + room(few, head.first_k)
                                         : (head.b * few.num_heads_kv + head.h_kv) * rows * most_splits(few);
    O += first * cols, stats += first;
  }

  constexpr float* out(int64_t split, int64_t r) const { return O + (split * rows + r) * cols; }
  constexpr SplitRow& stats_of(int64_t split, int64_t r) const { return stats[split * rows + r]; }

  static constexpr int64_t bytes(const ForwardParams& few) {
    return most_splits(few) <= 1 ? 0 : count(few) * (columns(few) * sizeof(float) + sizeof(SplitRow));
  }

  // Enough for every packed sequence among so many keys, because seqlen_k > keys where it is split:
  //
  //   rows * count < 2 * rows * seqlen_k / keys      keys >= kSplitKeys, keys >= kSplitKeysOfRow * rows
  static constexpr int64_t room(int64_t most_rows, int64_t keys) {
    return 2 * keys * min(most_rows, kSplitKeys / kSplitKeysOfRow) / kSplitKeys;
  }

 private:
  static constexpr int64_t columns(const ForwardParams& few) { return whole(few.head_dim_v, kVector); }
  static constexpr int64_t room(const ForwardParams& few, int64_t keys) { return room(most_rows(few), keys); }
  static constexpr int64_t count(const ForwardParams& few) {
    return few.num_heads_kv *
           (is_packed(few) ? room(few, few.packed.total_k) : few.batch * most_rows(few) * most_splits(few));
  }
};

}  // namespace
}  // namespace pyattn::cuda
