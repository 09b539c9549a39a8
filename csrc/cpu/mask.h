// Who sees whom: the geometry of the mask, and the rows of a KV head.
#pragma once

namespace pyattn::PYATTN_ISA {
namespace {

// Query heads to a KV head.
PYATTN_INLINE int64_t group_size(const ForwardParams& p) { return p.num_heads_kv ? p.num_heads_q / p.num_heads_kv : 1; }

// The query rows that read one KV head: row r is query r / group of the group's query head r % group. Neighbouring
// lanes then see almost the same keys, and the few queries of decoding fill a vector with heads.
struct HeadRows {
  int64_t b, h_kv, group, count;
  int64_t q_offset;  // clamped: beyond [-seqlen_q, seqlen_k] the mask does not change
  int64_t seqlen_q, seqlen_k;
  bool causal;

  HeadRows(const ForwardParams& p, int64_t head) {
    b = head / p.num_heads_kv, h_kv = head % p.num_heads_kv, group = group_size(p);
    seqlen_q = p.seqlen_q, seqlen_k = p.seqlen_k, count = p.seqlen_q * group, causal = p.mask.causal;
    q_offset = clamp(p.mask.q_offsets ? p.mask.q_offsets[b] : p.mask.q_offset, -seqlen_q, seqlen_k);
  }

  // Row r sees the keys [0, visible_keys(r)).
  int64_t visible_keys(int64_t r) const { return causal ? clamp(query(r) + q_offset + 1, 0, seqlen_k) : seqlen_k; }

  // The first row that sees key j; count if none does.
  int64_t first_row(int64_t j) const { return causal ? clamp(j - q_offset, 0, seqlen_q) * group : 0; }

  // Query and query head of row r. (A division takes ten cycles, and each row needs several.)
  int64_t query(int64_t r) const { return group == 1 ? r : r / group; }
  int64_t query_head(int64_t r) const { return group == 1 ? h_kv : h_kv * group + r % group; }

  template <class S>
  S* row(const View& view, int64_t r) const {
    return static_cast<S*>(view.data) + b * view.stride_b + query_head(r) * view.stride_h + query(r) * view.stride_s;
  }

  template <class S>
  Rows<S> keys(const View& view, int64_t j) const {
    return {static_cast<S*>(view.data) + b * view.stride_b + h_kv * view.stride_h + j * view.stride_s, view.stride_s};
  }

  // The place of row r in a dense (batch, num_heads_q, seqlen_q) array.
  int64_t index(const ForwardParams& p, int64_t r) const {
    return (b * p.num_heads_q + query_head(r)) * seqlen_q + query(r);
  }
};

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
