// Dot products of few query rows with keys. Columns lie on the lanes, and K is read in place, as it
// is stored: few rows would not fill the lanes, and reading K is the cost.
#pragma once

#include <cstdint>

#include "attention.h"
#include "heads.h"
#include "matrix.h"
#include "operand.h"
#include "pack.h"
#include "simd.h"
#include "strips.h"

namespace pyattn::PYATTN_ISA {
namespace {

// With more rows than 4 (bf16 in AVX2) to 11 (fp16 in AVX-512), the
// kernel with queries on the lanes is faster.
inline constexpr int64_t kDecodeRows = 8;
// How far ahead rows of K are prefetched where several are read side
// by side: 12 instead of 28 GB/s without.
inline constexpr int64_t kPrefetchKeys = 16;

// Whether forward decodes, and backward makes its scores with these products.
template <class S>
bool few_rows(const ForwardParams& p) {
  const auto whole_vectors = [](int64_t cols, int64_t width) { return cols > 0 && cols % width == 0; };
  const int64_t rows = p.seqlen_q * group_size(p), lanes = kLanes<Compute<S>>;
  return rows > 0 && rows <= kDecodeRows && !p.dropout.threshold && whole_vectors(p.head_dim, kColumns<S> * lanes) &&
         whole_vectors(p.head_dim_v, lanes);
}

// The query rows of a head, times a power of two -> Q[rows][terms(head_dim)].
template <class S>
void pack_few_queries(const ForwardParams& p, const Head& head, Compute<S> power, Matrix<Operand<S>> Q) {
  for (int64_t r = 0; r < head.count; ++r) {
    const S* q = head.row<const S>(p.q, r);
    for (int64_t d = 0; d < terms<S>(p.head_dim); d += kLanes<Operand<S>>)
      store(Q.from(r).data + d, scale_operands(load_operands(q + d * kColumns<S>), power));
  }
}

// Q[kRows][cols], K[keys][cols] -> out[kRows][kLanes / kRows] = Q K^T; with fewer keys, the last
// one stands in. Not inlined, for then it spills.
template <int kRows, class S, class T = Compute<S>, class E = Operand<S>>
[[gnu::noinline]] void dot_tile(Matrix<const E> Q, Matrix<const S> K, int64_t keys, int64_t cols, Matrix<T> out) {
  constexpr int kKeys = kLanes<T> / kRows;
  // Memory is fastest one key after the other; from 4 rows on arithmetic
  // decides, and takes several keys at a time.
  constexpr int kStreams = kRows < 4 ? 1 : kKeys;
  const S* key[kKeys];
  for (int i = 0; i < kKeys; ++i) key[i] = K.from(min(i, keys - 1)).data;
  if constexpr (kStreams > 1)
    prefetch_rows(kPrefetchKeys, kPrefetchKeys + kKeys, cols, [&](int64_t i) { return K.from(i).data; });
  const int64_t count = terms<S>(cols);
  vec<T> sum[kLanes<T>] = {};
  PYATTN_UNROLL(16)
  for (int i = 0; i < kKeys; i += kStreams) {
    PYATTN_UNROLL(1)
    for (int64_t d = 0; d < count; d += kLanes<E>) {
      vec<E> k[kStreams];
      PYATTN_UNROLL(16)
      for (int e = 0; e < kStreams; ++e) k[e] = load_operands(key[i + e] + d * kColumns<S>);
      PYATTN_UNROLL(16)
      for (int r = 0; r < kRows; ++r) {
        const vec<E> q = load(Q.from(r).data + d);
        PYATTN_UNROLL(16)
        for (int e = 0; e < kStreams; ++e) sum[r * kKeys + i + e] = fma(q, k[e], sum[r * kKeys + i + e]);
      }
    }
  }
  sum_lanes<T>(sum);
  T scores[kLanes<T>];
  store(scores, sum[0]);
  PYATTN_UNROLL(16)
  for (int r = 0; r < kRows; ++r) __builtin_memcpy(out.from(r).data, scores + r * kKeys, kKeys * sizeof(T));
}

// Q[rows][cols], K[keys][cols] -> out[rows][at most kLanes keys] = Q K^T.
template <class S, class T = Compute<S>, int kRows = min(4, kLanes<T>)>
PYATTN_INLINE void dots(int64_t rows, int64_t keys, int64_t cols, Matrix<const Operand<S>> Q, Matrix<const S> K,
                        Matrix<T> out) {
  constexpr int kKeys = kLanes<T> / kRows;
  int64_t r = 0;
  for (; r + kRows <= rows; r += kRows)
    for (int64_t j = 0; j < min(keys, kLanes<T>); j += kKeys)
      dot_tile<kRows, S>(Q.from(r), K.from(j), keys - j, cols, {out.from(r).data + j, out.row});
  if constexpr (kRows > 1)
    if (r < rows) dots<S, T, kRows / 2>(rows - r, keys, cols, Q.from(r), K, out.from(r));
}

// The products of all rows with the keys of a strip -> out[keys][queries]. Backward makes the
// scores of forward to the bit, or its weights would not add up to 1.
template <class S>
void few_products(Matrix<const Operand<S>> Q, Matrix<const S> K, int64_t rows, int64_t cols, Strip strip,
                  Matrix<Compute<S>> out) {
  constexpr int L = kLanes<Compute<S>>;
  Compute<S> block[kDecodeRows][L];
  for (int64_t j = strip.begin; j < strip.end; j += L) {
    dots<S>(rows, strip.end - j, cols, Q, K.from(j), {block[0], L});
    for (int64_t k = j; k < min(j + L, strip.end); ++k)
      for (int64_t r = strip.j0; r < strip.j1; ++r) out.from(k).data[r] = r < rows ? block[r][k - j] : 0;
  }
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
