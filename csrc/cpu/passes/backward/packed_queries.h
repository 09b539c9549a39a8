// Packed queries: everything in backward that depends on query
// rows alone, computed once for all key blocks of a super-block.
#pragma once

#include "cpu/plan/backward_splits.h"
#include "cpu/products/matrix.h"
#include "cpu/products/operand.h"
#include "cpu/products/pack.h"
#include "cpu/products/scratch.h"
#include "cpu/simd/simd.h"
#include "cpu/tiles/softmax_gradient.h"
#include "cpu/tiles/strips.h"
#include "shared/mask.h"

namespace pyattn::PYATTN_ISA {
namespace {

// Whether all keys of a row lie in one key block. Its delta is then computed in that block
// (softmax_gradient.h); other rows take rowsum(dO * O), which differs only by the rounding of O.
inline bool in_one_block(Range keys) {
  return !keys.empty() && keys.count() <= kBackwardBlockK &&
         keys.begin / kBackwardBlockK == (keys.end - 1) / kBackwardBlockK;
}

template <class S>
class PackedQueries {
  using T = Compute<S>;
  using E = Operand<S>;

 public:
  PackedQueries(const BackwardParams& p, Carver& carver) : p_(p), group_(group_size(p)) {
    const int64_t rows = super_block_rows(p), blocks = rows / kBlockQ<T>;
    const int64_t ld_k = round_up(p.head_dim, kLanes<T>), ld_v = round_up(p.head_dim_v, kLanes<T>);
    Qt_ = carver.take<E>(blocks * query_terms<S>(p.head_dim), kBlockQ<T>);
    dOt_ = carver.take<E>(blocks * query_terms<S>(p.head_dim_v), kBlockQ<T>);
    Q_ = carver.take_spread<E>(in_place(p.q, p.head_dim) ? 0 : terms<S>(rows), ld_k);
    dO_ = carver.take_spread<E>(in_place(p.dout, p.head_dim_v) ? 0 : terms<S>(rows), ld_v);
    row_max_ = carver.take<T>(rows);
    inverse_sum_ = carver.take<T>(rows);
    one_block_ = carver.take<T>(rows);
    sink_ = carver.take<T>(rows);
    delta_ = carver.take<T>(rows);
    dlse_ = carver.take<T>(rows);
  }

  // The rows of a super-block in whole blocks: at most kSuperBlock.
  static int64_t super_block_rows(const BackwardParams& p) {
    return min(round_up(most_rows(p), kBlockQ<T>), kSuperBlock);
  }

  // Packs one block, the rows [row, row + rows), into place i of the super-block.
  template <class Score>
  void pack(const Mask& mask, const Score& score, int64_t row, int64_t i, int64_t rows) const {
    const auto from = [&](const View& view) {
      return [&, row](int64_t r) { return mask.head.row<const S>(view, row + r); };
    };
    const int64_t lanes = round_up(rows, kLanes<T>);
    pack_queries<S>(Qt(i), rows, lanes, p_.head_dim, score.power, from(p_.q));
    pack_queries<S>(dOt(i), rows, lanes, p_.head_dim_v, T(1), from(p_.dout));
    if (!in_place(p_.q, p_.head_dim)) pack_summed_rows<S>(Q_.from(terms<S>(i)), rows, p_.head_dim, from(p_.q));
    if (!in_place(p_.dout, p_.head_dim_v))
      pack_summed_rows<S>(dO_.from(terms<S>(i)), rows, p_.head_dim_v, from(p_.dout));

    for (int64_t r = 0; r < lanes; ++r) {
      const Range keys = r < rows ? mask.exact_keys_of<S>(row + r) : Range{0, 0};
      RowTerms<T> terms = {};
      if (!keys.empty()) terms = terms_of_row<S>(p_, mask.head, row + r, !p_.part && in_one_block(keys), score);
      row_max_[i + r] = terms.row_max;
      inverse_sum_[i + r] = terms.inverse_sum;
      one_block_[i + r] = terms.at_once ? T(1) : T(0);
      sink_[i + r] = terms.sink;
      delta_[i + r] = terms.delta;
      dlse_[i + r] = terms.dlse;
    }
  }

  // The block at place i, transposed: [query_terms(head_dim)][queries] and [query_terms(head_dim_v)][queries].
  Matrix<E> Qt(int64_t i) const { return Qt_.from(i / kBlockQ<T> * query_terms<S>(p_.head_dim)); }
  Matrix<E> dOt(int64_t i) const { return dOt_.from(i / kBlockQ<T> * query_terms<S>(p_.head_dim_v)); }

  // The rows of the super-block that begins at row r0, [terms(rows)][cols], for a sum over rows.
  Matrix<const E> Q(const Head& head, int64_t r0) const { return rows(head, p_.q, r0, p_.head_dim, Q_); }
  Matrix<const E> dO(const Head& head, int64_t r0) const { return rows(head, p_.dout, r0, p_.head_dim_v, dO_); }

  BlockTerms<T> terms_of(int64_t i) const {
    return {row_max_ + i, inverse_sum_ + i, one_block_ + i, sink_ + i, delta_ + i, dlse_ + i};
  }

 private:
  const BackwardParams& p_;
  int64_t group_;
  Matrix<E> Qt_, dOt_;  // [blocks][query_terms(cols)][queries of a block]
  Matrix<E> Q_, dO_;    // [terms(rows)][cols]: copies, if the tensor can't be read in place
  T *row_max_, *inverse_sum_, *one_block_, *sink_, *delta_, *dlse_;  // [rows]

  bool in_place(const View& view, int64_t cols) const { return group_ == 1 && summed_in_place<S>(view, cols); }

  Matrix<const E> rows(const Head& head, const View& view, int64_t r0, int64_t cols, Matrix<E> packed) const {
    if constexpr (sizeof(S) == sizeof(T))
      if (in_place(view, cols)) return {head.row<const T>(view, r0), view.stride_s};
    return packed;
  }
};

}  // namespace
}  // namespace pyattn::PYATTN_ISA
