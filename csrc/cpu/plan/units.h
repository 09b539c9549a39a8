// Units: how many pieces a pass cuts a KV head into, given the lengths of its sequence.
// The number depends on shapes and constants, never on the number of threads. Also where
// decoding leaves its partial results.
#pragma once

#include "cpu/plan/backward_splits.h"
#include "cpu/plan/forward_splits.h"
#include "cpu/plan/work.h"
#include "cpu/products/matrix.h"
#include "cpu/simd/simd.h"
#include "cpu/tiles/strips.h"
#include "shared/distances.h"
#include "shared/mask.h"

namespace pyattn::PYATTN_ISA {
namespace {

// head_dim and head_dim_v in whole vectors, the columns of sums.
template <class S>
int64_t columns_k(const ForwardParams& p) {
  return round_up(p.head_dim, kLanes<Compute<S>>);
}
template <class S>
int64_t columns_v(const ForwardParams& p) {
  return round_up(p.head_dim_v, kLanes<Compute<S>>);
}

// How many units a KV head has in a sequence of these lengths.
template <class S>
int64_t units_of(const ForwardParams& p, Unit unit, int64_t seqlen_q, int64_t seqlen_k) {
  const int64_t rows = seqlen_q * group_size(p), blocks = ceil_div(rows, kBlockQ<Compute<S>>);
  if (unit == Unit::kForward || unit == Unit::kPartRows || unit == Unit::kMerges) {
    const bool by_keys = !uses_segments<S>(p) && splits_keys<S>(p, rows, seqlen_k);
    const int64_t splits = by_keys ? decode_splits(p, seqlen_k) : 0;
    if (unit == Unit::kForward) return by_keys ? splits : blocks;
    return splits <= 1 ? 0 : unit == Unit::kMerges ? 1 : splits * rows;
  }
  const auto [splits, by_rows] = splits_of(p, seqlen_q, seqlen_k);
  const int64_t shares = splits > 1 ? splits : 0, key_blocks = ceil_div(seqlen_k, kBackwardBlockK);
  switch (unit) {
    case Unit::kSplits: return splits;
    case Unit::kShareColumns:
      return shares * (by_rows ? seqlen_k * (columns_k<S>(p) + columns_v<S>(p)) : rows * columns_k<S>(p));
    case Unit::kShareBlocks: return shares * (by_rows ? key_blocks : ceil_div(rows, kSuperBlock));
    case Unit::kDistances: return splits * group_size(p) * count_distances(p, seqlen_q, seqlen_k);
    case Unit::kReduced: return shares ? (by_rows ? key_blocks : blocks) : 0;
    case Unit::kSummaries: return ceil_div(rows, kBlockRows);
    case Unit::kForward:
    case Unit::kPartRows:
    case Unit::kMerges: break;
  }
  return 0;
}

template <class S>
Work work_of(const ForwardParams& p, Unit unit) {
  return {p, unit, units_of<S>(p, unit, most_queries(p), p.seqlen_k)};
}

template <class S>
int64_t first_unit_of(const ForwardParams& p, Unit unit, const Head& head) {
  return first_unit(p, unit, head, units_of<S>(p, unit, head.seqlen_q, head.seqlen_k));
}

// The result of one range of a head's keys.
template <class T>
struct DecodePart {
  Matrix<T> O;           // [rows][head_dim_v in whole vectors, as in dots.h]: exp(S - row_max) V
  T *row_max, *row_sum;  // [rows]

  DecodePart(T* data, int64_t rows, int64_t cols)
      : O{data, cols}, row_max(O.from(rows).data), row_sum(row_max + rows) {}

  static int64_t size(int64_t rows, int64_t cols) { return rows * (cols + 2); }
};

// Locates a head's partial results in the workspace: one for each of several ranges of its keys.
template <class S>
class DecodeParts {
  using T = Compute<S>;

 public:
  DecodeParts(const ForwardParams& p, const Head& head)
      : rows_(head.count),
        cols_(columns_v<S>(p)),
        first_(static_cast<T*>(p.workspace) + Part::size(first_unit_of<S>(p, Unit::kPartRows, head), cols_)) {}

  static int64_t bytes(const ForwardParams& p) {
    return Part::size(work_of<S>(p, Unit::kPartRows).count(), columns_v<S>(p)) * static_cast<int64_t>(sizeof(T));
  }

  DecodePart<T> of(int64_t split) const { return {first_ + split * Part::size(rows_, cols_), rows_, cols_}; }

 private:
  using Part = DecodePart<T>;
  int64_t rows_, cols_;
  T* first_;
};

inline Plan plan_count_units(const ForwardParams& p) {
  return {1, 0, (p.batch + 1) * static_cast<int64_t>(sizeof(Units))};
}

// Writes params.cpu.before, in one work item.
template <class S>
void count_units(const ForwardParams& p, int64_t, int64_t, void*) {
  Units sum{};
  for (int64_t b = 0; b < p.batch && p.num_heads_kv > 0; ++b) {
    p.cpu.before[b] = sum;
    const Head head(p, b * p.num_heads_kv);
    for (int unit = 0; unit < kNumUnits; ++unit)
      sum.of[unit] += units_of<S>(p, static_cast<Unit>(unit), head.seqlen_q, head.seqlen_k);
  }
  p.cpu.before[p.batch] = sum;
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
