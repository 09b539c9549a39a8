// Who sees whom: the query rows of a KV head, the same for every backend. constexpr, so that device code may call it too.
#pragma once

#include "attention.h"

namespace pyattn::PYATTN_ISA {
namespace {

constexpr int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
constexpr int64_t clamp(int64_t x, int64_t low, int64_t high) { return min(max(x, low), high); }
constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Of counts of heads and rows, which no memory holds 2^32 of: a division in 64 bits takes several times as long, and on a GPU
// many registers.
constexpr int64_t divide(int64_t a, int64_t b) { return static_cast<uint32_t>(a) / static_cast<uint32_t>(b); }
constexpr int64_t remainder(int64_t a, int64_t b) { return static_cast<uint32_t>(a) % static_cast<uint32_t>(b); }

// Query heads to a KV head.
constexpr int64_t group_size(const ForwardParams& p) {
  return p.num_heads_kv ? divide(p.num_heads_q, p.num_heads_kv) : 1;
}

// The query rows that read one KV head: row r is query r / group of the group's query head r % group. Neighbouring
// rows then see almost the same keys, and the few queries of decoding fill a tile with heads.
struct HeadRows {
  int64_t b, h_kv, group, count;
  int64_t q_offset;  // clamped: beyond [-seqlen_q, seqlen_k] the mask does not change
  int64_t seqlen_q, seqlen_k;
  bool causal;

  constexpr HeadRows(const ForwardParams& p, int64_t head)
      : b(divide(head, p.num_heads_kv)),
        h_kv(remainder(head, p.num_heads_kv)),
        group(group_size(p)),
        count(p.seqlen_q * group),
        q_offset(clamp(p.mask.q_offsets ? p.mask.q_offsets[b] : p.mask.q_offset, -p.seqlen_q, p.seqlen_k)),
        seqlen_q(p.seqlen_q),
        seqlen_k(p.seqlen_k),
        causal(p.mask.causal) {}

  // Row r sees the keys [0, visible_keys(r)).
  constexpr int64_t visible_keys(int64_t r) const {
    return causal ? clamp(query(r) + q_offset + 1, 0, seqlen_k) : seqlen_k;
  }

  // The first row that sees key j; count if none does.
  constexpr int64_t first_row(int64_t j) const { return causal ? clamp(j - q_offset, 0, seqlen_q) * group : 0; }

  // Query and query head of row r. (A division takes ten cycles, and each row needs several.)
  constexpr int64_t query(int64_t r) const { return group == 1 ? r : divide(r, group); }
  constexpr int64_t query_head(int64_t r) const { return group == 1 ? h_kv : h_kv * group + remainder(r, group); }

  template <class S>
  constexpr S* row(const View& view, int64_t r) const {
    return static_cast<S*>(view.data) + b * view.stride_b + query_head(r) * view.stride_h + query(r) * view.stride_s;
  }

  template <class S>
  constexpr S* key(const View& view, int64_t j) const {
    return static_cast<S*>(view.data) + b * view.stride_b + h_kv * view.stride_h + j * view.stride_s;
  }

  // The place of row r in a dense (batch, num_heads_q, seqlen_q) array.
  constexpr int64_t index(const ForwardParams& p, int64_t r) const {
    return (b * p.num_heads_q + query_head(r)) * seqlen_q + query(r);
  }
};

}  // namespace
}  // namespace pyattn::PYATTN_ISA
