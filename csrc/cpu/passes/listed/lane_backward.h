// Backward of queries whose rows lie on the lanes, which run through segments of their keys as those of backward.h do:
// S, dP and dQ read rows of K and V in place where operands are what is stored.
#pragma once

#include "cpu/passes/backward/packed_queries.h"
#include "cpu/passes/listed/listed_keys.h"
#include "cpu/passes/listed/queries.h"
#include "cpu/passes/stopwatch.h"
#include "cpu/plan/selected_sums.h"
#include "cpu/plan/units.h"
#include "cpu/tiles/softmax_gradient.h"

namespace pyattn::PYATTN_ISA {
namespace {

template <class S>
struct LaneBackwardScratch {
  using T = Compute<S>;
  using E = Operand<S>;
  int64_t lanes;
  Segments segments;
  Carver carver;
  ListedQueries queries;
  ListedKeys<S> keys;
  PackedQueries<S> packed;
  Matrix<T> P, dP;            // [keys][lanes]
  Matrix<E> left_P, left_dS;  // [keys][terms(lanes)]: P and dS as left factors, as bf16 pairs
  Matrix<E> summed_dS;        // [terms(keys)][lanes]: dS for a sum over keys, as bf16 pairs
  Matrix<T> dK, dV;           // [keys][columns_k], [keys][columns_v]: 0 between tiles
  Matrix<T> dQ;               // [rows][columns_k, as in dots.h]
  int64_t bytes;

  LaneBackwardScratch(const BackwardParams& p, void* base)
      : lanes(round_up(group_size(p), kLanes<T>)),
        segments(Segments::of(p, sizeof(S) + sizeof(T), kLaneVisit, kLaneRows)),
        carver(base),
        queries(p, segments, carver),
        keys(p, carver),
        packed(p, carver) {
    constexpr int64_t kTile = ListedKeys<S>::kTile, kPaired = kPairs<S> ? kTile : 0;
    P = carver.take<T>(kTile + kMostRepeated, lanes);
    dP = carver.take<T>(kTile + kMostRepeated, lanes);
    left_P = carver.take<E>(kPaired, terms<S>(lanes));
    left_dS = carver.take<E>(kPaired, terms<S>(lanes));
    summed_dS = carver.take<E>(terms<S>(kPaired), lanes);
    dK = carver.take<T>(kTile, columns_k<S>(p));
    dV = carver.take<T>(kTile, columns_v<S>(p));
    dQ = carver.take<T>(segments.queries * group_size(p), columns_k<S>(p));
    bytes = carver.bytes();
  }
};

template <class S>
Plan plan_lane_backward(const BackwardParams& p) {
  return {SelectedSums<S>::items(p), LaneBackwardScratch<S>(p, nullptr).bytes, SelectedSums<S>::bytes(p)};
}

// Queries of an item of backward, whose dK and dV are added to `all`.
template <class S, class Score>
class LaneBackwardItem {
  using T = Compute<S>;
  using E = Operand<S>;
  static constexpr int L = kLanes<T>;
  static constexpr int64_t kTile = ListedKeys<S>::kTile;
  static_assert(kTile == kBackwardBlockK);  // queries with so few keys have them in one tile, as in packed_queries.h

 public:
  LaneBackwardItem(const BackwardParams& p, const SelectedSums<S>& all, const LaneBackwardScratch<S>& s)
      : p(p), all(all), s(s) {
    for (T& one : ones) one = 1;
    fill_zero(s.dK.data, kTile * s.dK.row);
    fill_zero(s.dV.data, kTile * s.dV.row);
  }

  void run(Range heads) {
    ListedQueries queries = s.queries;
    queries.begin(heads);
    const Head first = queries.first();
    fill_zero(s.dQ.data, heads.count() * group * s.dQ.row);
    watch.lap(Phase::kPack);
    queries.each_visit(L, kTile, [&](const Head& head, int64_t i, Range places) {
      pack(head);
      for (int64_t n0 = places.begin; n0 < places.end; n0 += kTile) {
        const int64_t count = min(kTile, places.end - n0);
        add(head, queries.keys_of(head, {n0, n0 + count}), n0, count, s.dQ.from(i * group));
      }
    });
    for (int64_t i = 0; i < heads.count(); ++i) finish(first.later(i), s.dQ.from(i * group));
    watch.lap(Phase::kStore);
  }

 private:
  const BackwardParams& p;
  const SelectedSums<S>& all;
  const LaneBackwardScratch<S>& s;
  const int64_t group = group_size(p);
  const Score score{p};
  Stopwatch watch{p.cpu.counts};
  LaneMask<T> unmasked;  // softmax without a mask reads none
  T ones[kBlockQ<T>];

  void pack(const Head& head) {
    s.packed.pack(Mask(p, head), score, 0, 0, group);
    const Head next = head.later(1);
    prefetch_rows(0, group, p.head_dim, [&](int64_t r) { return next.row<const S>(p.q, r); });
    prefetch_rows(0, group, p.head_dim_v, [&](int64_t r) { return next.row<const S>(p.dout, r); });
    watch.lap(Phase::kPack);
  }

  // Adds the products of the packed query with keys of its list, from place n0 on.
  void add(const Head& head, const int32_t* keys, int64_t n0, int64_t count, Matrix<T> dQ) {
    const ListedRows<const S> K = listed_rows<S>(p, head, p.k, keys), V = listed_rows<S>(p, head, p.v, keys);
    const int64_t flops_k = 2 * group * count * p.head_dim, flops_v = 2 * group * count * p.head_dim_v;
    s.keys.scores(K, count, p.head_dim, s.packed.Qt(0), s.lanes, s.P);
    watch.lap(Phase::kScores, flops_k);
    s.keys.scores(V, count, p.head_dim_v, s.packed.dOt(0), s.lanes, s.dP);
    watch.lap(Phase::kdP, flops_v);
    softmax_gradient<false>(s.P, s.dP, Strip{0, s.lanes, 0, count}, unmasked, score, s.packed.terms_of(0));
    watch.lap(Phase::kSoftmax);
    const Strided<E> P = tile_over_lanes<S>(s.P, 0, count, 0, group, s.left_P);
    const Strided<E> dS = tile_over_lanes<S>(s.dP, 0, count, 0, group, s.left_dS);
    gemm<T>(count, 0, s.dV.row, terms<S>(group), P, s.packed.dO(head, 0), s.dV, Update<T>::add());
    watch.lap(Phase::kdV, flops_v);
    gemm<T>(count, 0, s.dK.row, terms<S>(group), dS, s.packed.Q(head, 0), s.dK, Update<T>::add());
    watch.lap(Phase::kdK, flops_k);
    const Strided<E> dSt = tile_over_keys<S>(s.dP, 0, count, 0, s.lanes, s.summed_dS).strided().transposed();
    s.keys.sum(K, count, p.head_dim, dSt, group, ones, dQ);
    watch.lap(Phase::kdQ, flops_k);
    all.take(head, n0, count, s.dK, s.dV);
    watch.lap(Phase::kStore);
  }

  void finish(const Head& head, Matrix<T> dQ) const {
    for (int64_t r = 0; r < group; ++r) {
      S* const dq = head.row<S>(p.dq, r);
      for (int64_t d = 0; d < p.head_dim; d += L) store(dq + min(d, p.head_dim - L), load(dQ.at(r) + d) * score.dscale);
    }
  }
};

// Each work item is some of the queries of a KV head.
template <class S, class Score>
void lane_backward(const BackwardParams& p, int64_t begin, int64_t end, void* scratch) {
  const LaneBackwardScratch<S> s(p, scratch);
  for (int64_t item = begin; item < end; ++item) {
    const SelectedSums<S> all(p, item);
    const Range heads = all.heads_of_queries();
    all.clear();
    LaneBackwardItem<S, Score> queries(p, all, s);
    for (int64_t first = heads.begin; first < heads.end; first += s.segments.queries)
      queries.run({first, min(first + s.segments.queries, heads.end)});
  }
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
