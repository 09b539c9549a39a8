// Listed keys as factors of a query's products: rows of K and V in place if operands are what is stored, else copied.
#pragma once

#include "cpu/products/matrix.h"
#include "cpu/products/operand.h"
#include "cpu/products/product.h"
#include "cpu/products/scratch.h"
#include "cpu/tiles/strips.h"

namespace pyattn::PYATTN_ISA {
namespace {

// Rows of a register tile whose left rows lie anywhere: the addresses of 16 would not fit the registers of x86.
template <int kNV>
inline constexpr int kListedMR = min(kMR[kNV], 12);
// The most keys that listed_scores writes after the last one.
inline constexpr int64_t kMostRepeated = 11;

// out[kM][kNV vectors of lanes] (+)= K Q for rows at these addresses and some of their terms. Not inlined, because addresses
// and sums take all registers.
template <int kM, int kNV, class T, class E>
[[gnu::noinline]] void listed_score_tile(const E* const* keys, int64_t terms, Matrix<const E> Q, Matrix<T> out,
                                         bool adds) {
  const E* key[kM];
  PYATTN_UNROLL(16)
  for (int i = 0; i < kM; ++i) key[i] = keys[i];
  vec<T> sum[kM][kNV] = {};
  PYATTN_UNROLL(1)
  for (int64_t k = 0; k < terms; ++k) {
    vec<E> q[kNV];
    PYATTN_UNROLL(16)
    for (int v = 0; v < kNV; ++v) q[v] = load(Q.at(k) + v * kLanes<T>);
    PYATTN_UNROLL(16)
    for (int i = 0; i < kM; ++i) {
      const vec<E> a = broadcast(key[i] + k);
      PYATTN_UNROLL(16)
      for (int v = 0; v < kNV; ++v) sum[i][v] = fma(a, q[v], sum[i][v]);
    }
  }
  PYATTN_UNROLL(16)
  for (int i = 0; i < kM; ++i) {
    PYATTN_UNROLL(16)
    for (int v = 0; v < kNV; ++v) {
      T* const to = out.at(i) + v * kLanes<T>;
      store(to, adds ? load(to) + sum[i][v] : sum[i][v]);
    }
  }
}

// K[keys][inner], Q[inner][lanes] -> out[keys][lanes] = K Q, with the bits of score_gemm. Rows of K are read in place:
// a copy of them would take half of the product's time. Later ones are prefetched, as they lie anywhere. out has room for
// kMostRepeated more keys.
template <class S, int kNV = kMaxNV, class T = Compute<S>, class E = Operand<S>>
void listed_scores(int64_t keys, int64_t lanes, int64_t inner, ListedRows<const S> K, Matrix<const E> Q,
                   Matrix<T> out) {
  constexpr int kM = kListedMR<kNV>, kWidth = kNV * kLanes<T>;
  constexpr int64_t kAhead = 2 * kM, kLine = kCacheLine / sizeof(E);
  for (; lanes >= kWidth; lanes -= kWidth, Q = Q.from_column(kWidth), out = out.from_column(kWidth))
    for (int64_t j = 0; j < keys; j += kM) {
      const E *key[kM], *later[kM];
      for (int i = 0; i < kM; ++i) {  // past the last key, that one is repeated
        key[i] = reinterpret_cast<const E*>(K.at(min(j + i, keys - 1)));
        later[i] = reinterpret_cast<const E*>(K.at(min(j + kAhead + i, keys - 1)));
      }
      for (int64_t k = 0; k < inner; k += kScoreBlock<E>) {
        const int64_t terms = min(kScoreBlock<E>, inner - k);
        for (int64_t line = k; line < k + terms; line += kLine)
          for (int i = 0; i < kM; ++i) __builtin_prefetch(later[i] + line);
        const E* some[kM];
        for (int i = 0; i < kM; ++i) some[i] = key[i] + k;
        listed_score_tile<kM, kNV, T, E>(some, terms, Q.from(k), out.from(j), k > 0);
      }
    }
  if constexpr (kNV > 1)
    if (lanes) listed_scores<S, kNV - 1>(keys, lanes, inner, K, Q, out);
}

template <class S>
class ListedKeys {
  using T = Compute<S>;
  using E = Operand<S>;
  using Rows = ListedRows<const S>;

 public:
  static constexpr int64_t kTile = kTileKeys;

  ListedKeys(const ForwardParams& p, Carver& carver) {
    const int64_t copied = kInPlace<S> ? 0 : kTile, cols = max(p.head_dim, p.head_dim_v);
    buffer_ = carver.take<E>(copied, round_up(cols, kLanes<T>));
  }

  // rows[count][cols] Q[terms(cols)][lanes] -> out[count][lanes], with the bits of score_gemm.
  void scores(Rows rows, int64_t count, int64_t cols, Matrix<const E> Q, int64_t lanes, Matrix<T> out) const {
    if (kInPlace<S> || (kPairs<S> && rows.row % 2 == 0 && cols % 2 == 0))
      return listed_scores<S>(count, lanes, terms<S>(cols), rows, Q, out);
    for (int64_t i = 0; i < count; ++i) {
      if constexpr (kPairs<S>) {
        buffer_.at(i)[terms<S>(cols) - 1] = 0;
        __builtin_memcpy(buffer_.at(i), rows.at(i), cols * sizeof(S));
      }
    }
    if constexpr (!kPairs<S>) pack_rows<S>(buffer_, count, cols, [&](int64_t i) { return rows.at(i); });
    score_gemm<T>(count, 0, lanes, terms<S>(cols), buffer_.strided(), Q, out);
  }

  // sums[lanes][cols] = sums * decay + weights[lanes][terms(count)] rows[count][cols], as add_decayed.
  void sum(Rows rows, int64_t count, int64_t cols, Strided<E> weights, int64_t lanes, const T* decay,
           Matrix<T> sums) const {
    if constexpr (kInPlace<S>) {
      add_decayed<kMaxNV, E>(lanes, count, cols, weights, rows, decay, sums);
    } else {
      pack_summed_rows<S>(buffer_, count, cols, [&](int64_t i) { return rows.at(i); });
      add_decayed<kMaxNV, E>(lanes, terms<S>(count), cols, weights, Matrix<const E>(buffer_), decay, sums);
    }
  }

 private:
  Matrix<E> buffer_;  // [keys][cols]: copies
};

}  // namespace
}  // namespace pyattn::PYATTN_ISA
