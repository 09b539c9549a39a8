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

  // Query and query head of row r.
  int64_t query(int64_t r) const { return r / group; }
  int64_t query_head(int64_t r) const { return h_kv * group + r % group; }

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

// Lane by lane, how many of the keys [n0, n0 + keys) rows r0, r0 + 1, ... see; 0 in lanes past the last row. Returns
// whether some row does not see them all.
template <class T>
bool mask_tile(const HeadRows& head, int64_t r0, int64_t rows, int64_t lanes, int64_t n0, int64_t keys, T* seen) {
  for (int64_t i = 0; i < lanes; ++i)
    seen[i] = i < rows ? static_cast<T>(clamp(head.visible_keys(r0 + i) - n0, 0, keys)) : T(0);
  return seen[0] < keys;  // later rows see no fewer
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
