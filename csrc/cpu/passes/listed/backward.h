// Backward of queries that run through segments of their keys. P and dP have keys on the lanes; dV and dK of a key are
// added to the sums of all keys in place (plan/selected_sums.h), and dQ waits in scratch:
//
//   dV += P^T dO      dP = dO V^T      dS = P * (dP - delta + dlse)      dK += dS^T Q      dQ += dS K
#pragma once

#include "cpu/passes/listed/queries.h"
#include "cpu/passes/stopwatch.h"
#include "cpu/plan/selected_sums.h"
#include "cpu/plan/units.h"
#include "cpu/products/listed_rows.h"
#include "cpu/tiles/softmax_gradient.h"

namespace pyattn::PYATTN_ISA {
namespace {

template <class S>
struct ListedBackwardScratch {
  using T = Compute<S>;
  Segments segments;
  Carver carver;
  ListedQueries queries;
  Matrix<Operand<S>> left_Q, left_dO;  // [rows of a query][few_terms(head_dim)], [..][few_terms(head_dim_v)]
  Matrix<T> Q, dO;                     // [rows of a query][columns_k], [..][columns_v]
  Matrix<T> P, dP;                     // [rows of a query][keys]
  Matrix<T> dQ;                        // [rows][columns_k, as in dots.h]
  RowTerms<T>* terms;                  // [rows]
  int64_t bytes;

  ListedBackwardScratch(const ForwardParams& p, void* base)
      : segments(Segments::of(p, sizeof(S) + sizeof(T), kBackwardVisit, kListedRows)),
        carver(base),
        queries(p, segments, carver) {
    const int64_t group = group_size(p), rows = segments.queries * group;
    left_Q = carver.take<Operand<S>>(group, few_terms<S>(p.head_dim));
    left_dO = carver.take<Operand<S>>(group, few_terms<S>(p.head_dim_v));
    Q = carver.take<T>(group, columns_k<S>(p));
    dO = carver.take<T>(group, columns_v<S>(p));
    P = carver.take<T>(group, kListedTile);
    dP = carver.take<T>(group, kListedTile);
    dQ = carver.take<T>(rows, columns_k<S>(p));
    terms = carver.take<RowTerms<T>>(rows);
    bytes = carver.bytes();
  }
};

template <class S>
Plan plan_listed_backward(const BackwardParams& p) {
  return {SelectedSums<S>::items(p), ListedBackwardScratch<S>(p, nullptr).bytes, SelectedSums<S>::bytes(p)};
}

// Queries of an item of backward, whose dK and dV are added to `all`.
template <class S, class Score>
class ListedBackwardItem {
  using T = Compute<S>;
  static constexpr int L = kLanes<T>;
  // A query with so few keys gets delta from its weights, as rows of one block do (softmax_gradient.h).
  static constexpr int64_t kAtOnce = kBackwardBlockK;
  static_assert(kAtOnce <= kListedTile);

 public:
  ListedBackwardItem(const BackwardParams& p, const SelectedSums<S>& all, ListedBackwardScratch<S>& s)
      : p(p), all(all), s(s) {}

  void run(Range heads) {
    s.queries.begin(heads);
    const Head first = s.queries.first();
    for (int64_t i = 0; i < heads.count(); ++i) begin(first.later(i), i);
    fill_zero(s.dQ.data, heads.count() * group * s.dQ.row);
    watch.lap(Phase::kPack);
    s.queries.each_visit(kLanes<T>, kAtOnce,
                         [&](const Head& head, int64_t i, Range places) { visit(head, i, places); });
    for (int64_t i = 0; i < heads.count(); ++i) finish(first.later(i), i);
    watch.lap(Phase::kStore);
  }

 private:
  const BackwardParams& p;
  const SelectedSums<S>& all;
  ListedBackwardScratch<S>& s;
  const int64_t group = group_size(p);
  const Score score{p};
  Stopwatch watch{p.cpu.counts};

  auto rows_of(const Head& head, const View& view) const {
    return [&head, &view](int64_t r) { return head.row<const S>(view, r); };
  }

  void begin(const Head& head, int64_t i) const {
    Range& left = s.queries.left(i);
    bool any = false;
    for (int64_t r = 0; r < group; ++r) {
      RowTerms<T>& terms = s.terms[i * group + r];
      terms = {};
      if (!left.empty()) terms = terms_of_row<S>(p, head, r, left.count() <= kAtOnce, score);
      any = any || terms.adds;
    }
    if (!any) left = {0, 0};
  }

  // Adds the keys at these places of a query's list.
  void visit(const Head& head, int64_t i, Range places) {
    pack_few_queries<S>(s.left_Q, group, p.head_dim, score.power, rows_of(head, p.q));
    pack_few_queries<S>(s.left_dO, group, p.head_dim_v, T(1), rows_of(head, p.dout));
    const Matrix<const T> Q = summed(head, p.q, p.head_dim, s.Q), dO = summed(head, p.dout, p.head_dim_v, s.dO);
    const Head next = head.later(1);
    prefetch_rows(0, group, p.head_dim, rows_of(next, p.q));
    prefetch_rows(0, group, p.head_dim_v, rows_of(next, p.dout));
    watch.lap(Phase::kPack);
    const Matrix<T> dK = all.dK(), dV = all.dV();
    T ones[kDecodeRows];
    for (T& one : ones) one = 1;
    for (int64_t n0 = places.begin; n0 < places.end; n0 += kListedTile) {
      const int64_t count = min(kListedTile, places.end - n0);
      const int64_t flops_k = 2 * group * count * p.head_dim, flops_v = 2 * group * count * p.head_dim_v;
      const int32_t* const keys = s.queries.keys_of(head, {n0, n0 + count});
      const ListedRows<const S> K = listed_rows<S>(p, head, p.k, keys), V = listed_rows<S>(p, head, p.v, keys);
      listed_dots<S>(group, count, p.head_dim, s.left_Q, K, s.P);
      watch.lap(Phase::kScores, flops_k);
      listed_dots<S>(group, count, p.head_dim_v, s.left_dO, V, s.dP);
      watch.lap(Phase::kdP, flops_v);
      for (int64_t r = 0; r < group; ++r) weigh(i, r, count);
      watch.lap(Phase::kSoftmax);
      const ListedRows<T> listed_dV{dV.data, dV.row, keys}, listed_dK{dK.data, dK.row, keys};
      if (group == 1 && p.head_dim == dK.row && dK.row == dV.row) {
        ListedGradients<S>{s.P.data, s.dP.data, dO.data, Q.data, listed_dV, listed_dK, K, s.dQ.at(i)}.add(count,
                                                                                                          dK.row);
        watch.lap(Phase::kdK, 2 * flops_k + flops_v);
        continue;
      }
      spread_to_listed_rows<T>(group, count, dV.row, s.P, dO, listed_dV);
      watch.lap(Phase::kdV, flops_v);
      spread_to_listed_rows<T>(group, count, dK.row, s.dP, Q, listed_dK);
      watch.lap(Phase::kdK, flops_k);
      sum_listed_rows<S>(group, count, p.head_dim, s.dP, K, ones, s.dQ.from(i * group));
      watch.lap(Phase::kdQ, flops_k);
    }
  }

  // The rows of a query as factors of sums over them, [rows][columns in whole vectors]: in place, or packed.
  Matrix<const T> summed(const Head& head, const View& view, int64_t cols, Matrix<T> buffer) const {
    if constexpr (kInPlace<S>)
      if (cols % L == 0) return {head.row<const T>(view, 0), view.stride_h};
    pack_rows<S>(buffer, group, cols, rows_of(head, view));
    return buffer;
  }

  // Scores in s.P -> weights, and dP -> dS, of one row of a query.
  void weigh(int64_t i, int64_t r, int64_t keys) const {
    T *const weights = s.P.at(r), *const dp = s.dP.at(r);
    RowTerms<T>& terms = s.terms[i * group + r];
    const int64_t end = round_up(keys, L);
    if (!terms.adds) return fill_zero(weights, end), fill_zero(dp, end);
    for (int64_t k = keys; k < end; ++k) weights[k] = kNegInf<T>, dp[k] = 0;
    const vec<T> row_max = set1(terms.row_max), inverse_sum = set1(terms.inverse_sum);
    for (int64_t k = 0; k < end; k += L) store(weights + k, score.exp(load(weights + k) - row_max) * inverse_sum);
    if (terms.at_once) center(weights, dp, end, terms);
    const vec<T> delta = set1(terms.delta), dlse = set1(terms.dlse);
    for (int64_t k = 0; k < end; k += L) store(dp + k, load(weights + k) * (load(dp + k) - delta + dlse));
  }

  // delta and dlse of a row all of whose weights are at hand, as center in softmax_gradient.h computes them.
  static void center(const T* weights, const T* dp, int64_t end, RowTerms<T>& terms) {
    vec<T> weighted = {}, total = {}, rest = {};
    for (int64_t k = 0; k < end; k += L) {
      weighted = fma(load(weights + k), load(dp + k), weighted);
      total += load(weights + k);
    }
    const T sum = terms.sink + add_lanes<T>(total);
    terms.delta = add_lanes<T>(weighted) / sum;
    for (int64_t k = 0; k < end; k += L) rest = fma(load(weights + k), load(dp + k) - set1(terms.delta), rest);
    terms.dlse -= (add_lanes<T>(rest) - terms.sink * terms.delta) / sum;
  }

  void finish(const Head& head, int64_t i) const {
    for (int64_t r = 0; r < group; ++r) {
      S* const dq = head.row<S>(p.dq, r);
      const T* const sums = s.dQ.at(i * group + r);
      for (int64_t d = 0; d < p.head_dim; d += L) store(dq + min(d, p.head_dim - L), load(sums + d) * score.dscale);
    }
  }
};

// Each work item is some of the queries of a KV head.
template <class S, class Score>
void listed_backward(const BackwardParams& p, int64_t begin, int64_t end, void* scratch) {
  ListedBackwardScratch<S> s(p, scratch);
  for (int64_t item = begin; item < end; ++item) {
    const SelectedSums<S> all(p, item);
    const Range heads = all.heads_of_queries();
    all.clear();
    ListedBackwardItem<S, Score> queries(p, all, s);
    for (int64_t first = heads.begin; first < heads.end; first += s.segments.queries)
      queries.run({first, min(first + s.segments.queries, heads.end)});
  }
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
