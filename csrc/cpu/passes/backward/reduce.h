// Reduce: adds up the shares of dQ, or of dK and dV, that the splits of a head leave.
#pragma once

#include "cpu/passes/backward/gradients.h"
#include "cpu/passes/stopwatch.h"
#include "cpu/plan/selected_sums.h"
#include "cpu/plan/shares.h"
#include "cpu/plan/units.h"
#include "cpu/plan/work.h"
#include "cpu/products/matrix.h"
#include "cpu/products/pack.h"
#include "cpu/products/scratch.h"
#include "cpu/simd/simd.h"
#include "cpu/tiles/strips.h"
#include "shared/heads.h"

namespace pyattn::PYATTN_ISA {
namespace {

template <class S>
Plan plan_reduce(const BackwardParams& p) {
  if (const SelectedParams& s = p.cpu.selected; s.entries)
    return {SelectedSums<S>::heads(p) / s.sharing * ceil_div(s.keys, kBackwardBlockK), 0, 0};
  return {work_of<S>(p, Unit::kReduced).count(), 0, 0};
}

// Adds up the rows of all shares that have them, in order, in the first of these shares; 0 if none has them.
template <class T, class Has, class Share>
Matrix<const T> sum_shares(int64_t splits, int64_t rows, Has has, Share share) {
  int64_t first = 0;
  while (first < splits && !has(first)) ++first;
  const Matrix<T> sum = share(min(first, splits - 1));
  if (first == splits) fill_zero(sum.data, rows * sum.row);
  for (int64_t split = first + 1; split < splits; ++split)
    for (int64_t i = 0; has(split) && i < rows * sum.row; i += kLanes<T>)
      store(sum.data + i, load(sum.data + i) + load(share(split).data + i));
  return sum;
}

// Each work item is a block of the keys of a head of k and v, with selected keys.
template <class S, class Score>
void reduce_selected(const BackwardParams& p, int64_t begin, int64_t end, Score score) {
  using T = Compute<S>;
  const SelectedParams& selected = p.cpu.selected;
  const int64_t blocks = ceil_div(selected.keys, kBackwardBlockK), heads = p.num_heads_kv / selected.sharing;
  const int64_t count = SelectedSums<S>::items_each(p) * selected.sharing;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t h = item / blocks, n0 = item % blocks * kBackwardBlockK,
                  keys = min(kBackwardBlockK, selected.keys - n0);
    const auto sum = [&](auto all) {
      return sum_shares<T>(
          count, keys, [](int64_t) { return true; },
          [&](int64_t i) { return all(SelectedSums<S>(p, h * count + i)).from(n0); });
    };
    const Head head(p, (h / heads * p.num_heads_kv + h % heads) * p.seqlen_q);
    write_keys<S>(p, head, p.dk, n0, sum([](auto s) { return s.dK(); }), keys, p.head_dim, score.dscale);
    write_keys<S>(p, head, p.dv, n0, sum([](auto s) { return s.dV(); }), keys, p.head_dim_v, T(1));
  }
}

// Each work item is a block of query rows, or of keys, of a KV head that is split.
template <class S, template <class> class Score>
void reduce(const BackwardParams& p, int64_t begin, int64_t end, void*) {
  using T = Compute<S>;
  if (is_selected(p)) return reduce_selected<S>(p, begin, end, Score<S>(p));
  const Work work = work_of<S>(p, Unit::kReduced);
  const Score<S> score(p);
  Stopwatch watch(p.cpu.counts);
  for (int64_t item = begin; item < end; ++item) {
    const Place place = work.at(item);
    const Head head(p, place.head);
    const Shares<S> shares(p, head);
    if (shares.splits.by_rows) {
      const int64_t n0 = place.n * kBackwardBlockK, keys = min(kBackwardBlockK, head.seqlen_k - n0);
      const auto sum = [&](auto share) {
        return sum_shares<T>(shares.splits.count, keys, [&](int64_t s) { return shares.has_keys(s, n0); }, share);
      };
      const Matrix<const T> dK = sum([&](int64_t s) { return shares.dK(s, n0); });
      const Matrix<const T> dV = sum([&](int64_t s) { return shares.dV(s, n0); });
      write_keys<S>(p, head, p.dk, n0, dK, keys, p.head_dim, score.dscale);
      write_keys<S>(p, head, p.dv, n0, dV, keys, p.head_dim_v, T(1));
    } else {
      const int64_t r0 = place.n * kBlockQ<T>, rows = min(kBlockQ<T>, head.count - r0);
      const Matrix<const T> dQ = sum_shares<T>(
          shares.splits.count, rows, [&](int64_t s) { return shares.has_rows(s, r0); },
          [&](int64_t s) { return shares.dQ(s, r0); });
      write_rows<S>(p, head, r0, dQ, rows, score.dscale);
    }
  }
  watch.lap(Phase::kStore);
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
