// Forward of queries that run through segments of their keys: online softmax, as in decoding, over the keys that a query
// lists in one segment after another. The sums of an item's queries wait in scratch meanwhile.
#pragma once

#include "cpu/passes/listed/queries.h"
#include "cpu/passes/stopwatch.h"
#include "cpu/plan/units.h"
#include "cpu/products/listed_rows.h"
#include "cpu/tiles/few_rows.h"
#include "cpu/tiles/softmax.h"

namespace pyattn::PYATTN_ISA {
namespace {

template <class S>
struct ListedForwardScratch {
  using T = Compute<S>;
  Segments segments;
  Carver carver;
  ListedQueries queries;
  Matrix<Operand<S>> Q;  // [rows of a query][few_terms(head_dim)]
  Matrix<T> P;           // [rows of a query][keys]
  Matrix<T> O;           // [rows][columns_v, as in dots.h]: exp(S - row_max) V
  T *row_max, *row_sum;  // [rows], [rows][lanes]
  int64_t bytes;

  ListedForwardScratch(const ForwardParams& p, void* base)
      : segments(Segments::of(p, sizeof(S), kForwardVisit)), carver(base), queries(p, segments, carver) {
    const int64_t group = group_size(p), rows = segments.queries * group;
    Q = carver.take<Operand<S>>(group, few_terms<S>(p.head_dim));
    P = carver.take<T>(group, kListedTile);
    O = carver.take<T>(rows, columns_v<S>(p));
    row_max = carver.take<T>(rows);
    row_sum = carver.take<T>(rows * kLanes<T>);
    bytes = carver.bytes();
  }
};

template <class S>
Plan plan_listed_forward(const ForwardParams& p) {
  const ListedForwardScratch<S> s(p, nullptr);
  return {p.batch * p.num_heads_kv * s.segments.items, s.bytes, 0};
}

// s[keys] -> P = exp(s - row_max) in place, for one row. Updates row_max and row_sum[lanes]; returns the factor that
// rescales earlier sums.
template <class T, class Score>
PYATTN_INLINE T listed_softmax(T* s, int64_t keys, Score score, T& row_max, T* row_sum) {
  constexpr int L = kLanes<T>;
  const int64_t end = round_up(keys, L);
  for (int64_t k = keys; k < end; ++k) s[k] = kNegInf<T>;
  vec<T> largest = set1(row_max);
  for (int64_t k = 0; k < end; k += L) largest = max(load(s + k), largest);
  const T new_max = largest_lane<T>(largest);
  const vec<T> shift = finite_shift<T>(set1(new_max));
  const vec<T> decay = score.exp(set1(row_max) - shift);
  vec<T> sum = load(row_sum) * decay;
  for (int64_t k = 0; k < end; k += L) {
    const vec<T> p = score.exp(load(s + k) - shift);
    sum += p;
    store(s + k, p);
  }
  store(row_sum, sum);
  row_max = new_max;
  return decay[0];
}

// One work item: some queries of a KV head.
template <class S, class Score>
class ListedForwardItem {
  using T = Compute<S>;
  static constexpr int L = kLanes<T>;

 public:
  ListedForwardItem(const ForwardParams& p, ListedForwardScratch<S>& s) : p(p), s(s) {}

  void run(Range heads) {
    s.queries.begin(heads);
    const Head first = s.queries.first();
    const int64_t rows = heads.count() * group;
    for (int64_t i = 0; i < rows; ++i) s.row_max[i] = kNegInf<T>;
    fill_zero(s.row_sum, rows * L);
    fill_zero(s.O.data, rows * s.O.row);
    watch.lap(Phase::kPack);
    s.queries.each_visit(kLanes<T>, 0, [&](const Head& head, int64_t i, Range places) { visit(head, i, places); });
    for (int64_t i = 0; i < heads.count(); ++i) finish(s.queries.head(first, i), i);
    watch.lap(Phase::kStore);
  }

 private:
  const ForwardParams& p;
  ListedForwardScratch<S>& s;
  const int64_t group = group_size(p);
  const Score score{p};
  Stopwatch watch{p.cpu.counts};

  // Adds the keys at these places of a query's list.
  void visit(const Head& head, int64_t i, Range places) {
    pack_few_queries<S>(s.Q, group, p.head_dim, score.power, [&](int64_t r) { return head.row<const S>(p.q, r); });
    const Head next = ListedQueries::head(head, 1);
    prefetch_rows(0, group, p.head_dim, [&](int64_t r) { return next.row<const S>(p.q, r); });
    watch.lap(Phase::kPack);
    for (int64_t n0 = places.begin; n0 < places.end; n0 += kListedTile) {
      const int64_t count = min(kListedTile, places.end - n0);
      const int32_t* const keys = s.queries.keys_of(head, {n0, n0 + count});
      listed_dots<S>(group, count, p.head_dim, s.Q, listed_rows<S>(p, head, p.k, keys), s.P);
      watch.lap(Phase::kScores, 2 * group * count * p.head_dim);
      T decay[kDecodeRows];
      for (int64_t r = 0; r < group; ++r)
        decay[r] = listed_softmax(s.P.at(r), count, score, s.row_max[i * group + r], s.row_sum + (i * group + r) * L);
      watch.lap(Phase::kSoftmax);
      sum_listed_rows<S>(group, count, p.head_dim_v, s.P, listed_rows<S>(p, head, p.v, keys), decay,
                         s.O.from(i * group));
      watch.lap(Phase::kOut, 2 * group * count * p.head_dim_v);
    }
  }

  // Writes out and the row statistics of a query.
  void finish(const Head& head, int64_t i) {
    alignas(kScratchAlign) T row_max[kBlockQ<T>] = {}, row_sum[kBlockQ<T>] = {}, scale[kBlockQ<T>];
    for (int64_t r = 0; r < group; ++r) {
      row_max[r] = s.row_max[i * group + r];
      row_sum[r] = add_lanes<T>(load(s.row_sum + (i * group + r) * L));
    }
    finish_rows<S>(p, Mask(p, head), 0, group, row_max, row_sum, scale, score);
    for (int64_t r = 0; r < group; ++r) {
      S* const out = head.row<S>(p.out, r);
      const T* const sums = s.O.at(i * group + r);
      for (int64_t d = 0; d < p.head_dim_v; d += L) store(out + min(d, p.head_dim_v - L), load(sums + d) * scale[r]);
    }
  }
};

template <class S, class Score>
void listed_forward(const ForwardParams& p, int64_t begin, int64_t end, void* scratch) {
  ListedForwardScratch<S> s(p, scratch);
  ListedForwardItem<S, Score> one(p, s);
  for (int64_t item = begin; item < end; ++item) {
    const auto [count, entries, queries, items] = s.segments;
    const int64_t first = item / items * p.seqlen_q, n = item % items;
    one.run({first + n * queries, first + min((n + 1) * queries, p.seqlen_q)});
  }
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
