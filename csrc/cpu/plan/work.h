// Work: units, for example work items, numbered over all KV heads, one head after another.
// In a batch all heads have the same number; packed sequences have a table of prefix sums.
#pragma once

#include "shared/heads.h"

namespace pyattn {

// Units are the pieces that the KV heads of a call are cut into; units.h counts them.
enum class Unit : int {
  kForward,
  kPartRows,
  kMerges,
  kSplits,
  kShareColumns,
  kShareBlocks,
  kDistances,
  kReduced,
  kSummaries
};
inline constexpr int kNumUnits = static_cast<int>(Unit::kSummaries) + 1;

// How many units of each kind a KV head has.
struct Units {
  int64_t of[kNumUnits];
};

namespace PYATTN_ISA {
namespace {

// How many units each KV head has in all sequences before b; for packed sequences only.
constexpr int64_t units_before(const ForwardParams& p, Unit unit, int64_t b) {
  return p.cpu.before[b].of[static_cast<int>(unit)];
}

// The index of the first unit of a head that has `count`.
constexpr int64_t first_unit(const ForwardParams& p, Unit unit, const Head& head, int64_t count) {
  if (!is_packed(p)) return head.number(p) * count;
  return units_before(p, unit, head.b) * p.num_heads_kv + head.h_kv * count;
}

// Unit n of the `count` units of a KV head.
struct Place {
  int64_t head, n, count;
};

class Work {
 public:
  // each: how many units a KV head of a batch has.
  constexpr Work(const ForwardParams& p, Unit unit, int64_t each) : p_(p), unit_(unit), each_(each) {}

  // Units of all KV heads.
  constexpr int64_t count() const {
    return is_packed(p_) ? p_.num_heads_kv * units_before(p_, unit_, p_.batch) : count_heads(p_) * each_;
  }

  constexpr Place at(int64_t i) const {
    if (!is_packed(p_)) return {i / each_, i % each_, each_};
    const int64_t b = last_that(p_.batch, [&](int64_t b) { return units_before(p_, unit_, b) * p_.num_heads_kv <= i; });
    const int64_t before = units_before(p_, unit_, b), count = units_before(p_, unit_, b + 1) - before;
    i -= before * p_.num_heads_kv;
    return {b * p_.num_heads_kv + i / count, i % count, count};
  }

 private:
  const ForwardParams& p_;
  Unit unit_;
  int64_t each_;
};

}  // namespace
}  // namespace PYATTN_ISA
}  // namespace pyattn
