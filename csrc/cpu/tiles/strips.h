// Strips: a tile of keys and queries, cut along the mask so that
// keys which no lane sees are not computed.
#pragma once

#include <cstdint>
#include <utility>

#include "attention.h"
#include "shared/heads.h"
#include "shared/mask.h"
#include "cpu/products/matrix.h"
#include "cpu/simd/simd.h"

namespace pyattn::PYATTN_ISA {
namespace {

// Query rows of a block: 64 queries of 4 bytes are the widest register tile of AVX-512, and the
// transposed accumulators, head_dim x 64, stay in L2.
template <class T>
inline constexpr int64_t kBlockQ = 256 / sizeof(T);

// 16 lanes are one vector of AVX-512; with 32, T = 64 to 256 took 4 to 12 % longer.
inline constexpr int64_t kStripLanes = 16;
// Strips, and tiles, begin at a multiple of so many keys, for which dropout draws at once.
inline constexpr int64_t kStripKeys = 8;

// The most keys of a tile.
inline constexpr int64_t kTileKeys = 96;

// A tile S[keys][lanes]: key n0 + k in row k, query row r0 + j on
// lane j, nothing on the lanes from rows on.
struct Tile {
  int64_t r0, rows, lanes, n0, keys;
};

// The lanes [j0, j1) of a tile and the keys [begin, end), counted from the tile's first.
struct Strip {
  int64_t j0, j1, begin, end;

  int64_t keys() const { return end - begin; }
  int64_t pairs() const { return keys() * (j1 - j0); }
};

// The keys of a tile that each lane sees: a word for each vector of lanes and each key, a bit for each lane.
template <class T>
class LaneMask {
  using Word = typename Bits<T>::type;
  static constexpr int64_t kWordLanes = kLanes<T>;

 public:
  // Bit j of bits[k] for lane j; of a tile with an odd number of keys, the other of the last pair is not seen.
  void set(const uint64_t* bits, int64_t keys) {
    uint64_t any = 0;
    for (int64_t k = 0; k < keys; ++k) any |= bits[k];
    for (int64_t w = 0; w < kWords; ++w) {
      for (int64_t k = 0; k < keys; ++k) words_[w][k] = static_cast<Word>(bits[k] >> w * kWordLanes);
      if (keys < kTileKeys) words_[w][keys] = 0;
      any_[w] = static_cast<Word>(any >> w * kWordLanes);
    }
  }

  // Whether the lanes from j on see key k, as vectors compare.
  PYATTN_MEMBER_INLINE auto sees(int64_t k, int64_t j) const { return lanes_of(words_[j / kWordLanes] + k); }

  // Whether they see any key.
  PYATTN_MEMBER_INLINE auto sees_any(int64_t j) const { return lanes_of(any_ + j / kWordLanes); }

  // Whether lane j sees key k, on every lane.
  PYATTN_MEMBER_INLINE auto lane_sees(int64_t k, int64_t j) const {
    return set1<Word>(words_[j / kWordLanes][k] >> j % kWordLanes & 1) != vec<Word>{};
  }

 private:
  static constexpr int64_t kWords = kBlockQ<T> / kWordLanes;
  Word words_[kWords][kTileKeys], any_[kWords];  // bits past those of the lanes say nothing

  template <std::size_t... I>
  PYATTN_MEMBER_INLINE static vec<Word> lane_bits(std::index_sequence<I...>) {
    return vec<Word>{Word{1} << I...};
  }

  PYATTN_MEMBER_INLINE static auto lanes_of(const Word* word) {
    return (broadcast(word) & lane_bits(std::make_index_sequence<kLanes<T>>{})) != vec<Word>{};
  }
};

template <class T>
struct Strips {
  static constexpr int64_t kCount = kBlockQ<T> / kStripLanes;
  bool masked;                         // whether some row does not see every key of the tile
  int64_t lanes, width;                // of the tile, and of a strip
  int64_t begin[kCount], end[kCount];  // keys, neither ever fewer than in the strip before

  bool empty() const { return end[ceil_div(lanes, width) - 1] <= begin[0]; }

  // f(strip)
  template <class F>
  void each(F f) const {
    for (int64_t j = 0; j < lanes; j += width) f(Strip{j, min(j + width, lanes), begin[j / width], end[j / width]});
  }

  // f(strip) for keys that are the same for all lanes which have them.
  template <class F>
  void each_keys(F f) const {
    const int64_t count = ceil_div(lanes, width);
    int64_t first = 0, past = 0;  // the strips that have the keys from k on
    for (int64_t k = begin[0]; k < end[count - 1];) {
      while (end[first] <= k) ++first;
      while (past < count && begin[past] <= k) ++past;
      const int64_t next = past < count ? min(end[first], begin[past]) : end[first];
      if (first < past) f(Strip{first * width, min(past * width, lanes), k, next});
      k = next;
    }
  }
};

// The lanes [0, n), n at most 64: of a number, or of each in a vector.
template <class N>
PYATTN_INLINE N first_lanes(N n) {
  return (((N{} + 1) << (n & 63)) - 1) | -(n >> 6);
}

// Bit j of bits[k]: whether row r0 + j sees key k of the tile, by formula. A vector of keys at a time,
// and so up to a vector more than there are.
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

// The same for any mask: of each row, where its keys begin and end.
inline void mark_by_rows(const Mask& mask, const Tile& tile, uint64_t* bits) {
  const auto [r0, rows, lanes, n0, keys] = tile;
  for (int64_t k = 0; k < kTileKeys; ++k) bits[k] = 0;
  for (int64_t j = 0; j < rows; ++j) {
    const Range row = mask.keys_of(r0 + j).within(n0, keys);
    if (row.begin < keys) bits[row.begin] ^= uint64_t{1} << j;
    if (row.end < keys) bits[row.end] ^= uint64_t{1} << j;
  }
  for (int64_t k = 1; k < keys; ++k) bits[k] ^= bits[k - 1];
}

// Takes the keys that filters hide from the bits. Eight rows make a byte of each key, in loops for
// vectors.
template <class S>
void hide_holes(const Mask& mask, const Tile& tile, uint64_t* bits) {
  for (int64_t j0 = 0; j0 < tile.rows; j0 += 8) {
    uint8_t hidden[kTileKeys] = {};
    bool any = false;
    for (int64_t j = j0; j < min(j0 + 8, tile.rows); ++j) {
      const auto bit = static_cast<uint8_t>(1 << (j - j0));
      mask.each_filter<S>(tile.r0 + j, [&, n0 = tile.n0](auto shown) {
        any = true;
        const auto hide = [&](int64_t keys) {
          for (int64_t k = 0; k < keys; ++k) hidden[k] |= shown(n0 + k) ? uint8_t{0} : bit;
        };
        tile.keys == kTileKeys ? hide(kTileKeys) : hide(tile.keys);
      });
    }
    if (any)
      for (int64_t k = 0; k < kTileKeys; ++k) bits[k] &= ~(uint64_t{hidden[k]} << j0);
  }
}

// Cuts a tile, and where some row does not see every key of it, writes which keys each lane sees. In
// strips of all lanes if only holes are hidden. Not inlined, for then the products of the callers
// may not be, which took half as long again.
template <class S, class T = Compute<S>>
[[gnu::noinline]] Strips<T> cut_strips(const Mask& mask, const Tile& tile, LaneMask<T>& seen) {
  const auto [r0, rows, lanes, n0, keys] = tile;
  const Range all = mask.keys_of_all(r0, rows);
  const bool whole = all.begin <= n0 && n0 + keys <= all.end, holes = mask.any_holes(r0, rows);
  if (whole && !holes) return {false, lanes, lanes, {0}, {keys}};

  Strips<T> strips{true, lanes, whole ? lanes : kStripLanes, {}, {}};
  const int64_t count = ceil_div(lanes, strips.width);
  uint64_t bits[kTileKeys];  // [keys]
  if (mask.p.mask.blocks)
    mark_by_rows(mask, tile, bits);
  else
    mark_by_formula(mask, tile, bits);
  if (holes) hide_holes<S>(mask, tile, bits);
  seen.set(bits, keys);

  Range range[Strips<T>::kCount];
  for (int64_t i = 0; i < count; ++i) {
    const int64_t j = i * strips.width, n = min(strips.width, rows - j);
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

// X *= Y, of tiles [keys][lanes].
template <class T>
void multiply_strip(Matrix<T> X, Matrix<T> Y, Strip strip) {
  for (int64_t k = strip.begin; k < strip.end; ++k)
    for (int64_t j = strip.j0; j < strip.j1; j += kLanes<T>) {
      T* x = X.from(k).data + j;
      store(x, load(x) * load(Y.from(k).data + j));
    }
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
