// Dropout: the seed and the place of a weight alone decide whether it is
// dropped, by Philox4x32-10 (Salmon et al. 2011). Tiles, threads and instruction
// sets therefore change nothing, and backward repeats the draws of forward.
//
//   key      the 64-bit seed
//   counter  (j / 8, i, low, high word of b * num_heads_q + h) for key j, query i of head h of sequence b
//   draw     for key j: 16 bits of word (j % 8) / 2, the low half for even j
//   kept     if draw >= threshold, and then scaled by 65536 / (65536 - threshold)
//
// With DropoutParams::origins, j, i, h, b and num_heads_q are those of the larger call.
#pragma once

#include "cpu/simd/simd.h"
#include "cpu/tiles/strips.h"
#include "shared/dropout.h"
#include "shared/selected_keys.h"

namespace pyattn::PYATTN_ISA {
namespace {

static_assert(kStripKeys % kDrawKeys == 0);

struct Philox {
  vec<uint32_t> word[4];

  PYATTN_MEMBER_INLINE void round(uint32_t key0, uint32_t key1) {
    vec<uint32_t> high0, high2;
    const vec<uint32_t> low0 = multiply_wide(word[0], set1<uint32_t>(0xD2511F53), high0);
    const vec<uint32_t> low2 = multiply_wide(word[2], set1<uint32_t>(0xCD9E8D57), high2);
    word[0] = high2 ^ word[1] ^ key0, word[1] = low2;
    word[2] = high0 ^ word[3] ^ key1, word[3] = low0;
  }

  PYATTN_MEMBER_INLINE void rounds(uint64_t seed) {
    uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
    PYATTN_UNROLL(10)
    for (int i = 0; i < 10; ++i, key0 += 0x9E3779B9, key1 += 0xBB67AE85) round(key0, key1);
  }
};

// A vector of lanes of rows, from row r0 on: their places in the counters.
struct DrawRows {
  vec<uint32_t> query, low, high;

  DrawRows(const ForwardParams& p, const Head& head, const FirstDraw& first, int64_t r0) {
    constexpr int W = kLanes<uint32_t>;
    const auto first_query = first.query + static_cast<uint32_t>(is_selected(p) ? head.first_q : 0);
    for (int l = 0; l < W; ++l) {
      const uint64_t index = first.head + head.query_head(r0 + l);
      query[l] = first_query + static_cast<uint32_t>(head.query(r0 + l));
      low[l] = static_cast<uint32_t>(index), high[l] = static_cast<uint32_t>(index >> 32);
    }
  }

  // The words of a group of kDrawKeys keys.
  PYATTN_MEMBER_INLINE Philox draw(const ForwardParams& p, uint32_t group) const {
    Philox draws{{set1(group), query, low, high}};
    draws.rounds(static_cast<uint64_t>(*p.dropout.seed));
    return draws;
  }
};

// The factors of a vector of weights, from the draws of key i of a group: 0 where the weight is dropped. Calls
// visit(k, j, factor) for the lanes from j0 on, as below.
template <class T, class Visit>
PYATTN_INLINE void visit_factors(const DropoutParams& dropout, vec<uint32_t> word, bool high_half, int64_t k,
                                 int64_t j0, int64_t j1, Visit visit) {
  using Int = typename Bits<T>::signed_type;
  constexpr int W = kLanes<uint32_t>, L = kLanes<T>;
  const Int threshold = dropout.threshold;
  const vec<T> scale = set1(static_cast<T>(65536.0 / (65536 - dropout.threshold)));
  const vec<uint32_t> draw = high_half ? word >> 16 : word & 0xffff;
  PYATTN_UNROLL(2)
  for (int v = 0; v < W / L; ++v)
    if (j0 + v * L < j1) visit(k, j0 + v * L, widen<T>(draw, v) >= threshold ? scale : vec<T>{});
}

// Draws for a strip of selected keys, which lie anywhere: neighbours of the list share a group only by chance.
template <class T, class Visit>
void draw_for_selected(const ForwardParams& p, const Head& head, const Tile& tile, Strip strip, Visit visit) {
  const FirstDraw first(p, head.b);
  for (int64_t j0 = strip.j0; j0 < strip.j1; j0 += kLanes<uint32_t>) {
    const DrawRows rows(p, head, first, tile.r0 + j0);
    Philox draws;
    int64_t drawn = -1;
    SelectedKeys listed(p, head, tile.n0 + strip.begin);
    for (int64_t k = strip.begin; k < strip.end; ++k, listed.next()) {
      const int64_t key = first.shift + listed.key(), group = key / kDrawKeys;
      if (group != drawn) draws = rows.draw(p, first.group + static_cast<uint32_t>(group)), drawn = group;
      visit_factors<T>(p.dropout, draws.word[key % kDrawKeys / 2], key % 2, k, j0, strip.j1, visit);
    }
  }
}

// Draws for a strip: calls visit(k, j, factor) for row k and a vector of lanes from j on;
// factor is 0 where the weight is dropped. Tile and strip begin at multiples of kDrawKeys.
template <class T, class Visit>
void draw_dropout(const ForwardParams& p, const Head& head, const Tile& tile, Strip strip, Visit visit) {
  if (is_selected(p)) return draw_for_selected<T>(p, head, tile, strip, visit);
  const int64_t begin = strip.begin, end = strip.end, j1 = strip.j1;
  const uint64_t keys = end - begin;
  const FirstDraw first(p, head.b);
  for (int64_t j0 = strip.j0; j0 < j1; j0 += kLanes<uint32_t>) {
    const DrawRows rows(p, head, first, tile.r0 + j0);
    auto group = first.group + static_cast<uint32_t>((tile.n0 + begin) / kDrawKeys);
    for (int64_t k = begin - first.shift; k < end; k += kDrawKeys, ++group) {
      const Philox draws = rows.draw(p, group);
      PYATTN_UNROLL(8)
      for (int i = 0; i < kDrawKeys; ++i) {
        if (static_cast<uint64_t>(k + i - begin) >= keys) continue;
        visit_factors<T>(p.dropout, draws.word[i / 2], i % 2, k + i, j0, j1, visit);
      }
    }
  }
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
