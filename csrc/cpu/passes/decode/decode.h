// Decoding is forward for few query rows, whose time goes into reading K and V, in place. The keys of a head are split
// among work items (split-K); each stores a partial result in the workspace, and merge.h combines these. An item that takes
// all keys of a head writes the head's results.
//
// Keys are multiplied in turns. Each turn prefetches one at a fixed distance, in the order in which they are read: K of a
// block, its V, then K of the next block. Where the rows of several heads are neighbours in memory, these heads take each turn
// one after another: memory is read in the order of addresses, and its lines stay in L2 until each head has had its turn.
#pragma once

#include "cpu/passes/stopwatch.h"
#include "cpu/products/lines_ahead.h"
#include "cpu/tiles/keys.h"
#include "cpu/tiles/strips.h"

namespace pyattn::PYATTN_ISA {
namespace {

// Computes the work items of `heads` KV heads of a sequence, from `first` on, for one range of keys. An item has the
// same bits alone and together with others.
template <class Item>
void decode_keys(const ForwardParams& p, int64_t first, int64_t heads, int64_t split, const typename Item::Scratch& s) {
  using KV = typename Item::Stored;
  const auto item = [&](int64_t h) { return Item(p, first + h, split, s.of(h)); };
  const Item one = item(0);
  const auto each = [&](auto f) {
    f(one, 0);
    for (int64_t h = 1; h < heads; ++h) f(item(h), h);
  };
  const int64_t rows = one.rows;
  const Range keys = one.keys;
  const auto sees_exactly = [&](const auto& other) {
    return keys.lies_in(other.keys) && other.keys.lies_in(keys) &&
           other.mask.sees_all(0, rows, keys.begin, keys.count());
  };
  bool alike = true;  // whether all heads see the same keys; without summaries they do
  if (heads > 1 && p.mask.blocks) each([&](const auto& other, int64_t) { alike = alike && sees_exactly(other); });
  if (!alike) return each([&](const auto&, int64_t h) { decode_keys<Item>(p, first + h, 1, split, s); });

  Stopwatch watch(p.cpu.counts);
  each([](const auto& item, int64_t) { item.start(); });
  watch.lap(Phase::kPack);
  const auto run = [&](auto k_rows, auto v_rows) {  // of the first head, each a Matrix or a RowTable
    using Rows = decltype(k_rows);
    const bool asks = Item::template prefetches<Rows>(rows);
    const int64_t turn = asks ? Item::turn_keys(rows) : Item::kSumKeys;
    const int64_t distance = turn * turns_ahead(heads * turn * p.head_dim * int64_t{sizeof(KV)});
    for (int64_t n0 = keys.begin, next; n0 < keys.end; n0 = next) {
      next = min(Item::block_end(n0), keys.end);
      const Tile tile{0, rows, rows, n0, next - n0};
      if (one.mask.intervals() > 1 && !one.mask.in_any(0, rows, n0, tile.keys)) continue;
      const Rows K = k_rows.from(n0 - keys.begin), V = v_rows.from(n0 - keys.begin);
      // The rows of a turn from key j of the tile on, of all heads.
      const auto ahead_of = [&](Rows rows, int64_t cols, int64_t stride, int64_t j) {
        const int64_t count = asks ? min(turn, keys.end - n0 - j) : 0;
        return RowsAhead<Rows>(rows.from(j), count, cols, heads, stride, p.cpu.prefetch_to_l2);
      };
      const auto keys_ahead = [&](int64_t j) { return ahead_of(K, p.head_dim, p.k.stride_h, j); };
      const auto values_ahead = [&](int64_t j) { return ahead_of(V, p.head_dim_v, p.v.stride_h, j); };
      each([&](const auto& item, int64_t) { item.list_key_scales(tile); });
      for (int64_t j0 = 0; j0 < tile.keys; j0 += turn) {
        const int64_t later = j0 + distance, after = later - round_up(tile.keys, turn);
        auto ahead = after < 0 ? keys_ahead(later) : values_ahead(after);
        for (int64_t h = 0; h < heads; ++h)
          Item::multiply_keys(p, s.of(h), tile, {j0, min(j0 + turn, tile.keys)}, K.from_column(h * p.k.stride_h),
                              ahead);
      }
      each([&](const auto& item, int64_t) { item.to_scores(tile); });
      watch.lap(Phase::kScores, 2 * heads * rows * tile.keys * p.head_dim);
      each([&](const auto& item, int64_t) { item.weigh(tile); });
      watch.lap(Phase::kSoftmax);
      const bool sees_all = one.mask.sees_all(0, rows, n0, tile.keys);
      each([&](const auto& item, int64_t) { item.scale_weights(tile, sees_all); });
      if (sees_all || Item::kFiniteValues) {
        for (int64_t j0 = 0; j0 < tile.keys; j0 += turn) {
          const int64_t later = j0 + distance, after = later - round_up(tile.keys, turn);
          auto ahead = after < 0 ? values_ahead(later) : keys_ahead(tile.keys + after);
          for (int64_t h = 0; h < heads; ++h)
            Item::multiply_values(p, s.of(h), tile, {j0, min(j0 + turn, tile.keys)}, V.from_column(h * p.v.stride_h),
                                  ahead);
          const int64_t done = min(j0 + turn, tile.keys);
          if (done % Item::kSumKeys == 0 || done == tile.keys)
            each([](const auto& item, int64_t) { item.add_product(); });
        }
      } else {
        each([&](const auto& item, int64_t h) { item.add_seen_values(tile, V.from_column(h * p.v.stride_h)); });
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
      const int64_t first = min(Item::turn_keys(rows), keys.count());  // they arrive while values are listed
      RowsAhead<RowTable<const KV>>(listed, first, p.head_dim, heads, p.k.stride_h, p.cpu.prefetch_to_l2).take_all();
      run(listed, list_rows<KV>(p, one.head, p.v, keys, s.v_rows));
    }
  }
  each([](const auto& item, int64_t) { item.finish(), item.write(); });
  watch.lap(Phase::kStore);
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
