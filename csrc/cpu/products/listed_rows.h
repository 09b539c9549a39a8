// Products of few query rows with rows that a list names, which are read and written in place. Columns lie on the lanes,
// in panels of at most four vectors.
#pragma once

#include "cpu/products/dots.h"
#include "cpu/products/matrix.h"
#include "cpu/products/operand.h"
#include "cpu/products/product.h"
#include "cpu/simd/simd.h"
#include "shared/index.h"

namespace pyattn::PYATTN_ISA {
namespace {

// Vectors of a panel: beside the sums of a vector of keys, AVX2's 16 registers hold four.
inline constexpr int kPanel = 4;

// Calls panel(width, first) for the vectors [first, count) in panels of kPanel or fewer; width is a constant.
template <int kNV = kPanel, class Panel>
PYATTN_INLINE void each_panel(int64_t first, int64_t count, Panel panel) {
  for (; first + kNV <= count; first += kNV) panel(std::integral_constant<int, kNV>{}, first);
  if constexpr (kNV > 1)
    if (first < count) each_panel<kNV / 2>(first, count, panel);
}

// q[few_terms(cols)], K[keys][cols] -> out[keys in whole vectors] = q K^T, with the bits of dots. q's vectors stay in
// registers for a vector of keys, which dots loads for each key. Past the last key, that one is repeated.
template <class S, class T = Compute<S>, class E = Operand<S>>
[[gnu::noinline]] void dots_of_row(const E* q, ListedRows<const S> K, int64_t keys, int64_t cols, T* out) {
  constexpr int L = kLanes<T>, kWidth = kLanes<E> * kColumns<S>;
  const int64_t last = cols % kWidth, whole = cols / kWidth;
  for (int64_t j = 0; j < keys; j += L) {
    const S* key[L];
    PYATTN_UNROLL(16)
    for (int i = 0; i < L; ++i) key[i] = K.at(min(j + i, keys - 1));
    vec<T> sum[L] = {};
    each_panel(0, whole, [&](auto width, int64_t first) PYATTN_MEMBER_INLINE {
      constexpr int kNV = width;
      vec<E> terms[kNV];
      PYATTN_UNROLL(16)
      for (int v = 0; v < kNV; ++v) terms[v] = load(q + (first + v) * kLanes<E>);
      PYATTN_UNROLL(16)
      for (int i = 0; i < L; ++i) {
        PYATTN_UNROLL(16)
        for (int v = 0; v < kNV; ++v) sum[i] = fma(terms[v], load_operands(key[i] + (first + v) * kWidth), sum[i]);
      }
    });
    if (last) {
      const vec<E> terms = load(q + whole * kLanes<E>);
      PYATTN_UNROLL(16)
      for (int i = 0; i < L; ++i) sum[i] = fma(terms, load_last(key[i] + cols, last), sum[i]);
    }
    sum_lanes<T>(sum);
    store(out + j, sum[0]);
  }
}

// Q[rows][few_terms(cols)], K[keys][cols] -> out[rows][keys in whole vectors] = Q K^T.
template <class S, class T = Compute<S>>
void listed_dots(int64_t rows, int64_t keys, int64_t cols, Matrix<const Operand<S>> Q, ListedRows<const S> K,
                 Matrix<T> out) {
  if (rows == 1) return dots_of_row<S>(Q.data, K, keys, cols, out.data);
  NoRowsAhead none;
  for (int64_t j = 0; j < keys; j += kLanes<T>)
    dots<S>(rows, keys - j, cols, Q, K.from(j), {out.data + j, out.row}, none);
}

// sum[columns] = sum * decay + weights[keys] V[keys][columns], for a panel. Even and odd keys have separate sums, because
// those of one key would not keep both multipliers busy.
template <int kNV, class S>
PYATTN_INLINE void sum_panel(const Compute<S>* weights, ListedRows<const S> V, int64_t keys, Compute<S> decay,
                             Compute<S>* sum) {
  using T = Compute<S>;
  constexpr int L = kLanes<T>;
  vec<T> even[kNV] = {}, odd[kNV] = {};
  int64_t j = 0;
  PYATTN_UNROLL(1)
  for (; j + 1 < keys; j += 2) {
    const S *v0 = V.at(j), *v1 = V.at(j + 1);
    const vec<T> w0 = broadcast(weights + j), w1 = broadcast(weights + j + 1);
    PYATTN_UNROLL(16)
    for (int v = 0; v < kNV; ++v) {
      even[v] = fma(w0, load(v0 + v * L), even[v]);
      odd[v] = fma(w1, load(v1 + v * L), odd[v]);
    }
  }
  if (j < keys) {
    PYATTN_UNROLL(16)
    for (int v = 0; v < kNV; ++v) even[v] = fma(broadcast(weights + j), load(V.at(j) + v * L), even[v]);
  }
  PYATTN_UNROLL(16)
  for (int v = 0; v < kNV; ++v) store(sum + v * L, fma(load(sum + v * L), set1(decay), even[v] + odd[v]));
}

// add_decayed over rows in place, of which one is summed by panels.
template <class S>
void sum_listed_rows(int64_t rows, int64_t keys, int64_t cols, Matrix<const Compute<S>> weights, ListedRows<const S> V,
                     const Compute<S>* decay, Matrix<Compute<S>> sums) {
  using T = Compute<S>;
  constexpr int L = kLanes<T>;
  const int64_t whole = round_down(cols, L);
  if (rows == 1) {
    each_panel(0, whole / L, [&](auto width, int64_t first) PYATTN_MEMBER_INLINE {
      sum_panel<width, S>(weights.data, V.from_column(first * L), keys, decay[0], sums.data + first * L);
    });
    if (whole < cols) sum_panel<1, S>(weights.data, V.from_column(cols - L), keys, decay[0], sums.data + whole);
    return;
  }
  add_decayed<kWideNV, T>(rows, keys, cols, weights.strided(), V, decay, sums);
}

// to[keys][columns] += weights[rows][keys]^T X[rows][columns], for a panel, key by key.
template <int kNV, class T>
PYATTN_INLINE void spread_panel(int64_t rows, int64_t keys, Matrix<const T> weights, Matrix<const T> X,
                                ListedRows<T> to) {
  constexpr int L = kLanes<T>;
  vec<T> x[kNV];
  PYATTN_UNROLL(16)
  for (int v = 0; v < kNV; ++v) x[v] = load(X.data + v * L);
  PYATTN_UNROLL(1)
  for (int64_t j = 0; j < keys; ++j) {
    T* const row = to.at(j);
    vec<T> total[kNV];
    const vec<T> weight = broadcast(weights.data + j);
    PYATTN_UNROLL(16)
    for (int v = 0; v < kNV; ++v) total[v] = fma(weight, x[v], load(row + v * L));
    PYATTN_UNROLL(1)
    for (int64_t r = 1; r < rows; ++r) {
      const vec<T> other = broadcast(weights.at(r) + j);
      PYATTN_UNROLL(16)
      for (int v = 0; v < kNV; ++v) total[v] = fma(other, load(X.at(r) + v * L), total[v]);
    }
    PYATTN_UNROLL(16)
    for (int v = 0; v < kNV; ++v) store(row + v * L, total[v]);
  }
}

// to[keys][cols] += weights[rows][keys]^T X[rows][cols]; cols are whole vectors. A list names each row once.
template <class T>
void spread_to_listed_rows(int64_t rows, int64_t keys, int64_t cols, Matrix<const T> weights, Matrix<const T> X,
                           ListedRows<T> to) {
  each_panel(0, cols / kLanes<T>, [&](auto width, int64_t first) PYATTN_MEMBER_INLINE {
    const int64_t d = first * kLanes<T>;
    spread_panel<width, T>(rows, keys, weights, X.from_column(d), to.from_column(d));
  });
}

// The gradients of one query row, and of the keys that it lists:
//
//   dV[keys] += P^T dO      dK[keys] += dS^T Q      dQ += dS K[keys]
template <class S, class T = Compute<S>>
struct ListedGradients {
  const T *P, *dS, *dO, *Q;
  ListedRows<T> dV, dK;
  ListedRows<const S> K;
  T* dQ;

  // Adds them for a panel of columns, all three key by key: one after another they take an eighth longer.
  template <int kNV>
  PYATTN_MEMBER_INLINE void add_panel(int64_t keys, int64_t column) const {
    constexpr int L = kLanes<T>;
    const ListedRows<T> values = dV.from_column(column), of_keys = dK.from_column(column);
    const ListedRows<const S> rows = K.from_column(column);
    vec<T> dout[kNV], query[kNV], sum[kNV] = {};
    PYATTN_UNROLL(16)
    for (int v = 0; v < kNV; ++v) dout[v] = load(dO + column + v * L), query[v] = load(Q + column + v * L);
    PYATTN_UNROLL(1)
    for (int64_t j = 0; j < keys; ++j) {
      T *const dv = values.at(j), *const dk = of_keys.at(j);
      const S* const key = rows.at(j);
      const vec<T> weight = broadcast(P + j), ds = broadcast(dS + j);
      PYATTN_UNROLL(16)
      for (int v = 0; v < kNV; ++v) {
        store(dv + v * L, fma(weight, dout[v], load(dv + v * L)));
        store(dk + v * L, fma(ds, query[v], load(dk + v * L)));
        sum[v] = fma(ds, load(key + v * L), sum[v]);
      }
    }
    PYATTN_UNROLL(16)
    for (int v = 0; v < kNV; ++v) store(dQ + column + v * L, load(dQ + column + v * L) + sum[v]);
  }

  // Adds all columns, whole vectors.
  void add(int64_t keys, int64_t cols) const {
    each_panel(0, cols / kLanes<T>,
               [&](auto width, int64_t first) PYATTN_MEMBER_INLINE { add_panel<width>(keys, first * kLanes<T>); });
  }
};

}  // namespace
}  // namespace pyattn::PYATTN_ISA
