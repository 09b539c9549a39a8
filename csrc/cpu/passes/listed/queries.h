// Listed queries: some queries of a KV head, and how far each has read its list.
#pragma once

#include "cpu/plan/segments.h"
#include "cpu/products/matrix.h"
#include "cpu/products/scratch.h"
#include "cpu/tiles/keys.h"
#include "shared/mask.h"

namespace pyattn::PYATTN_ISA {
namespace {

// Keys of a tile of listed rows: the scores of one row stay in L1, and O is rescaled once a tile.
inline constexpr int64_t kListedTile = 128;

class ListedQueries {
 public:
  ListedQueries(const ForwardParams& p, const Segments& segments, Carver& carver) : p_(p), segments_(segments) {
    left_ = carver.take<Range>(segments.queries);
    keys_ = carver.take<int32_t>(kListedTile);
  }

  // Begins with the queries of `heads`, of count_heads: all of one KV head.
  void begin(Range heads) {
    first_ = heads.begin, count_ = heads.count();
    const Head first(p_, first_);
    for (int64_t i = 0; i < count_; ++i) left_[i] = Mask(p_, first.later(i)).unfiltered(0);
  }

  Head first() const { return Head(p_, first_); }
  // The keys of its list that query i sees and has not read.
  Range& left(int64_t i) const { return left_[i]; }

  // Calls visit(head, i, keys) for each segment and each query i that lists visible keys there; keys are places in its
  // list, in multiples of `lanes`: fewer wait for the next segment. Queries with at most `at_once` keys have them in one
  // visit.
  template <class Visit>
  void each_visit(int64_t lanes, int64_t at_once, Visit visit) const {
    const int64_t block = p_.cpu.selected.block;
    const Head first = this->first();
    const int32_t* const list = SelectedKeys(p_, first, 0).entries();
    for (int64_t segment = 1; segment <= segments_.count; ++segment) {
      const int64_t past = segment * segments_.entries;
      for (int64_t i = 0; i < count_; ++i) {
        Range& left = left_[i];
        if (left.empty()) continue;
        int64_t end = left.end;
        if (left.count() > at_once && segment < segments_.count) {
          const int64_t entry = block == 1 ? left.begin : left.begin / block;
          const int64_t entries = block == 1 ? left.end : ceil_div(left.end, block);
          end = min(below(list + i * p_.cpu.selected.count, {entry, entries}, past) * block, left.end);
          if (end < left.end) end = left.begin + round_down(max(0, end - left.begin), lanes);
        }
        const Range keys{left.begin, end};
        left.begin = end;
        if (!keys.empty()) visit(first.later(i), i, keys);
      }
    }
  }

  // The keys of k and v at these places of the list of a head, at most kListedTile.
  const int32_t* keys_of(const Head& head, Range places) const {
    SelectedKeys listed(p_, head, places.begin);
    if (p_.cpu.selected.block == 1) return listed.entries();
    for (int64_t i = 0; i < places.count(); ++i, listed.next()) keys_[i] = static_cast<int32_t>(listed.key());
    return keys_;
  }

 private:
  const ForwardParams& p_;
  const Segments segments_;
  int64_t first_ = 0, count_ = 0;
  Range* left_;    // [queries]
  int32_t* keys_;  // [kListedTile]

  // The first place of `places` whose entry is `past` or after it.
  static int64_t below(const int32_t* list, Range places, int64_t past) {
    constexpr int64_t kStep = 8;
    auto [i, end] = places;
    while (i + kStep <= end && list[i + kStep - 1] < past) i += kStep;
    while (i < end && list[i] < past) ++i;
    return i;
  }
};

// The rows of k or v that a list of keys names.
template <class S>
ListedRows<const S> listed_rows(const ForwardParams& p, const Head& head, const View& view, const int32_t* keys) {
  return {selected_row<S>(p, head, view, 0), view.stride_s, keys};
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
