// Merge: combines the partial results of a KV head, one for each range of its keys, into out and the row statistics.
#pragma once

#include "cpu/passes/stopwatch.h"
#include "cpu/plan/units.h"
#include "cpu/plan/work.h"
#include "cpu/simd/simd.h"
#include "cpu/tiles/softmax.h"
#include "cpu/tiles/strips.h"
#include "shared/mask.h"

namespace pyattn::PYATTN_ISA {
namespace {

template <class S>
Plan plan_merge_out(const ForwardParams& p) {
  return {work_of<S>(p, Unit::kMerges).count(), 0, 0};
}

// Each work item is one KV head whose keys forward divides.
template <class S, template <class> class Score>
void merge_out(const ForwardParams& p, int64_t begin, int64_t end, void*) {
  using T = Compute<S>;
  const Work work = work_of<S>(p, Unit::kMerges);
  const Score<S> score(p);
  Stopwatch watch(p.cpu.counts);
  for (int64_t item = begin; item < end; ++item) {
    const Head head(p, work.at(item).head);
    const int64_t splits = decode_splits(p, head.seqlen_k);
    const DecodeParts<S> parts(p, head);
    const auto part = [&](int64_t split) { return parts.of(split); };
    alignas(kScratchAlign) T row_max[kBlockQ<T>] = {}, row_sum[kBlockQ<T>] = {}, scale[kBlockQ<T>];
    for (int64_t r = 0; r < head.count; ++r) {
      row_max[r] = kNegInf<T>, row_sum[r] = 0;
      if (p.cpu.row_invariant) {
        for (int64_t split = 0; split < splits; ++split) {
          T &after = part(split).row_max[r], &before = part(split).row_sum[r];  // factors replace the statistics
          const Join<T> join(set1(row_max[r]), set1(after), score);
          row_max[r] = join.row_max[0], row_sum[r] = join.sum(set1(row_sum[r]), set1(before))[0];
          after = join.after[0], before = join.before[0];
        }
        continue;
      }
      for (int64_t split = 0; split < splits; ++split)
        row_max[r] = part(split).row_max[r] > row_max[r] ? part(split).row_max[r] : row_max[r];
      const vec<T> shift = finite_shift<T>(set1(row_max[r]));
      for (int64_t split = 0; split < splits; ++split) {
        T& weight = part(split).row_max[r];  // the part's weight replaces its maximum
        weight = score.exp(set1(weight) - shift)[0];
        row_sum[r] += weight * part(split).row_sum[r];
      }
    }
    finish_rows<S>(p, Mask(p, head), 0, head.count, row_max, row_sum, scale, score);
    for (int64_t r = 0; r < head.count; ++r) {
      S* out = head.row<S>(p.out, r);
      for (int64_t d = 0; d < p.head_dim_v; d += kLanes<T>) {
        vec<T> sum = {};
        for (int64_t split = 0; split < splits; ++split) {
          if (p.cpu.row_invariant) sum *= set1(part(split).row_sum[r]);
          sum = fma(set1(part(split).row_max[r]), load(part(split).O.from(r).data + d), sum);
        }
        if (p.cpu.row_invariant) sum += vec<T>{};  // as ForwardItem::clear_negative_zeros
        store(out + min(d, p.head_dim_v - kLanes<T>), sum * scale[r]);
      }
    }
  }
  watch.lap(Phase::kStore);
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
