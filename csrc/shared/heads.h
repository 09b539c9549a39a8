// Heads: where the query rows and the keys of one KV head lie in memory. Every
// backend shares this file; everything is constexpr, so device code may call it.
#pragma once

#include "attention.h"
#include "shared/index.h"

namespace pyattn::PYATTN_ISA {
namespace {

// Query heads per KV head.
constexpr int64_t group_size(const ForwardParams& p) {
  return p.num_heads_kv ? divide(p.num_heads_q, p.num_heads_kv) : 1;
}

// Whether sequences are packed. GPU kernels are compiled once for each answer:
// asking at run time would spill up to 84 bytes of registers instead of 72.
#ifdef PYATTN_PACKED
constexpr bool is_packed(const ForwardParams&) { return PYATTN_PACKED; }
#else
constexpr bool is_packed(const ForwardParams& p) { return p.packed.sequences; }
#endif

// Whether queries have lists of keys, so each query is a separate sequence; on the CPU only.
#ifdef PYATTN_PACKED
constexpr bool is_selected(const ForwardParams&) { return false; }
#else
constexpr bool is_selected(const ForwardParams& p) { return p.cpu.selected.entries; }
#endif

// How many sequences the queries of one batch entry form, and how many of these queries a sequence has at most.
constexpr int64_t sequences_each(const ForwardParams& p) { return is_selected(p) ? p.seqlen_q : 1; }
constexpr int64_t most_queries(const ForwardParams& p) { return is_selected(p) ? min(p.seqlen_q, 1) : p.seqlen_q; }

constexpr Sequence sequence_of(const ForwardParams& p, int64_t b) {
  return is_packed(p) ? p.packed.sequences[b] : Sequence{0, 0, p.seqlen_q, p.seqlen_k};
}

// The largest number of query rows that a KV head has.
constexpr int64_t most_rows(const ForwardParams& p) { return most_queries(p) * group_size(p); }

// KV heads of all sequences.
constexpr int64_t count_heads(const ForwardParams& p) { return p.batch * p.num_heads_kv * sequences_each(p); }

// One KV head of one sequence, batched or packed, and the query rows that read it. Row r is
// query r / group of the group's query head r % group, so neighbouring rows see almost the
// same keys, and in decoding, where queries are few, the heads of the group fill a tile.
struct Head {
  int64_t b, h_kv, group;
  int64_t first_q, first_k;  // where the sequence begins; 0 in a batch
  int64_t seqlen_q, seqlen_k;
  int64_t count;  // query rows

  // Head n of count_heads.
  constexpr Head(const ForwardParams& p, int64_t n) : Head(p, n, group_size(p)) {}
  constexpr Head(const ForwardParams& p, int64_t n, int64_t group)
      : Head(p, is_selected(p) ? divide(n, p.seqlen_q) : n, is_selected(p) ? remainder(n, p.seqlen_q) : 0, group) {}

  // The number n of a head; not for packed sequences.
  constexpr int64_t number(const ForwardParams& p) const {
    return (b * p.num_heads_kv + h_kv) * sequences_each(p) + (is_selected(p) ? first_q : 0);
  }

  // The head of the query that comes i queries later, where each query is a sequence. The constructor would divide.
  constexpr Head later(int64_t i) const {
    Head other = *this;
    other.first_q += i;
    return other;
  }

  // All packed tokens as one sequence, including those in no sequence.
  static constexpr Head of_tokens(const ForwardParams& p, int64_t h_kv) {
    return {0, h_kv, group_size(p), {0, 0, p.packed.total_q, p.packed.total_k}};
  }

  // Query and query head of row r. A group of one skips the
  // division, which each row would repeat several times.
  constexpr int64_t query(int64_t r) const { return group == 1 ? r : divide(r, group); }
  constexpr int64_t query_head(int64_t r) const { return group == 1 ? h_kv : h_kv * group + remainder(r, group); }

  // Row r of a tensor with query heads.
  template <class S>
  constexpr S* row(const View& view, int64_t r) const {
    return static_cast<S*>(view.data) + b * view.stride_b + query_head(r) * view.stride_h +
           (first_q + query(r)) * view.stride_s;
  }

  // Position j of a tensor with KV heads.
  template <class S>
  constexpr S* key(const View& view, int64_t j) const {
    return static_cast<S*>(view.data) + b * view.stride_b + h_kv * view.stride_h + (first_k + j) * view.stride_s;
  }

  // The ALiBi slope of row r's query head, as T.
  template <class T>
  constexpr T slope(const ForwardParams& p, int64_t r) const {
    return static_cast<const T*>(p.score.alibi_slopes)[b * p.score.slopes_stride_b + query_head(r)];
  }

  // The index of row r in a dense (batch, num_heads_q, seqlen_q) array, packed (num_heads_q, total_q).
  constexpr int64_t index(const ForwardParams& p, int64_t r) const {
    if (is_packed(p)) return query_head(r) * p.packed.total_q + first_q + query(r);
    return (b * p.num_heads_q + query_head(r)) * p.seqlen_q + first_q + query(r);
  }

 private:
  // A KV head of a batch entry or of a packed sequence; query i of it, if each is a separate sequence.
  constexpr Head(const ForwardParams& p, int64_t head, int64_t i, int64_t group)
      : Head(divide(head, p.num_heads_kv), remainder(head, p.num_heads_kv), group,
             is_selected(p) ? Sequence{i, 0, 1, p.seqlen_k} : sequence_of(p, divide(head, p.num_heads_kv))) {}
  constexpr Head(int64_t b, int64_t h_kv, int64_t group, const Sequence& own)
      : b(b),
        h_kv(h_kv),
        group(group),
        first_q(own.first_q),
        first_k(own.first_k),
        seqlen_q(own.seqlen_q),
        seqlen_k(own.seqlen_k),
        count(own.seqlen_q * group) {}
};

}  // namespace
}  // namespace pyattn::PYATTN_ISA
