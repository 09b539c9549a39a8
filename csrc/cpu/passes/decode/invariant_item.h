// Decoding of invariant rows: a work item whose sums have the order of forward_item.h, so a row has the bits that it has
// in a block of rows. Blocks of keys lie at multiples of kInvariantBlockK. Scores are summed over columns, with keys on the
// lanes; row sums and O over the keys of a block, and O is rescaled as the block is added.
#pragma once

#include "cpu/plan/forward_splits.h"
#include "cpu/products/few/few_products.h"
#include "cpu/products/operand.h"
#include "cpu/products/ordered_dots.h"
#include "cpu/products/pack.h"
#include "cpu/products/product.h"
#include "cpu/tiles/few_rows.h"
#include "shared/mask.h"

namespace pyattn::PYATTN_ISA {
namespace {

// Item: a DecodeItem, which this is in all but its sums.
template <class Item>
struct InvariantItem : Item {
  using S = typename Item::Element;
  using T = Compute<S>;
  using E = Operand<S>;
  using Scratch = typename Item::Scratch;
  static constexpr int L = kLanes<T>;
  static constexpr int64_t kBlockK = kInvariantBlockK, kSumKeys = kBlockK;
  using Item::p, Item::s, Item::rows, Item::part, Item::mask;

  using Item::Item;

  static int64_t block_end(int64_t n0) { return round_down(n0, kBlockK) + kBlockK; }

  static_assert(kInvariantTurn <= kLongTurn);
  static int64_t turn_keys(int64_t) { return kInvariantTurn; }

  // Squares of K take lines of 16 rows at once, which the hardware's prefetcher does not follow.
  template <class Rows>
  static bool prefetches(int64_t) {
    return true;
  }

  void start() const {
    constexpr int64_t kWidth = kColumns<S> * kLanes<E>;
    for (int64_t r = 0; r < rows; ++r) {
      const S* q = this->head.template row<const S>(p.q, r);
      for (int64_t d = 0; d < p.head_dim; d += kWidth)
        store(s.products.Q.from(r).data + d / kColumns<S>,
              scale_operands(load_operands(q + d, min(kWidth, p.head_dim - d)), this->score.power));
      part.row_max[r] = kNegInf<T>, part.row_sum[r] = 0;
    }
    fill_zero(part.O.data, rows * part.O.row);
    fill_zero(s.products.O.data, rows * s.products.O.row);
  }

  template <class Rows>
  static void multiply_keys(const ForwardParams& p, const Scratch& s, const Tile& tile, Range turn, Rows K,
                            RowsAhead<Rows>& ahead) {
    ordered_dots<S>(tile.rows, turn.count(), p.head_dim, s.products.Q, K.from(turn.begin), s.P.from_column(turn.begin),
                    ahead);
  }

  template <class Rows>
  static void multiply_values(const ForwardParams& p, const Scratch& s, const Tile& tile, Range turn, Rows V,
                              RowsAhead<Rows>& ahead) {
    if constexpr (kPairs<S>)
      Item::add_pairs_of_turn(p, s, tile, turn, V, ahead);
    else
      Item::multiply_values(p, s, tile, turn, V, ahead);
  }

  template <class Rows>
  void add_seen_values(const Tile& tile, Rows V) const {
    if (all_finite<S>(tile.keys, p.head_dim_v, [&](int64_t j) { return V.at(j); })) {
      RowsAhead<Rows> none{};
      for (int64_t j = 0; j < tile.keys; j += kInvariantTurn)
        multiply_values(p, s, tile, {j, min(j + kInvariantTurn, tile.keys)}, V, none);
    } else if constexpr (kPairs<S>) {
      pack_summed_rows<S>(s.V, tile.keys, p.head_dim_v, [&](int64_t i) { return V.at(i); });
      add_seen(tile, s.W.strided(), Matrix<const E>(s.V));
    } else {
      add_seen(tile, s.P.strided(), V);
    }
    add_product();
  }

  // Scores in s.P -> weights, 0 where masked, and their sums.
  void weigh(const Tile& tile) const {
    for (int64_t r = 0; r < rows; ++r)
      s.decay[r] = softmax_row_whole(s.P.from(r).data, tile.keys, mask_scores<S>(mask, tile, r, s.P.from(r).data),
                                     this->score, part.row_max[r]);
    sum_rows_in_order(s.P, rows, tile.keys, s.decay, part.row_sum);
    if constexpr (kPairs<S>) this->pair_weights(tile);
  }

  // O = O * decay + s.products.O, the product of a block.
  void add_product() const {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t d = 0; d < s.products.O.row; d += L) {
        T* const o = part.O.from(r).data + d;
        T* const product = s.products.O.from(r).data + d;
        store(o, fma(load(o), set1(s.decay[r]), load(product)));
        store(product, vec<T>{});
      }
  }

  void finish() const {}

 private:
  // s.products.O += P V, without the pairs of a row and a key that it does not see.
  template <class Rows>
  void add_seen(const Tile& tile, Strided<E> weights, Rows values) const {
    const int64_t inner = terms<S>(tile.keys), whole = round_down(p.head_dim_v, L);
    const auto seen = [&](int64_t r, int64_t, int64_t k) {
      return set1(static_cast<T>(k < tile.keys && mask.template sees<S>(r, tile.n0 + k))) != vec<T>{};
    };
    gemm_seen<T, E, Rows>(rows, 0, whole, inner, weights, values, s.products.O, Update<T>::add(), seen);
    if (whole < p.head_dim_v)
      gemm_seen<T, E, Rows>(rows, 0, L, inner, weights, values.from_column(p.head_dim_v - L),
                            s.products.O.from_column(whole), Update<T>::add(), seen);
  }
};

}  // namespace
}  // namespace pyattn::PYATTN_ISA
