// The mask on a tile: which keys each lane sees, and the strips into which the tile is cut along it.
#pragma once

#include "cpu/products/scratch.h"
#include "cpu/simd/simd.h"
#include "cpu/tiles/strips.h"
#include "shared/mask.h"

namespace pyattn::PYATTN_ISA {
namespace {

// Sets the bits [0, n), n at most 64, in a number or in each element of a vector.
template <class N>
PYATTN_INLINE N first_lanes(N n) {
  return (((N{} + 1) << (n & 63)) - 1) | -(n >> 6);
}

// bits[keys]: bit j of bits[k] says whether row r0 + j sees key k of the tile, by
// formula. It writes a vector of keys at a time, so up to a vector past the last key.
inline void mark_by_formula(const Mask& mask, const Tile& tile, uint64_t* bits) {
  constexpr int L = kLanes<int64_t>;
  const auto [first, past] = mask.rows_of(tile.n0);
  const int64_t group = mask.head.group, rows = tile.rows, keys = tile.keys;
  vec<int64_t> begin, end;
  for (int i = 0; i < L; ++i) begin[i] = first - tile.r0 + i * group, end[i] = past - tile.r0 + i * group;
  const auto lanes = [&](vec<int64_t> x) {
    x = x < 0 ? vec<int64_t>{} : x > rows ? set1(rows) : x;
    return first_lanes(bit_cast<uint64_t>(x));
  };
  for (int64_t k = 0; k < keys; k += L, begin += L * group, end += L * group) {
    const vec<uint64_t> seeing = lanes(end) & ~lanes(begin);
    __builtin_memcpy(bits + k, &seeing, sizeof seeing);
  }
}

// The same for any mask: each row toggles its bit where its intervals begin and end.
inline void mark_by_rows(const Mask& mask, const Tile& tile, uint64_t* bits) {
  const auto [r0, rows, lanes, n0, keys] = tile;
  for (int64_t k = 0; k < kTileKeys; ++k) bits[k] = 0;
  for (int64_t j = 0; j < rows; ++j)
    for (int64_t n = 0; n < mask.intervals(); ++n) {
      const Range row = mask.keys_of(r0 + j, n).within(n0, keys);
      if (row.begin < keys) bits[row.begin] ^= uint64_t{1} << j;
      if (row.end < keys) bits[row.end] ^= uint64_t{1} << j;
    }
  for (int64_t k = 1; k < keys; ++k) bits[k] ^= bits[k - 1];
}

// Prefetches the elements of the keys [j, j + kTileKeys) into L2: a tile has too many rows for the hardware to
// follow. Inlined, because GCC removes calls of functions that only prefetch.
template <class E>
PYATTN_INLINE void prefetch_shown(ShownKeys<E> shown, int64_t j) {
  constexpr int64_t kLine = kCacheLine / sizeof(E);  // the keys may begin within a line
  for (int64_t k = 0; k < kTileKeys + kLine; k += kLine) __builtin_prefetch(shown.row + j + k, 0, 2);
}
template <class E>
PYATTN_INLINE void prefetch_shown(StridedShownKeys<E>, int64_t) {}

// Keys that hide_run takes at once: a vector of bytes of AVX2, which divides kTileKeys.
inline constexpr int64_t kHiddenRun = 32;

// hidden[i] |= bit for each masked key j + i of a run. All runs of a tile have kHiddenRun
// keys, in loops that vectorise, unless the whole tile is shorter.
template <class Shown>
PYATTN_INLINE void hide_run(Shown shown, int64_t j, int64_t keys, uint8_t bit, uint8_t* hidden) {
  if (keys < kHiddenRun) {
    for (int64_t i = 0; i < keys; ++i) hidden[i] |= shown(j + i) ? uint8_t{0} : bit;
    return;
  }
  uint8_t more[kHiddenRun];
  for (int64_t i = 0; i < kHiddenRun; ++i) more[i] = shown(j + i) ? uint8_t{0} : bit;
  for (int64_t i = 0; i < kHiddenRun; ++i) hidden[i] |= more[i];
}

// Clears the bits of keys that filters mask. Eight rows form one byte for each
// key, in runs of keys that vectorise, the last of which may overlap the one before.
template <class S>
void hide_holes(const Mask& mask, const Tile& tile, uint64_t* bits) {
  const auto [r0, rows, lanes, n0, keys] = tile;
  for (int64_t j0 = 0; j0 < rows; j0 += 8) {
    uint8_t hidden[kTileKeys] = {};
    bool any = false;
    for (int64_t j = j0; j < min(j0 + 8, rows); ++j) {
      const auto bit = static_cast<uint8_t>(1 << (j - j0));
      mask.each_filter<S>(r0 + j, [&, n0 = n0, keys = keys](auto shown) {
        any = true;
        for (int64_t k = 0; k < keys; k += kHiddenRun) {
          const int64_t first = max(0, min(k, keys - kHiddenRun));
          hide_run(shown, n0 + first, min(keys, kHiddenRun), bit, hidden + first);
        }
        prefetch_shown(shown, n0 + keys);  // both passes compute these keys next, or soon
      });
    }
    if (any)
      for (int64_t k = 0; k < kTileKeys; ++k) bits[k] &= ~(uint64_t{hidden[k]} << j0);
  }
}

// Strips of kStripLanes lanes, each from the first to the last key that its lanes see.
template <class T>
Strips<T> strips_along(const Mask& mask, const Tile& tile, const uint64_t* bits) {
  const auto [r0, rows, lanes, n0, keys] = tile;
  Strips<T> strips{true, lanes, kStripLanes, {}, {}};
  const int64_t count = ceil_div(lanes, kStripLanes);
  Range range[Strips<T>::kCount];
  for (int64_t i = 0; i < count; ++i) {
    const int64_t j = i * kStripLanes, n = min(kStripLanes, rows - j);
    range[i] = mask.keys_of_any(r0 + j, n).within(n0, keys);
    const uint64_t mine = first_lanes(static_cast<uint64_t>(n)) << j;
    while (mask.p.mask.blocks && !range[i].empty() && !(bits[range[i].begin] & mine)) ++range[i].begin;
    while (mask.p.mask.blocks && !range[i].empty() && !(bits[range[i].end - 1] & mine)) --range[i].end;
  }
  int64_t reached = 0;
  for (int64_t i = 0; i < count; ++i) strips.end[i] = reached = max(reached, range[i].empty() ? 0 : range[i].end);
  for (int64_t i = count; i-- > 0;) {
    reached = min(reached, range[i].empty() ? reached : round_down(range[i].begin, kStripKeys));
    strips.begin[i] = reached, strips.end[i] = max(strips.end[i], reached);
  }
  return strips;
}

// Cuts a tile into strips and, where some row does not see every key of the tile, writes
// which keys each lane sees. Not inlined, because the callers' products may then not be
// inlined, and take half as long again.
template <class S, class T = Compute<S>>
[[gnu::noinline]] Strips<T> cut_strips(const Mask& mask, const Tile& tile, LaneMask<T>& seen) {
  const auto [r0, rows, lanes, n0, keys] = tile;
  const bool whole = mask.in_all(r0, rows, n0, keys), holes = mask.any_holes(r0, rows);
  if (whole && !holes) return {false, lanes, lanes, {0}, {keys}};
  if (mask.intervals() > 1 && !mask.in_any(r0, rows, n0, keys)) return {true, lanes, lanes, {0}, {0}};

  uint64_t bits[kTileKeys];  // [keys]
  if (whole)
    for (int64_t k = 0; k < kTileKeys; ++k) bits[k] = first_lanes(static_cast<uint64_t>(rows));
  else if (mask.p.mask.blocks)
    mark_by_rows(mask, tile, bits);
  else
    mark_by_formula(mask, tile, bits);
  if (holes) hide_holes<S>(mask, tile, bits);
  seen.set(bits, keys);

  const Strips<T> strips = strips_along<T>(mask, tile, bits);
  // Where only holes are masked, one strip of all lanes is faster unless narrow ones leave out an eighth of its pairs.
  const bool joined = whole && 8 * strips.pairs() > 7 * strips.keys().count() * lanes;
  return joined ? strips.joined() : strips;
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
