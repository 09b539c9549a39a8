// Strips: a tile of keys and queries, cut along the mask so that
// keys which no lane sees are not computed.
#pragma once

#include <cstdint>
#include <utility>

#include "attention.h"
#include "heads.h"
#include "mask.h"
#include "matrix.h"
#include "simd.h"

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

// The lanes [j0, j1) of a tile and the keys [begin, end), counted from the tile's first.
struct Strip {
  int64_t j0, j1, begin, end;

  int64_t keys() const { return end - begin; }
  int64_t pairs() const { return keys() * (j1 - j0); }
};

// Which keys of a tile each lane sees: bit j of the words of key k for lane j.
template <class T>
class LaneMask {
  using Word = typename Bits<T>::type;
  static constexpr int64_t kWordLanes = 8 * sizeof(Word);

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
  PYATTN_MEMBER_INLINE auto sees(int64_t k, int64_t j) const { return lanes_of(words_[j / kWordLanes] + k, j); }

  // Whether they see any key.
  PYATTN_MEMBER_INLINE auto sees_any(int64_t j) const { return lanes_of(any_ + j / kWordLanes, j); }

  // Whether lane j sees key k, on every lane.
  PYATTN_MEMBER_INLINE auto lane_sees(int64_t k, int64_t j) const {
    return set1<Word>(words_[j / kWordLanes][k] >> j % kWordLanes & 1) != vec<Word>{};
  }

 private:
  static constexpr int64_t kWords = ceil_div(kBlockQ<T>, kWordLanes);
  Word words_[kWords][kTileKeys], any_[kWords];

  template <std::size_t... I>
  PYATTN_MEMBER_INLINE static vec<Word> bits_from(int64_t j, std::index_sequence<I...>) {
    return vec<Word>{Word{1} << I...} << static_cast<Word>(j % kWordLanes);
  }

  PYATTN_MEMBER_INLINE static auto lanes_of(const Word* word, int64_t j) {
    return (broadcast(word) & bits_from(j, std::make_index_sequence<kLanes<T>>{})) != vec<Word>{};
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

// Takes from bit j what the bias of row r hides of the keys of a tile.
template <class S>
void hide_holes(const Mask& mask, int64_t r, int64_t n0, Range keys, int64_t j, uint64_t* bits) {
  with_keys_of_row<S>(mask.p.score.bias, mask.head, r, [&](auto shown) {
    for (int64_t k = keys.begin; k < keys.end; ++k) bits[k] &= ~(uint64_t{!shown(n0 + k)} << j);
  });
}

// Cuts a tile, and where some row does not see every key of it, writes which keys each lane sees. In
// strips of all lanes if only holes are hidden.
template <class S, class T = Compute<S>>
Strips<T> cut_strips(const Mask& mask, const Tile& tile, LaneMask<T>& seen) {
  const auto [r0, rows, lanes, n0, keys] = tile;
  const Range all = mask.keys_of_all(r0, rows);
  const bool whole = all.begin <= n0 && n0 + keys <= all.end, holes = mask.any_holes(r0, rows);
  if (whole && !holes) return {false, lanes, lanes, {0}, {keys}};

  Strips<T> strips{true, lanes, whole ? lanes : kStripLanes, {}, {}};
  const int64_t count = ceil_div(lanes, strips.width);
  uint64_t bits[kTileKeys + 1] = {};  // [keys] of lanes; at first, where they begin and end to see
  Range range[Strips<T>::kCount];
  for (int64_t i = 0; i < count; ++i) {
    range[i] = {keys, 0};
    for (int64_t j = i * strips.width; j < min((i + 1) * strips.width, rows); ++j) {
      const Range row = mask.keys_of(r0 + j).within(n0, keys);
      if (row.empty()) continue;
      bits[row.begin] ^= uint64_t{1} << j, bits[row.end] ^= uint64_t{1} << j;
      range[i] = {min(range[i].begin, row.begin), max(range[i].end, row.end)};
    }
  }
  for (int64_t k = 1; k < keys; ++k) bits[k] ^= bits[k - 1];
  if (holes) {
    for (int64_t j = 0; j < rows; ++j)
      if (mask.has_holes(r0 + j)) hide_holes<S>(mask, r0 + j, n0, mask.keys_of(r0 + j).within(n0, keys), j, bits);
    for (int64_t i = 0; i < count; ++i) {
      const uint64_t mine = (strips.width < 64 ? (uint64_t{1} << strips.width) - 1 : ~uint64_t{0}) << i * strips.width;
      while (!range[i].empty() && !(bits[range[i].begin] & mine)) ++range[i].begin;
      while (!range[i].empty() && !(bits[range[i].end - 1] & mine)) --range[i].end;
    }
  }
  seen.set(bits, keys);

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
