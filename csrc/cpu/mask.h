// Tiles of the rows of a KV head and of keys: what of them is seen.
#pragma once

namespace pyattn::PYATTN_ISA {
namespace {

template <class S>
Rows<S> key_rows(const HeadRows& head, const View& view, int64_t j) {
  return {head.key<S>(view, j), view.stride_s};
}

// Blocks of query rows to a KV head.
template <class S>
int64_t query_blocks(const ForwardParams& p) {
  return ceil_div(p.seqlen_q * group_size(p), kBlockQ<Compute<S>>);
}

// A tile of keys and lanes as strips of lanes, each with the keys that some row of it sees: what lies beyond the diagonal is
// not computed. 16 lanes are one vector of AVX-512; with 32, T = 64 to 256 took 4 to 12 % longer.
inline constexpr int64_t kStripLanes = 16;

template <class T>
struct Strips {
  bool masked;           // whether some row does not see all keys of the tile
  int64_t lanes, width;  // of the tile, and of a strip: the same where nothing is masked
  int64_t keys[kBlockQ<T> / kStripLanes];

  // f(j0, j1, keys): the lanes [j0, j1) see of the tile's keys only the first.
  template <class F>
  void each(F f) const {
    for (int64_t j = 0; j < lanes; j += width) f(j, min(j + width, lanes), keys[j / width]);
  }

  // f(k0, k1, j): the keys [k0, k1) are seen by none of the lanes before j.
  template <class F>
  void each_keys(F f) const {
    int64_t k = 0;
    each([&](int64_t j, int64_t, int64_t end) {
      if (k < end) f(k, end, j);
      k = end;
    });
  }
};

// The tile of rows r0, r0 + 1, ... and the keys [n0, n0 + keys); where some row does not see them all, lane by
// lane, how many of them are seen, 0 past the last row.
template <class T>
Strips<T> mask_tile(const HeadRows& head, int64_t r0, int64_t rows, int64_t lanes, int64_t n0, int64_t keys, T* seen) {
  if (head.visible_keys(r0) >= n0 + keys) return {false, lanes, lanes, {keys}};  // later rows see no fewer
  for (int64_t i = 0; i < lanes; ++i)
    seen[i] = i < rows ? static_cast<T>(clamp(head.visible_keys(r0 + i) - n0, 0, keys)) : T(0);
  Strips<T> strips{true, lanes, kStripLanes, {}};
  for (int64_t j = 0; j < lanes; j += strips.width)
    strips.keys[j / strips.width] = static_cast<int64_t>(seen[min(j + strips.width, rows) - 1]);
  return strips;
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
