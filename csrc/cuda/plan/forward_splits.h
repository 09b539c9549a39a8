// Split-K: where few query rows meet many keys, as in decoding, one thread block per KV head would leave most
// of a GPU idle. The keys are then divided among blocks (flash-decoding, Dao et al. 2023), and merge.h combines
// their partial results. How a head is split depends on its own lengths only, not on the batch or the GPU, so a
// sequence has the same bits alone, in a batch and packed with others, and the host needs no lengths.
#pragma once

#include "cuda/ptx/primitives.h"
#include "shared/mask.h"

namespace pyattn::cuda {
namespace {

// The most query rows of a head whose keys are split: one tile.
inline constexpr int64_t kSplitRows = 64;
// The fewest keys of a split: four tiles. 16k keys of 8 heads then make four blocks for each
// multiprocessor of an H100.
inline constexpr int64_t kSplitKeys = 256;
// The fewest keys of a split for each of its rows: writing and reading the split's float output is
// then at most an eighth of the traffic of its 16-bit keys and values.
inline constexpr int64_t kSplitKeysOfRow = 16;
// The most splits of a head: enough for one head of a large cache to fill a large GPU, though in a nearly
// empty cache most of the blocks have nothing to do.
inline constexpr int64_t kMostSplits = 128;
// Splits begin at multiples of kSplitStep, which every tile's number of keys divides.
inline constexpr int64_t kSplitStep = 64;
// The most query rows of a head that has a kernel for few rows (decode.h): the rows of one product.
inline constexpr int64_t kDecodeRows = 16;

// Whether that kernel takes the splits of a head, and whether it may take some of a call.
constexpr bool decodes(const ForwardParams& p) { return !p.dropout.threshold; }
constexpr bool decodes(const ForwardParams& p, const Head& head) {
  return decodes(p) && 0 < head.count && head.count <= kDecodeRows;
}

// A second round_up: the pass over keys calls the first one, and another step in any call of that stops nvcc 13 from
// folding the step into a constant.
constexpr int64_t whole(int64_t a, int64_t step) { return ceil_div(a, step) * step; }

// Split s of a head has the keys [s * keys, (s + 1) * keys). count 1: the head is not split.
struct Splits {
  int64_t keys, count;

  constexpr Splits(int64_t rows, int64_t seqlen_k)
      : keys(whole(max(max(kSplitKeys, kSplitKeysOfRow * rows), ceil_div(seqlen_k, kMostSplits)), kSplitStep)),
        count(rows > kSplitRows ? 1 : divide(seqlen_k + keys - 1, keys)) {}
  constexpr explicit Splits(const Head& head) : Splits(head.count, head.seqlen_k) {}

  constexpr Range keys_of(int64_t s) const { return {s * keys, (s + 1) * keys}; }

  // The splits with keys that some row of the head sees; none if it is not split.
  constexpr Range used(const Mask& mask) const {
    if (count <= 1) return {0, 0};
    const Range any = mask.keys_of_any(0, mask.head.count);
    return any.empty() ? Range{0, 0} : Range{divide(any.begin, keys), divide(any.end - 1, keys) + 1};
  }
};

// The params for heads that are split. For packed sequences, seqlen_q is at most the longest of those.
constexpr ForwardParams with_few_rows(const ForwardParams& p) {
  ForwardParams few = p;
  if (is_packed(p)) few.seqlen_q = min(p.seqlen_q, kSplitRows / max(group_size(p), 1));
  return few;
}

// The largest number of splits of any head.
constexpr int64_t most_splits(const ForwardParams& few) {
  if (is_packed(few)) return few.seqlen_q ? min(ceil_div(few.seqlen_k, kSplitKeys), kMostSplits) : 1;
  return Splits(most_rows(few), few.seqlen_k).count;
}

// Whether a thread block, with all keys or with a split of them, has work on this head.
template <bool kSplit>
PYATTN_DEVICE bool has_keys(const Mask& mask) {
  if constexpr (kSplit)
    return !(PYATTN_PACKED && decodes(mask.p, mask.head)) && Splits(mask.head).used(mask).contains(block_index_y());
  return !PYATTN_PACKED || Splits(mask.head).count <= 1;
}

struct SplitRow {
  float row_max, row_sum;
};

// The partial results of splits in params.workspace: O[row][column], not yet divided by the row's sum, in
// rows of whole vectors, then stats[row]. The rows of a head are ordered by split.
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

  // The columns of a row of O.
  static constexpr int64_t columns(const ForwardParams& few) { return whole(few.head_dim_v, kVector); }

  static constexpr int64_t bytes(const ForwardParams& few) {
    return most_splits(few) <= 1 ? 0 : count(few) * (columns(few) * sizeof(float) + sizeof(SplitRow));
  }

  // The most rows that the splits of packed sequences with `keys` keys in all can take. A sequence that is split has
  // more keys than one split, so:
  //
  //   rows * count < 2 * rows * seqlen_k / split      split = Splits::keys >= max(kSplitKeys, kSplitKeysOfRow * rows)
  static constexpr int64_t room(int64_t most_rows, int64_t keys) {
    return 2 * keys * min(most_rows, kSplitKeys / kSplitKeysOfRow) / kSplitKeys;
  }

 private:
  static constexpr int64_t room(const ForwardParams& few, int64_t keys) { return room(most_rows(few), keys); }
  static constexpr int64_t count(const ForwardParams& few) {
    return few.num_heads_kv *
           (is_packed(few) ? room(few, few.packed.total_k) : few.batch * most_rows(few) * most_splits(few));
  }
};

}  // namespace
}  // namespace pyattn::cuda
