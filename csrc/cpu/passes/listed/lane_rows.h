// Queries whose rows lie on the lanes, in forward: S^T = K Q^T, then O = P V with columns on the lanes, so that both
// products read rows of K and V in place where operands are what is stored.
#pragma once

#include "cpu/passes/listed/listed_keys.h"
#include "cpu/passes/listed/queries.h"
#include "cpu/passes/stopwatch.h"
#include "cpu/tiles/softmax.h"

namespace pyattn::PYATTN_ISA {
namespace {

// The tile of a query, and the row statistics of an item's queries.
template <class S>
class LaneListedRows {
  using T = Compute<S>;
  using E = Operand<S>;

 public:
  static constexpr int64_t kTile = ListedKeys<S>::kTile;
  static constexpr int64_t kVisit = kLaneVisit, kRows = kLaneRows;

  LaneListedRows(const ForwardParams& p, int64_t queries, Carver& carver)
      : p_(p), rows_(group_size(p)), lanes_(round_up(rows_, kLanes<T>)), keys_(p, carver) {
    Q_ = carver.take<E>(query_terms<S>(p.head_dim), lanes_);
    P_ = carver.take<T>(kTile + kMostRepeated, lanes_);
    weights_ = carver.take<E>(kPairs<S> ? terms<S>(kTile) : 0, lanes_);
    row_max_ = carver.take<T>(queries * lanes_);
    row_sum_ = carver.take<T>(queries * lanes_);
  }

  // Begins with that many queries.
  void begin(int64_t queries) const {
    for (int64_t i = 0; i < queries * lanes_; ++i) row_max_[i] = kNegInf<T>;
    fill_zero(row_sum_, queries * lanes_);
  }

  template <class Score>
  void pack(const Head& head, const Score& score) const {
    pack_queries<S>(Q_, rows_, lanes_, p_.head_dim, score.power, [&](int64_t r) { return head.row<const S>(p_.q, r); });
  }

  // Adds the packed query's products with these keys to O, and to the statistics of query i.
  template <class Score>
  void add(const Head& head, int64_t i, const int32_t* keys, int64_t count, Matrix<T> O, const Score& score,
           Stopwatch& watch) {
    keys_.scores(listed_rows<S>(p_, head, p_.k, keys), count, p_.head_dim, Q_, lanes_, P_);
    watch.lap(Phase::kScores, 2 * rows_ * count * p_.head_dim);
    const int64_t bytes = lanes_ * static_cast<int64_t>(sizeof(T));
    __builtin_memcpy(state_.row_max, row_max_ + i * lanes_, bytes);
    __builtin_memcpy(state_.row_sum, row_sum_ + i * lanes_, bytes);
    softmax_strip<false>(P_, Strip{0, lanes_, 0, count}, unmasked_, score, state_);
    __builtin_memcpy(row_max_ + i * lanes_, state_.row_max, bytes);
    __builtin_memcpy(row_sum_ + i * lanes_, state_.row_sum, bytes);
    watch.lap(Phase::kSoftmax);
    const Strided<E> weights = tile_over_keys<S>(P_, 0, count, 0, lanes_, weights_).strided().transposed();
    keys_.sum(listed_rows<S>(p_, head, p_.v, keys), count, p_.head_dim_v, weights, rows_, state_.decay, O);
    watch.lap(Phase::kOut, 2 * rows_ * count * p_.head_dim_v);
  }

  // The statistics of query i.
  void statistics(int64_t i, T* row_max, T* row_sum) const {
    __builtin_memcpy(row_max, row_max_ + i * lanes_, rows_ * sizeof(T));
    __builtin_memcpy(row_sum, row_sum_ + i * lanes_, rows_ * sizeof(T));
  }

 private:
  const ForwardParams& p_;
  int64_t rows_, lanes_;
  ListedKeys<S> keys_;
  Matrix<E> Q_;            // [query_terms(head_dim)][lanes]
  Matrix<T> P_;            // [keys][lanes]
  Matrix<E> weights_;      // [terms(keys)][lanes]: P as an operand of bf16 pairs
  T *row_max_, *row_sum_;  // [queries][lanes]
  SoftmaxState<T> state_;  // of the query that is added
  LaneMask<T> unmasked_;   // softmax without a mask reads none
};

}  // namespace
}  // namespace pyattn::PYATTN_ISA
