// Forward of queries that run through segments of their keys: online softmax, as in decoding, over the keys that a query
// lists in one segment after another. The sums of an item's queries wait in scratch meanwhile.
#pragma once

#include "cpu/passes/listed/queries.h"
#include "cpu/passes/stopwatch.h"
#include "cpu/plan/units.h"
#include "cpu/products/pack.h"
#include "cpu/tiles/softmax.h"

namespace pyattn::PYATTN_ISA {
namespace {

// Rows: FewListedRows (few_rows.h) or LaneListedRows (lane_rows.h).
template <class S, class Rows>
struct ListedForwardScratch {
  using T = Compute<S>;
  Segments segments;
  Carver carver;
  ListedQueries queries;
  Rows rows;
  Matrix<T> O;  // [rows][columns_v, as in dots.h]: exp(S - row_max) V
  int64_t bytes;

  ListedForwardScratch(const ForwardParams& p, void* base)
      : segments(Segments::of(p, sizeof(S), Rows::kVisit, Rows::kRows)),
        carver(base),
        queries(p, segments, carver),
        rows(p, segments.queries, carver),
        O(carver.take<T>(segments.queries * group_size(p), columns_v<S>(p))),
        bytes(carver.bytes()) {}
};

template <class S, class Rows>
Plan plan_listed_forward(const ForwardParams& p) {
  const ListedForwardScratch<S, Rows> s(p, nullptr);
  return {p.batch * p.num_heads_kv * s.segments.items, s.bytes, 0};
}

// One work item: some queries of a KV head.
template <class S, class Score, class Rows>
class ListedForwardItem {
  using T = Compute<S>;
  static constexpr int L = kLanes<T>;

 public:
  ListedForwardItem(const ForwardParams& p, ListedForwardScratch<S, Rows>& s) : p(p), s(s) {}

  void run(Range heads) {
    s.queries.begin(heads);
    const Head first = s.queries.first();
    s.rows.begin(heads.count());
    fill_zero(s.O.data, heads.count() * group * s.O.row);
    watch.lap(Phase::kPack);
    s.queries.each_visit(kLanes<T>, 0, [&](const Head& head, int64_t i, Range places) { visit(head, i, places); });
    for (int64_t i = 0; i < heads.count(); ++i) finish(first.later(i), i);
    watch.lap(Phase::kStore);
  }

 private:
  const ForwardParams& p;
  ListedForwardScratch<S, Rows>& s;
  const int64_t group = group_size(p);
  const Score score{p};
  Stopwatch watch{p.cpu.counts};

  // Adds the keys at these places of a query's list.
  void visit(const Head& head, int64_t i, Range places) {
    s.rows.pack(head, score);
    const Head next = head.later(1);
    prefetch_rows(0, group, p.head_dim, [&](int64_t r) { return next.row<const S>(p.q, r); });
    watch.lap(Phase::kPack);
    for (int64_t n0 = places.begin; n0 < places.end; n0 += Rows::kTile) {
      const int64_t count = min(Rows::kTile, places.end - n0);
      s.rows.add(head, i, s.queries.keys_of(head, {n0, n0 + count}), count, s.O.from(i * group), score, watch);
    }
  }

  // Writes out and the row statistics of a query.
  void finish(const Head& head, int64_t i) {
    alignas(kScratchAlign) T row_max[kBlockQ<T>] = {}, row_sum[kBlockQ<T>] = {}, scale[kBlockQ<T>];
    s.rows.statistics(i, row_max, row_sum);
    finish_rows<S>(p, Mask(p, head), 0, group, row_max, row_sum, scale, score);
    for (int64_t r = 0; r < group; ++r) {
      S* const out = head.row<S>(p.out, r);
      const T* const sums = s.O.at(i * group + r);
      for (int64_t d = 0; d < p.head_dim_v; d += L) store(out + min(d, p.head_dim_v - L), load(sums + d) * scale[r]);
    }
  }
};

template <class S, class Score, class Rows>
void listed_forward(const ForwardParams& p, int64_t begin, int64_t end, void* scratch) {
  ListedForwardScratch<S, Rows> s(p, scratch);
  ListedForwardItem<S, Score, Rows> one(p, s);
  for (int64_t item = begin; item < end; ++item) {
    const auto [count, entries, queries, items] = s.segments;
    const int64_t first = item / items * p.seqlen_q, n = item % items;
    one.run({first + n * queries, first + min((n + 1) * queries, p.seqlen_q)});
  }
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
