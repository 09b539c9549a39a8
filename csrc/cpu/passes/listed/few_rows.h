// Queries of few rows, in forward: S[rows][keys] has keys on the lanes, and rows of K and V are read in place.
#pragma once

#include "cpu/passes/listed/queries.h"
#include "cpu/passes/stopwatch.h"
#include "cpu/products/listed_rows.h"
#include "cpu/tiles/few_rows.h"

namespace pyattn::PYATTN_ISA {
namespace {

// The tile of a query, and the row statistics of an item's queries.
template <class S>
class FewListedRows {
  using T = Compute<S>;
  static constexpr int L = kLanes<T>;

 public:
  static constexpr int64_t kTile = kListedTile;
  static constexpr int64_t kVisit = kForwardVisit, kRows = kListedRows;

  FewListedRows(const ForwardParams& p, int64_t queries, Carver& carver) : p_(p), rows_(group_size(p)) {
    Q_ = carver.take<Operand<S>>(rows_, few_terms<S>(p.head_dim));
    P_ = carver.take<T>(rows_, kTile);
    row_max_ = carver.take<T>(queries * rows_);
    row_sum_ = carver.take<T>(queries * rows_ * L);
  }

  // Begins with that many queries.
  void begin(int64_t queries) const {
    for (int64_t i = 0; i < queries * rows_; ++i) row_max_[i] = kNegInf<T>;
    fill_zero(row_sum_, queries * rows_ * L);
  }

  template <class Score>
  void pack(const Head& head, const Score& score) const {
    pack_few_queries<S>(Q_, rows_, p_.head_dim, score.power, [&](int64_t r) { return head.row<const S>(p_.q, r); });
  }

  // Adds the packed query's products with these keys to O, and to the statistics of query i.
  template <class Score>
  void add(const Head& head, int64_t i, const int32_t* keys, int64_t count, Matrix<T> O, const Score& score,
           Stopwatch& watch) const {
    listed_dots<S>(rows_, count, p_.head_dim, Q_, listed_rows<S>(p_, head, p_.k, keys), P_);
    watch.lap(Phase::kScores, 2 * rows_ * count * p_.head_dim);
    T decay[kDecodeRows];
    for (int64_t r = 0; r < rows_; ++r)
      decay[r] = softmax_row(P_.at(r), Range{0, count}, score, row_max_[i * rows_ + r], row_sum_ + (i * rows_ + r) * L);
    watch.lap(Phase::kSoftmax);
    sum_listed_rows<S>(rows_, count, p_.head_dim_v, P_, listed_rows<S>(p_, head, p_.v, keys), decay, O);
    watch.lap(Phase::kOut, 2 * rows_ * count * p_.head_dim_v);
  }

  // The statistics of query i.
  void statistics(int64_t i, T* row_max, T* row_sum) const {
    for (int64_t r = 0; r < rows_; ++r) {
      row_max[r] = row_max_[i * rows_ + r];
      row_sum[r] = add_lanes<T>(load(row_sum_ + (i * rows_ + r) * L));
    }
  }

 private:
  const ForwardParams& p_;
  int64_t rows_;
  Matrix<Operand<S>> Q_;   // [rows][few_terms(head_dim)]
  Matrix<T> P_;            // [rows][keys]
  T *row_max_, *row_sum_;  // [queries][rows], [queries][rows][lanes]
};

}  // namespace
}  // namespace pyattn::PYATTN_ISA
