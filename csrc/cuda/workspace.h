// What the passes of a backward leave for one another in params.workspace: one array after the
// other, each as long as the call needs it.
#pragma once

#include <cstdint>

#include "attention.h"
#include "gradient.h"
#include "primitives.h"

namespace pyattn::cuda {
namespace {

constexpr int64_t all_rows(const ForwardParams& p) { return p.batch * p.num_heads_q * p.seqlen_q; }

// (batch * num_heads_kv, rows).
PYATTN_DEVICE RowTerms* row_terms_of(const BackwardParams& p, unsigned head, unsigned rows) {
  return static_cast<RowTerms*>(p.workspace) + uint64_t{head} * rows;
}

// Each row's share of dslopes and of dsinks, (batch, num_heads_q, seqlen_q), T being double for
// float64, else float.
template <class T>
constexpr T* slope_terms_of(const BackwardParams& p) {
  return static_cast<T*>(static_cast<void*>(static_cast<RowTerms*>(p.workspace) + all_rows(p)));
}
template <class T>
constexpr T* sink_terms_of(const BackwardParams& p) {
  return slope_terms_of<T>(p) + (p.dslopes ? all_rows(p) : 0);
}

// (rows, head_dim) sums of dQ of a KV head, for 16-bit types.
constexpr float* query_sums_of(const BackwardParams& p, int64_t head, int64_t rows) {
  return sink_terms_of<float>(p) + (p.dsinks ? all_rows(p) : 0) + head * rows * p.head_dim;
}

// T as above.
template <class T>
constexpr int64_t workspace_bytes(const BackwardParams& p, bool query_sums) {
  const int64_t row = sizeof(RowTerms) + (p.dslopes ? sizeof(T) : 0) + (p.dsinks ? sizeof(T) : 0) +
                      (query_sums ? p.head_dim * sizeof(float) : 0);
  return all_rows(p) * row;
}

}  // namespace
}  // namespace pyattn::cuda
