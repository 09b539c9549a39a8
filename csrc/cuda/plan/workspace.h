// The arrays that the passes of backward leave for one another in params.workspace: one after the
// other, each as long as the call needs.
#pragma once

#include <type_traits>

#include "cuda/ptx/primitives.h"
#include "shared/heads.h"

namespace pyattn::cuda {
namespace {

// The length of arrays of all rows; packed, with the rows of tokens that belong to no sequence.
constexpr int64_t all_rows(const ForwardParams& p) {
  return p.num_heads_q * (is_packed(p) ? p.packed.total_q : p.batch * p.seqlen_q);
}

// How much lies before the rows of a head: in (batch * num_heads_kv, rows) the number of heads, which takes one
// register, and in packed (num_heads_kv, total_q, group) the number of rows.
using RowsBefore = std::conditional_t<PYATTN_PACKED, uint64_t, unsigned>;
PYATTN_DEVICE RowsBefore rows_before(const ForwardParams& p, unsigned number, const Head& head) {
  if constexpr (PYATTN_PACKED)
    return (head.h_kv * p.packed.total_q + head.first_q) * head.group;
  else
    return number;
}

// The terms of a row that backward reads.
struct alignas(16) RowTerms {
  float shift, factor;  // P = exp(S, shift) * factor
  float delta;          // rowsum(dO * O) - dlse
  float share;          // 1; 0 for a row that sees one key only, whose weight is 1 whatever dP is
};

PYATTN_DEVICE RowTerms* row_terms_of(const BackwardParams& p, RowsBefore before, [[maybe_unused]] unsigned rows) {
  if constexpr (PYATTN_PACKED)
    return static_cast<RowTerms*>(p.workspace) + before;
  else
    return static_cast<RowTerms*>(p.workspace) + uint64_t{before} * rows;
}

// Each row's share of dslopes and of dsinks, (batch, num_heads_q, seqlen_q), packed (num_heads_q, total_q), T being
// double for float64, else float.
template <class T>
constexpr T* slope_terms_of(const BackwardParams& p) {
  return static_cast<T*>(static_cast<void*>(static_cast<RowTerms*>(p.workspace) + all_rows(p)));
}
template <class T>
constexpr T* sink_terms_of(const BackwardParams& p) {
  return slope_terms_of<T>(p) + (p.dslopes ? all_rows(p) : 0);
}

// ---- With drelative, in its type ----

// Each row's share of the table's first entry (end 0) and of its last one (end 1), as slope_terms_of.
template <class T>
constexpr T* end_terms_of(const BackwardParams& p, int end) {
  return sink_terms_of<T>(p) + (p.dsinks ? all_rows(p) : 0) + end * all_rows(p);
}

// The sums of the same over each sequence's rows, (batch, num_heads_q).
template <class T>
constexpr T* end_sums_of(const BackwardParams& p, int end) {
  return end_terms_of<T>(p, 2) + end * p.batch * p.num_heads_q;
}

// The sums of dS on the diagonals j - i of all sequences of a query head, one for each query and key.
constexpr int64_t all_diagonals(const BackwardParams& p) {
  return is_packed(p) ? p.packed.total_q + p.packed.total_k : p.batch * (p.seqlen_q + p.seqlen_k);
}

// The sum on diagonal 0 of query head h; a head has the diagonals from 1 - seqlen_q up to seqlen_k - 1.
template <class T>
constexpr T* diagonals_of(const BackwardParams& p, const Head& head, int64_t h) {
  const int64_t first = is_packed(p) ? head.first_q + head.first_k : head.b * (p.seqlen_q + p.seqlen_k);
  return end_sums_of<T>(p, 2) + h * all_diagonals(p) + first + head.seqlen_q;
}

// ---- Without dslopes and drelative ----

// The sums of dQ of a KV head, (rows, head_dim), for 16-bit types.
constexpr float* query_sums_of(const BackwardParams& p, RowsBefore before, int64_t rows) {
  const int64_t first = PYATTN_PACKED ? before : before * rows;
  return sink_terms_of<float>(p) + (p.dsinks ? all_rows(p) : 0) + first * p.head_dim;
}

// T as for slope_terms_of.
template <class T>
constexpr int64_t workspace_bytes(const BackwardParams& p, bool query_sums) {
  const int64_t row = sizeof(RowTerms) + (p.dslopes ? sizeof(T) : 0) + (p.dsinks ? sizeof(T) : 0) +
                      (p.drelative ? 2 * sizeof(T) : 0) + (query_sums ? p.head_dim * sizeof(float) : 0);
  const int64_t head = p.drelative ? (2 * p.batch + all_diagonals(p)) * sizeof(T) : 0;
  return all_rows(p) * row + p.num_heads_q * head;
}

}  // namespace
}  // namespace pyattn::cuda
