// Strips: a tile of keys and queries, cut along the mask so that keys that no lane sees are not computed.
#pragma once

#include <utility>

#include "cpu/products/matrix.h"
#include "cpu/simd/simd.h"
#include "shared/index.h"

namespace pyattn::PYATTN_ISA {
namespace {

// Query rows of a block: 64 queries of 4 bytes are the widest register tile of AVX-512, and the
// transposed accumulators, head_dim x 64, stay in L2.
template <class T>
inline constexpr int64_t kBlockQ = 256 / sizeof(T);

// 16 lanes are one vector of AVX-512; with 32 lanes, T = 64 to 256 took 4 to 12 % longer.
inline constexpr int64_t kStripLanes = 16;
// Strips and tiles begin at a multiple of this many keys, which dropout draws together.
inline constexpr int64_t kStripKeys = 8;

// The most keys of a tile.
inline constexpr int64_t kTileKeys = 96;

// A tile S[keys][lanes]: key n0 + k in row k, query row r0 + j on lane j; the lanes from `rows` on are unused.
struct Tile {
  int64_t r0, rows, lanes, n0, keys;
};

// The score of a masked key.
template <class T>
inline constexpr T kNegInf = -static_cast<T>(__builtin_inff());

// The lanes [j0, j1) of a tile and its keys [begin, end), relative to its first.
struct Strip {
  int64_t j0, j1, begin, end;

  int64_t keys() const { return end - begin; }
  int64_t pairs() const { return keys() * (j1 - j0); }
};

// The keys of a tile that each lane sees: one word for each
// vector of lanes and each key, one bit for each lane.
template <class T>
class LaneMask {
  using Word = typename Bits<T>::type;
  static constexpr int64_t kWordLanes = kLanes<T>;

 public:
  // bits[keys]: bit j of bits[k] is set if lane j sees key k. With an
  // odd number of keys, the missing key of the last pair is masked.
  void set(const uint64_t* bits, int64_t keys) {
    uint64_t any = 0;
    for (int64_t k = 0; k < keys; ++k) any |= bits[k];
    for (int64_t w = 0; w < kWords; ++w) {
      for (int64_t k = 0; k < keys; ++k) words_[w][k] = static_cast<Word>(bits[k] >> w * kWordLanes);
      if (keys < kTileKeys) words_[w][keys] = 0;
      any_[w] = static_cast<Word>(any >> w * kWordLanes);
    }
  }

  // Whether each lane from j on sees key k, in the form of a vector comparison.
  PYATTN_MEMBER_INLINE auto sees(int64_t k, int64_t j) const { return lanes_of(words_[j / kWordLanes] + k); }

  // Whether each lane from j on sees any key.
  PYATTN_MEMBER_INLINE auto sees_any(int64_t j) const { return lanes_of(any_ + j / kWordLanes); }

  // Whether lane j sees key k, broadcast to every lane.
  PYATTN_MEMBER_INLINE auto lane_sees(int64_t k, int64_t j) const {
    return set1<Word>(words_[j / kWordLanes][k] >> j % kWordLanes & 1) != vec<Word>{};
  }

 private:
  static constexpr int64_t kWords = kBlockQ<T> / kWordLanes;
  Word words_[kWords][kTileKeys], any_[kWords];  // bits beyond the lanes mean nothing

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
  int64_t begin[kCount], end[kCount];  // keys; neither bound decreases from strip to strip

  // From the first to the last key of any strip.
  Range keys() const { return {begin[0], end[ceil_div(lanes, width) - 1]}; }
  bool empty() const { return keys().empty(); }

  int64_t pairs() const {
    int64_t sum = 0;
    each([&](Strip strip) { sum += strip.pairs(); });
    return sum;
  }

  // One strip of all lanes, with the keys of all strips.
  Strips joined() const { return {masked, lanes, lanes, {keys().begin}, {keys().end}}; }

  // Calls f(strip) for each strip.
  template <class F>
  void each(F f) const {
    for (int64_t j = 0; j < lanes; j += width) f(Strip{j, min(j + width, lanes), begin[j / width], end[j / width]});
  }

  // Calls f(strip) for runs of keys that the same strips have, with all lanes of these strips.
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

// X[keys][lanes] *= Y[keys][lanes] on a strip. 0 stays 0: that of a masked pair may meet NaN.
template <class T>
void multiply_strip(Matrix<T> X, Matrix<T> Y, Strip strip) {
  for (int64_t k = strip.begin; k < strip.end; ++k)
    for (int64_t j = strip.j0; j < strip.j1; j += kLanes<T>) {
      T* const to = X.from(k).data + j;
      const vec<T> x = load(to);
      store(to, x == 0 ? x : x * load(Y.from(k).data + j));
    }
}

// X[keys][lanes] = 0 where masked, also outside the strips, where nothing is written.
template <class T>
void clear_masked(Matrix<T> X, const Tile& tile, const LaneMask<T>& seen) {
  for (int64_t k = 0; k < tile.keys; ++k)
    for (int64_t j = 0; j < tile.lanes; j += kLanes<T>) {
      T* x = X.from(k).data + j;
      store(x, seen.sees(k, j) ? load(x) : vec<T>{});
    }
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
