// Decoding is forward for few query rows, whose time goes into reading K and V. Columns lie on the
// lanes, and K and V are read in place. The keys of a head are split among work items (split-K);
// each item stores a partial result in the workspace, and merge.h combines these.
#pragma once

#include "cpu/passes/decode_item.h"
#include "cpu/passes/stopwatch.h"
#include "cpu/products/lines_ahead.h"

namespace pyattn::PYATTN_ISA {
namespace {

// Keys are multiplied in turns, of which each prefetches a later one. Where the rows of several heads are neighbours in
// memory, these heads take each turn one after another: memory is read in the order of addresses, and its lines stay in
// L2 until each head has had its turn. Rows of 8 bits take twice as many keys: with 16, too few bytes are on their way, and
// the product with V takes 1.25 times as long.
template <class KV>
inline constexpr int64_t kTurnKeys = sizeof(KV) == 1 ? 32 : 16;

// Computes the work items of `heads` KV heads of a sequence, from `first` on, for one range of keys. An item has the
// same bits alone and together with others.
template <class S, template <class> class Score, class KV = S>
void decode_keys(const ForwardParams& p, int64_t first, int64_t heads, int64_t split, const DecodeScratch<S, KV>& s) {
  using T = Compute<S>;
  constexpr int L = kLanes<T>;
  const auto item = [&](int64_t h) { return DecodeItem<S, Score, KV>(p, first + h, split, s.of(h)); };
  const DecodeItem<S, Score, KV> one = item(0);
  const auto each = [&](auto f) {
    f(one, 0);
    for (int64_t h = 1; h < heads; ++h) f(item(h), h);
  };
  const int64_t rows = one.rows;
  const Range keys = one.keys;
  bool alike = true;  // whether all heads see the same keys; without summaries they do
  if (heads > 1 && p.mask.blocks) each([&](const auto& other, int64_t) { alike = alike && other.sees_exactly(keys); });
  if (!alike) return each([&](const auto&, int64_t h) { decode_keys<S, Score, KV>(p, first + h, 1, split, s); });

  Stopwatch watch(p.cpu.counts);
  each([](const auto& item, int64_t) { item.start(); });
  watch.lap(Phase::kPack);
  const auto run = [&](auto k_rows, auto v_rows) {  // of the first head, each a Matrix or a RowTable
    using Rows = decltype(k_rows);
    const bool asks = kAsksAhead<KV, Rows, 1> || rows > 1;
    const int64_t turn = asks ? kTurnKeys<KV> : kDecodeBlockK;
    const int64_t distance = turn * turns_ahead(heads * turn * p.head_dim * int64_t{sizeof(KV)});
    for (int64_t n0 = keys.begin; n0 < keys.end; n0 += kDecodeBlockK) {
      const Tile tile{0, rows, rows, n0, min(kDecodeBlockK, keys.end - n0)};
      if (one.mask.intervals() > 1 && !one.mask.in_any(0, rows, n0, tile.keys)) continue;
      const Rows K = k_rows.from(n0 - keys.begin), V = v_rows.from(n0 - keys.begin);
      const auto keys_ahead = [&](int64_t j) {
        const int64_t count = asks ? min(kTurnKeys<KV>, keys.end - n0 - j) : 0;
        return RowsAhead<Rows>{K.from(j), count, p.head_dim, heads, p.k.stride_h};
      };
      const auto values_ahead = [&](int64_t j) {
        const int64_t count = asks ? min(kTurnKeys<KV>, tile.keys - j) : 0;
        return RowsAhead<Rows>{V.from(j), count, p.head_dim_v, heads, p.v.stride_h};
      };
      for (int64_t j0 = 0; j0 < tile.keys; j0 += turn) {
        const int64_t next = j0 + distance;
        auto ahead = next < tile.keys ? keys_ahead(next) : values_ahead(next - round_up(tile.keys, turn));
        for (int64_t h = 0; h < heads; ++h)
          for (int64_t j = j0; j < min(j0 + turn, tile.keys); j += L)
            dots<KV>(rows, tile.keys - j, p.head_dim, s.of(h).products.Q, K.from(j).from_column(h * p.k.stride_h),
                     {s.of(h).P.data + j, s.P.row}, [&](int64_t, int64_t n) {
                       for (int64_t k = 0; k < n; ++k) ahead.take_one();
                     });
      }
      each([&](const auto& item, int64_t) { item.to_scores(tile); });
      watch.lap(Phase::kScores, 2 * heads * rows * tile.keys * p.head_dim);
      each([&](const auto& item, int64_t) { item.weigh(tile); });
      watch.lap(Phase::kSoftmax);
      const bool sees_all = one.mask.sees_all(0, rows, n0, tile.keys);
      each([&](const auto& item, int64_t) { item.scale_weights(tile, sees_all); });
      if (sees_all || FewProducts<S, KV>::kFiniteValues) {
        for (int64_t j0 = 0; j0 < tile.keys; j0 += turn) {
          const int64_t next = j0 + distance, after = next - round_up(tile.keys, turn);
          auto ahead = after < 0 ? values_ahead(next) : keys_ahead(tile.keys + after);
          for (int64_t h = 0; h < heads; ++h)
            s.of(h).products.add_values(rows, min(turn, tile.keys - j0), p.head_dim_v, s.of(h).P.from_column(j0), j0,
                                        V.from(j0).from_column(h * p.v.stride_h), ahead);
        }
        each([](const auto& item, int64_t) { item.add_product(); });
      } else {
        each([&](const auto& item, int64_t h) {
          BlockProduct<S, Rows>(p, item.mask, tile, item.s.P, V.from_column(h * p.v.stride_h)).add_to(item.part.O);
        });
      }
      watch.lap(Phase::kOut, 2 * heads * rows * tile.keys * p.head_dim_v);
    }
  };
  if (!keys.empty()) {
    const KeyRun<KV> K = key_run<KV>(p, one.head, p.k, keys), V = key_run<KV>(p, one.head, p.v, keys);
    if (heads == 1 && K.count == keys.count() && V.count == keys.count()) {
      run(K.rows, V.rows);
    } else {
      const RowTable<const KV> listed = list_rows<KV>(p, one.head, p.k, keys, s.k_rows);
      const int64_t first = min(kTurnKeys<KV>, keys.count());  // they arrive while values are listed
      RowsAhead<RowTable<const KV>>{listed, first, p.head_dim, heads, p.k.stride_h}.take(first * heads);
      run(listed, list_rows<KV>(p, one.head, p.v, keys, s.v_rows));
    }
  }
  each([](const auto& item, int64_t) { item.finish(); });
  watch.lap(Phase::kStore);
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
