// Decoding of invariant rows: a work item whose sums have the order of forward_item.h, so a row has the bits that it has
// in a block of rows. Blocks of keys lie at multiples of kInvariantBlockK. Scores are summed over columns, with keys on the
// lanes; row sums and O over the keys of a block, and O is rescaled as the block is added.
#pragma once

#include "cpu/plan/forward_splits.h"
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
  static constexpr int64_t kBlockK = kInvariantBlockK, kTurnKeys = kInvariantTurn;
  static constexpr bool kTileAhead = true;
  using Item::p, Item::s, Item::rows, Item::part, Item::mask;

  using Item::Item;

  static int64_t block_end(int64_t n0) { return round_down(n0, kBlockK) + kBlockK; }

  // Whether products prefetch later keys.
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

  template <class Rows, class Ahead>
  static void multiply_keys(const ForwardParams& p, const Scratch& s, const Tile& tile, Range turn, Rows K,
                            Ahead& ahead) {
    ordered_dots<S>(tile.rows, turn.count(), p.head_dim, s.products.Q, K.from(turn.begin), s.P.from_column(turn.begin),
                    ahead.rows, ahead.count);
  }

  template <class Rows, class Ahead>
  static void multiply_values(const ForwardParams& p, const Scratch& s, const Tile& tile, Range turn, Rows V,
                              Ahead& ahead) {
    with_operands(p, s, tile, turn, V.from(turn.begin), [&](int64_t terms, Strided<E> weights, auto values) {
      add_values<S>(tile.rows, terms, p.head_dim_v, weights, values, s.products.O, [&] {
        for (int i = 0; i < kColumns<S>; ++i) ahead.take_one();
      });
    });
  }

  template <class Rows>
  void add_seen_values(const Tile& tile, Rows V) const {
    with_operands(p, s, tile, {0, tile.keys}, V, [&](int64_t terms, Strided<E> weights, auto values) {
      if (all_finite<S>(tile.keys, p.head_dim_v, [&](int64_t j) { return V.at(j); }))
        return add_values<S>(rows, terms, p.head_dim_v, weights, values, s.products.O, [] {});
      const int64_t whole = round_down(p.head_dim_v, L);
      const auto seen = [&](int64_t r, int64_t, int64_t k) {
        return set1(static_cast<T>(k < tile.keys && mask.template sees<S>(r, tile.n0 + k))) != vec<T>{};
      };
      gemm_seen<T, E, decltype(values)>(rows, 0, whole, terms, weights, values, s.products.O, Update<T>::add(), seen);
      if (whole < p.head_dim_v)
        gemm_seen<T, E, decltype(values)>(rows, 0, L, terms, weights, values.from_column(p.head_dim_v - L),
                                          s.products.O.from_column(whole), Update<T>::add(), seen);
    });
    add_product();
  }

  // Scores in s.P -> weights, 0 where masked.
  void weigh(const Tile& tile) const {
    for (int64_t r = 0; r < rows; ++r) {
      const Range seen = this->mask_scores(tile, r);
      s.decay[r] =
          softmax_row_in_order(s.P.from(r).data, tile.keys, seen, this->score, part.row_max[r], part.row_sum[r]);
    }
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
  // Calls f(terms, weights, values) with the operands of O += P V for some keys of the tile.
  template <class Rows, class F>
  static void with_operands(const ForwardParams& p, const Scratch& s, const Tile& tile, Range keys, Rows V, F f) {
    if constexpr (kPairs<S>) {
      pack_summed_rows<S>(s.V, keys.count(), p.head_dim_v, [&](int64_t i) { return V.at(i); });
      const int64_t last = round_up(keys.end, 2 * L);  // weights are 0 from tile.keys on
      tile_over_lanes<S>(s.P, 0, tile.rows, keys.begin, min(last, s.P.row), s.W);
      f(terms<S>(keys.count()), s.W.strided().from(0, keys.begin / 2), Matrix<const E>(s.V));
    } else {
      f(keys.count(), s.P.strided().from(0, keys.begin), V);
    }
  }
};

}  // namespace
}  // namespace pyattn::PYATTN_ISA
