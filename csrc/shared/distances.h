// Distances of keys from queries, for a relative bias: where its values lie, and which distances a
// sequence has. Every backend shares this file; everything is constexpr, so device code may call it.
#pragma once

#include "shared/heads.h"

namespace pyattn::PYATTN_ISA {
namespace {

// j - (i + q_offset) for query i and key j. Extreme offsets are brought to 2^40, which no reach exceeds.
constexpr int64_t distance_of(const ForwardParams& p, const Head& head, int64_t i, int64_t j) {
  const int64_t far = int64_t{1} << 40;
  return j - i - clamp(p.mask.q_offsets ? p.mask.q_offsets[head.b] : p.mask.q_offset, -far, far);
}

// The relative bias of a query head at distance 0; its values for [-reach, reach] lie around it.
template <class T>
constexpr const T* relative_bias_of(const ForwardParams& p, const Head& head, int64_t query_head) {
  const ScoreParams& score = p.score;
  return static_cast<const T*>(score.relative_bias) + head.b * score.relative_stride_b +
         query_head * score.relative_stride_h + score.reach;
}

// The distances [first, last] that a sequence has, clamped to the reach; none if last < first.
struct DistanceRange {
  int64_t first, last;

  constexpr DistanceRange(const ForwardParams& p, const Head& head)
      : first(clamp(distance_of(p, head, head.seqlen_q - 1, 0), -p.score.reach, p.score.reach)),
        last(clamp(distance_of(p, head, 0, head.seqlen_k - 1), -p.score.reach, p.score.reach)) {}
};

// The most distances that a sequence of these lengths has, whatever its offset is.
constexpr int64_t count_distances(const ForwardParams& p, int64_t seqlen_q, int64_t seqlen_k) {
  return p.score.relative_bias ? clamp(seqlen_q + seqlen_k - 1, 0, 2 * p.score.reach + 1) : 0;
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
