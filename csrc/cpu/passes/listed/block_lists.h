// Block lists: the lists of some queries of a KV head, turned around: which of these queries list each block of keys.
#pragma once

#include "cpu/plan/listed_blocks.h"
#include "cpu/products/matrix.h"
#include "cpu/products/scratch.h"
#include "cpu/tiles/keys.h"
#include "shared/mask.h"

namespace pyattn::PYATTN_ISA {
namespace {

class BlockLists {
 public:
  // queries: the most that it begins with.
  BlockLists(const ForwardParams& p, int64_t queries, Carver& carver)
      : p_(p), block_(p.cpu.selected.block), blocks_(ceil_div(p.cpu.selected.keys, block_)) {
    ends_ = carver.take<int32_t>(blocks_ + 1);
    queries_ = carver.take<int32_t>(queries * p.cpu.selected.count);
    seen_ = carver.take<Range>(queries);
  }

  // Begins with the queries of `heads`, of count_heads: all of one KV head. Queries with at most `at_once` keys have them
  // in one piece, of each_rest.
  void begin(Range heads, int64_t at_once) {
    first_ = heads.begin, count_ = heads.count(), at_once_ = at_once;
    const Head first = this->first();
    const int32_t* const list = SelectedKeys(p_, first, 0).entries();
    fill_zero(ends_, blocks_ + 1);
    for (int64_t i = 0; i < count_; ++i) {
      seen_[i] = Mask(p_, first.later(i)).unfiltered(0);
      each_entry(list, i, [&](int32_t block) { ++ends_[block + 1]; });
    }
    for (int64_t n = 0; n < blocks_; ++n) ends_[n + 1] += ends_[n];
    // Where the queries of a block begin becomes where they end, which is where those of the next block begin.
    for (int64_t i = 0; i < count_; ++i)
      each_entry(list, i, [&](int32_t block) { queries_[ends_[block]++] = static_cast<int32_t>(i); });
  }

  Head first() const { return Head(p_, first_); }
  // The places in its list of the keys that query i sees.
  Range seen(int64_t i) const { return seen_[i]; }

  // Calls visit(block) for each block that some queries list and see whole.
  template <class Visit>
  void each_block(Visit visit) const {
    for (int64_t block = 0; block < blocks_; ++block)
      if (begin_of(block) < ends_[block]) visit(block);
  }

  // Calls visit(queries, count) for the queries of a block in order, at most that many at a time. A query that lists a block
  // twice, by a page that its sequence holds twice, is in two of the calls.
  template <class Visit>
  void each_tile(int64_t block, int64_t most, Visit visit) const {
    for (int64_t i = begin_of(block), count; i < ends_[block]; i += count) {
      for (count = 1; count < min(most, ends_[block] - i) && queries_[i + count] != queries_[i + count - 1];) ++count;
      visit(queries_ + i, count);
    }
  }

  // Calls visit(query, places) for the places in a query's list that each_block leaves out.
  template <class Visit>
  void each_rest(Visit visit) const {
    for (int64_t i = 0; i < count_; ++i) {
      const Range seen = seen_[i], whole = whole_blocks(i);
      if (whole.empty()) {
        if (!seen.empty()) visit(i, seen);
        continue;
      }
      const Range before{seen.begin, whole.begin * block_}, after{whole.end * block_, seen.end};
      if (!before.empty()) visit(i, before);
      if (!after.empty()) visit(i, after);
    }
  }

 private:
  const ForwardParams& p_;
  int64_t block_, blocks_;
  int64_t first_ = 0, count_ = 0, at_once_ = 0;
  int32_t *ends_, *queries_;  // [blocks + 1]; [entries of all queries]
  Range* seen_;               // [queries]

  int64_t begin_of(int64_t block) const { return block ? ends_[block - 1] : 0; }

  // The entries of a query's list whose keys it all sees.
  Range whole_blocks(int64_t i) const {
    const Range seen = seen_[i];
    if (seen.count() <= at_once_) return {0, 0};
    return {ceil_div(seen.begin, block_), seen.end / block_};
  }

  template <class F>
  void each_entry(const int32_t* list, int64_t i, F f) const {
    const Range whole = whole_blocks(i);
    for (int64_t n = whole.begin; n < whole.end; ++n) f(list[i * p_.cpu.selected.count + n]);
  }
};

// The rows of k or v of a block from key n0 of it on.
template <class S>
Matrix<const S> block_rows(const ForwardParams& p, const Head& head, const View& view, int64_t block, int64_t n0) {
  return {selected_row<S>(p, head, view, block * p.cpu.selected.block + n0), view.stride_s};
}

// Keys of a tile: a block, or equal pieces of a long one.
inline int64_t block_tile(const ForwardParams& p) {
  const int64_t block = p.cpu.selected.block;
  return round_up(ceil_div(block, ceil_div(block, kTileKeys)), kStripKeys);
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
