// Shares: the sums that each split of a head leaves in the workspace, which
// the pass reduce adds up in order: dQ where keys are split, dK and dV where
// rows are, and the sums of its query heads. An unsplit head has only the latter.
#pragma once

#include "cpu/plan/units.h"
#include "cpu/products/matrix.h"
#include "cpu/simd/simd.h"
#include "cpu/tiles/relative_bias.h"
#include "shared/heads.h"

namespace pyattn::PYATTN_ISA {
namespace {

template <class S>
class Shares {
  using T = Compute<S>;

 public:
  Shares(const BackwardParams& p, const Head& head)
      : splits(splits_of(p, head.seqlen_q, head.seqlen_k)),
        rows_(head.count),
        keys_(head.seqlen_k),
        cols_k_(columns_k<S>(p)),
        cols_v_(columns_v<S>(p)),
        blocks_(splits.by_rows ? ceil_div(keys_, kBackwardBlockK) : ceil_div(rows_, kSuperBlock)),
        first_(static_cast<T*>(p.workspace) + first_unit_of<S>(p, Unit::kShareColumns, head)),
        has_(static_cast<char*>(p.workspace) + bytes_of_sums(p) + first_unit_of<S>(p, Unit::kShareBlocks, head)) {}

  const Splits splits;

  // Bytes of the shares of all heads.
  static int64_t bytes(const BackwardParams& p) {
    return round_up(bytes_of_sums(p) + work_of<S>(p, Unit::kShareBlocks).count(), kScratchAlign);
  }

  // A share of dQ from row r0 on, [rows][cols_k].
  Matrix<T> dQ(int64_t split, int64_t r0) const { return {first_ + (split * rows_ + r0) * cols_k_, cols_k_}; }

  // A share of dK, and of dV, from key n0 on: [keys][cols_k], [keys][cols_v].
  Matrix<T> dK(int64_t split, int64_t n0) const { return {first_ + (split * keys_ + n0) * cols_k_, cols_k_}; }
  Matrix<T> dV(int64_t split, int64_t n0) const {
    return {dK(splits.count, 0).data + (split * keys_ + n0) * cols_v_, cols_v_};
  }

  // Whether a share holds the super-block of rows at r0, or the block
  // of keys at n0: it does if the split has a visible pair there.
  char& has_rows(int64_t split, int64_t r0) const { return has_[split * blocks_ + r0 / kSuperBlock]; }
  char& has_keys(int64_t split, int64_t n0) const { return has_[split * blocks_ + n0 / kBackwardBlockK]; }

 private:
  int64_t rows_, keys_, cols_k_, cols_v_, blocks_;
  T* first_;
  char* has_;

  static int64_t bytes_of_sums(const BackwardParams& p) {
    return work_of<S>(p, Unit::kShareColumns).count() * static_cast<int64_t>(sizeof(T));
  }
};

// How many slopes all splits sum, and how many values of the relative bias.
template <class S>
int64_t summed_slopes(const BackwardParams& p) {
  return p.dslopes ? work_of<S>(p, Unit::kSplits).count() * group_size(p) : 0;
}
template <class S>
int64_t summed_distances(const BackwardParams& p) {
  return p.drelative ? work_of<S>(p, Unit::kDistances).count() : 0;
}

// Bytes of the shares and sums of all heads.
template <class S>
int64_t bytes_of_shares(const BackwardParams& p) {
  const int64_t sums = (summed_slopes<S>(p) + summed_distances<S>(p)) * static_cast<int64_t>(sizeof(double));
  return round_up(Shares<S>::bytes(p) + sums, kScratchAlign);
}

// Where the sums of dS of groups of heads begin (bias_groups.h).
template <class S>
void* group_sums(const BackwardParams& p) {
  return static_cast<char*>(p.workspace) + bytes_of_shares<S>(p);
}

// A split's sums, after all other shares.
template <class S>
HeadSums sums_of(const BackwardParams& p, const Head& head, int64_t split) {
  auto* const slopes = reinterpret_cast<double*>(static_cast<char*>(p.workspace) + Shares<S>::bytes(p));
  const int64_t distances = head.group * count_distances(p, head.seqlen_q, head.seqlen_k);
  return {slopes + (first_unit_of<S>(p, Unit::kSplits, head) + split) * head.group,
          slopes + summed_slopes<S>(p) + first_unit_of<S>(p, Unit::kDistances, head) + split * distances};
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
