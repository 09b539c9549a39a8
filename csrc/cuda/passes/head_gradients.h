// Gradients of slopes and sinks: sums over the rows of a query head, in double, in one order.
// One warp per sum.
#pragma once

#include "attention.h"
#include "cuda/products/fragment.h"
#include "cuda/ptx/primitives.h"

namespace pyattn::cuda {
namespace {

inline constexpr int kRowSumWarps = 4;

template <class T>
struct RowSums {
  const T* terms;  // (batch, heads, rows)
  T* sums;         // (batch or 1, heads)
  int64_t batch, heads, rows;
  bool one_for_all;           // one sum for all sequences
  const Sequence* sequences;  // packed, with terms (heads, rows) and sums (batch, heads); else null
};

template <class T>
PYATTN_KERNEL(kRowSumWarps* kWarpLanes)
sum_rows(const __grid_constant__ RowSums<T> p) {
  const int64_t at = block_index() * kRowSumWarps + warp(), count = (p.one_for_all ? 1 : p.batch) * p.heads;
  if (at >= count) return;
  double sum = 0;
  const auto add = [&](int64_t first, int64_t rows) {
    for (int64_t i = lane(); i < rows; i += kWarpLanes) sum += p.terms[first + i];
  };
  if (p.sequences) {
    const Sequence& own = p.sequences[at / p.heads];
    add(at % p.heads * p.rows + own.first_q, own.seqlen_q);
  } else {
    for (int64_t head = at; head < p.batch * p.heads; head += count) add(head * p.rows, p.rows);
  }
  sum = sum_lanes(sum);
  if (lane() == 0) p.sums[at] = static_cast<T>(sum);
}

}  // namespace
}  // namespace pyattn::cuda
