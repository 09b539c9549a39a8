// Splits: where backward has few heads, or one is dear, the keys of a head are divided among work items,
// and reduce_dq adds up the shares of dQ that they leave.
#pragma once

#include <cstdint>

#include "attention.h"
#include "dropout.h"
#include "heads.h"
#include "mask.h"
#include "matrix.h"
#include "pack.h"
#include "scratch.h"
#include "simd.h"
#include "stopwatch.h"
#include "strips.h"
#include "units.h"

namespace pyattn::PYATTN_ISA {
namespace {

static_assert(kBackwardBlockK % kDrawKeys == 0);

// What the keys before the given one cost in backward, in units of its own: rows of each key block that
// they see, or pairs.
int64_t cost_before(const Mask& mask, int64_t key) {
  if (mask.p.mask.blocks) return mask.pairs_before(key);
  int64_t rows = 0;
  for (int64_t j = 0; j < key; j += kBackwardBlockK)
    rows += mask.rows_of_any(j, min(kBackwardBlockK, mask.head.seqlen_k - j)).count();
  return rows;
}

// The first key of split s. Splits are whole key blocks, of about equal cost.
int64_t split_begin(const Mask& mask, int64_t s, int64_t splits) {
  const int64_t seqlen_k = mask.head.seqlen_k, total = cost_before(mask, seqlen_k);
  int64_t low = 0, high = s == 0 ? 0 : ceil_div(seqlen_k, kBackwardBlockK);  // the key block lies between
  while (s < splits && low < high) {
    const int64_t middle = (low + high) / 2;
    if (cost_before(mask, middle * kBackwardBlockK) * splits < total * s)
      low = middle + 1;
    else
      high = middle;
  }
  return min(high * kBackwardBlockK, seqlen_k);
}

// The largest number of keys of a work item.
int64_t longest_split(const BackwardParams& p) {
  int64_t longest = 0;
  for (int64_t i = 0; i < p.batch * p.num_heads_kv; ++i) {
    const Head head(p, i);
    const int64_t splits = key_splits(p, head.seqlen_q, head.seqlen_k);
    if (splits == 1) {
      longest = max(longest, head.seqlen_k);
      continue;
    }
    const Mask mask(p, head);
    for (int64_t s = 0, begin = 0; s < splits; ++s) {
      const int64_t end = split_begin(mask, s + 1, splits);
      longest = max(longest, end - begin), begin = end;
    }
  }
  return longest;
}

// The shares of dQ that the splits of a head leave in the workspace, [splits][rows][cols], and for each
// super-block of rows whether a share has them: some row sees a key of the split. A head that is not
// split has none.
template <class S>
class DqShares {
  using T = Compute<S>;

 public:
  DqShares(const BackwardParams& p, const Head& head)
      : rows_(head.count),
        cols_(columns(p)),
        super_blocks_(ceil_div(rows_, kSuperBlock)),
        first_(static_cast<T*>(p.workspace) + first_unit_of<S>(p, Unit::kShareRows, head) * cols_),
        has_(static_cast<char*>(p.workspace) + bytes_of_rows(p) + first_unit_of<S>(p, Unit::kShareBlocks, head)) {}

  // The shares of all heads.
  static int64_t bytes(const BackwardParams& p) {
    return round_up(bytes_of_rows(p) + work_of<S>(p, Unit::kShareBlocks).count(), kScratchAlign);
  }

  // A share from row r0 on.
  Matrix<T> from(int64_t split, int64_t r0) const { return {first_ + (split * rows_ + r0) * cols_, cols_}; }

  char& has(int64_t split, int64_t r0) const { return has_[split * super_blocks_ + r0 / kSuperBlock]; }

 private:
  int64_t rows_, cols_, super_blocks_;
  T* first_;
  char* has_;

  static int64_t columns(const BackwardParams& p) { return round_up(p.head_dim, kLanes<T>); }
  static int64_t bytes_of_rows(const BackwardParams& p) {
    return work_of<S>(p, Unit::kShareRows).count() * columns(p) * static_cast<int64_t>(sizeof(T));
  }
};

// Behind them, a split's shares of the gradients of slopes, one for each query head of its group.
template <class S>
double* slope_shares(const BackwardParams& p, const Head& head, int64_t split) {
  char* shares = static_cast<char*>(p.workspace) + DqShares<S>::bytes(p);
  return reinterpret_cast<double*>(shares) + (first_unit_of<S>(p, Unit::kSplits, head) + split) * head.group;
}

template <class S>
Plan plan_reduce_dq(const BackwardParams& p) {
  return {work_of<S>(p, Unit::kReduced).count(), 0, 0};
}

// Adds up the splits' shares of dQ, in their order, in the first one. Work items: blocks of query rows
// of each KV head that is split.
template <class S, template <class> class Score>
void reduce_dq(const BackwardParams& p, int64_t begin, int64_t end, void*) {
  using T = Compute<S>;
  const Work work = work_of<S>(p, Unit::kReduced);
  const Score<S> score(p);
  Stopwatch watch(p.counts);
  for (int64_t item = begin; item < end; ++item) {
    const Place place = work.at(item);
    const Head head(p, place.head);
    const DqShares<S> shares(p, head);
    const int64_t splits = key_splits(p, head.seqlen_q, head.seqlen_k);
    const int64_t r0 = place.n * kBlockQ<T>, rows = min(kBlockQ<T>, head.count - r0);
    int64_t first = 0;
    while (first < splits && !shares.has(first, r0)) ++first;
    const Matrix<T> sum = shares.from(min(first, splits - 1), r0);
    if (first == splits) fill_zero(sum.data, rows * sum.row);
    for (int64_t split = first + 1; split < splits; ++split)
      for (int64_t i = 0; shares.has(split, r0) && i < rows * sum.row; i += kLanes<T>)
        store(sum.data + i, load(sum.data + i) + load(shares.from(split, r0).data + i));
    unpack_rows<S>(Matrix<const T>(sum), rows, p.head_dim, score.dscale,
                   [&](int64_t i) { return head.row<S>(p.dq, r0 + i); });
  }
  watch.lap(Phase::kStore);
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
