// Strips: a tile of keys and queries, cut along the mask so that
// keys which no lane sees are not computed.
#pragma once

#include <cstdint>

#include "attention.h"
#include "heads.h"
#include "mask.h"
#include "simd.h"

namespace pyattn::PYATTN_ISA {
namespace {

// Query rows of a block: 64 queries of 4 bytes are the widest register tile of AVX-512, and the
// transposed accumulators, head_dim x 64, stay in L2.
template <class T>
inline constexpr int64_t kBlockQ = 256 / sizeof(T);

// 16 lanes are one vector of AVX-512; with 32, T = 64 to 256 took 4 to 12 % longer.
inline constexpr int64_t kStripLanes = 16;

// Blocks of query rows per KV head.
template <class S>
int64_t query_blocks(const ForwardParams& p) {
  return ceil_div(p.seqlen_q * group_size(p), kBlockQ<Compute<S>>);
}

// A tile S[keys][lanes]: key n0 + k in row k, query row r0 + j on
// lane j, nothing on the lanes from rows on.
struct Tile {
  int64_t r0, rows, lanes, n0, keys;
};

// The lanes [j0, j1) of a tile, and its first keys.
struct Strip {
  int64_t j0, j1, keys;
  int64_t pairs() const { return keys * (j1 - j0); }
};

// The keys of a tile that each lane of a vector sees.
template <class T>
struct LaneRange {
  vec<T> begin, end;

  PYATTN_MEMBER_INLINE auto contains(int64_t k) const {
    return (begin <= static_cast<T>(k)) & (static_cast<T>(k) < end);
  }

  PYATTN_MEMBER_INLINE auto any() const { return begin < end; }
};

// The keys of a tile that each lane sees, counted from the tile's
// first; none on the lanes past the last row.
template <class T>
struct LaneKeys {
  alignas(kScratchAlign) T begin[kBlockQ<T>], end[kBlockQ<T>];  // [queries]

  void set(int64_t j, Range keys) { begin[j] = static_cast<T>(keys.begin), end[j] = static_cast<T>(keys.end); }

  // A vector of lanes from j on.
  PYATTN_MEMBER_INLINE LaneRange<T> lanes(int64_t j) const { return {load(begin + j), load(end + j)}; }

  // Lane j on every lane.
  PYATTN_MEMBER_INLINE LaneRange<T> lane(int64_t j) const { return {set1(begin[j]), set1(end[j])}; }
};

template <class T>
struct Strips {
  bool masked;                             // whether some row does not see every key of the tile
  int64_t lanes, width;                    // of the tile, and of a strip: equal where nothing is masked
  int64_t keys[kBlockQ<T> / kStripLanes];  // [strips], never fewer than in the strip before

  // f(strip)
  template <class F>
  void each(F f) const {
    for (int64_t j = 0; j < lanes; j += width) f(Strip{j, min(j + width, lanes), keys[j / width]});
  }

  // f(k0, k1, j): the strips before lane j do not reach the keys [k0, k1), those from j on do.
  template <class F>
  void each_keys(F f) const {
    int64_t k = 0;
    each([&](Strip strip) {
      if (k < strip.keys) f(k, strip.keys, strip.j0);
      k = strip.keys;
    });
  }
};

// Cuts a tile, and where some row does not see every key of it, writes which keys each lane sees. A
// strip begins with the tile; keys before the first one of a lane are left to its mask.
template <class T>
Strips<T> cut_strips(const Mask& mask, const Tile& tile, LaneKeys<T>& seen) {
  const auto [r0, rows, lanes, n0, keys] = tile;
  if (mask.cover(r0, rows, n0, keys) == Cover::kFull) return {false, lanes, lanes, {keys}};
  for (int64_t j = 0; j < lanes; ++j) seen.set(j, j < rows ? mask.keys_of(r0 + j).within(n0, keys) : Range{0, 0});
  Strips<T> strips{true, lanes, kStripLanes, {}};
  int64_t reached = 0;
  for (int64_t j = 0; j < lanes; j += kStripLanes) {
    reached = max(reached, mask.keys_of_any(r0 + j, min(kStripLanes, rows - j)).within(n0, keys).end);
    strips.keys[j / kStripLanes] = reached;
  }
  return strips;
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
