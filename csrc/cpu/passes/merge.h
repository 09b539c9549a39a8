// Merge: combines the partial results of a KV head, one for each range of its keys, into out and the row statistics, by
// merge_parts in tiles/softmax.h.
#pragma once

#include "cpu/passes/stopwatch.h"
#include "cpu/plan/units.h"
#include "cpu/plan/work.h"
#include "cpu/tiles/softmax.h"

namespace pyattn::PYATTN_ISA {
namespace {

template <class S>
Plan plan_merge_out(const ForwardParams& p) {
  return {work_of<S>(p, Unit::kMerges).count(), 0, 0};
}

// Each work item is one KV head whose keys forward divides into several ranges.
template <class S, template <class> class Score>
void merge_out(const ForwardParams& p, int64_t begin, int64_t end, void*) {
  const Work work = work_of<S>(p, Unit::kMerges);
  const Score<S> score(p);
  Stopwatch watch(p.cpu.counts);
  for (int64_t item = begin; item < end; ++item) {
    const Head head(p, work.at(item).head);
    const DecodeParts<S> parts(p, head);
    merge_parts<S>(p, head, score, decode_splits(p, head.seqlen_k), [&](int64_t split) { return parts.of(split); });
  }
  watch.lap(Phase::kStore);
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
