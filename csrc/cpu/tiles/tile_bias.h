// A float bias on tiles [keys][queries]: adds its elements to scores, reading them as they lie
// in their tensor, and writes gradients of scores to dbias, where that does not broadcast.
#pragma once

#include <type_traits>

#include "cpu/products/matrix.h"
#include "cpu/products/pack.h"
#include "cpu/products/scratch.h"
#include "cpu/simd/simd.h"
#include "cpu/tiles/strips.h"
#include "shared/bias.h"

namespace pyattn::PYATTN_ISA {
namespace {

// Calls f with a pointer to the first element, in its storage type; S is q's.
template <class S, class F>
PYATTN_INLINE void with_floats(const BiasView& bias, F f) {
  if (bias.type == BiasType::kFloat32)
    f(static_cast<float*>(bias.data));
  else
    f(static_cast<S*>(bias.data));
}

// As many floats as T has lanes: a float32 bias with float64 scores.
template <class T>
struct NarrowVector {
  typedef float type __attribute__((vector_size(kLanes<T> * sizeof(float))));
};

// Loads the first n elements in the compute type, padded with zeros; store_elements rounds and writes them.
template <class T, class E>
PYATTN_INLINE vec<T> load_elements(const E* p, int64_t n) {
  if constexpr (std::is_same_v<Compute<E>, T>) {
    return load(p, n);
  } else {
    typename NarrowVector<T>::type x = {};
    __builtin_memcpy(&x, p, n * sizeof(E));
    return __builtin_convertvector(x, vec<T>);
  }
}

template <class T, class E>
PYATTN_INLINE void store_elements(E* p, vec<T> x, int64_t n) {
  if constexpr (std::is_same_v<Compute<E>, T>) {
    store(p, x, n);
  } else {
    const auto narrow = __builtin_convertvector(x, typename NarrowVector<T>::type);
    __builtin_memcpy(p, &narrow, n * sizeof(E));
  }
}

// Loads n elements of a row, `stride` apart; n is at most the number of lanes.
template <class T, class E>
PYATTN_INLINE vec<T> load_strided(const E* p, int64_t stride, int64_t n) {
  if (stride == 1) return load_elements<T>(p, n);
  vec<T> x = {};
  for (int64_t i = 0; i < n; ++i) x[i] = load_elements<T>(p + i * stride, 1)[0];
  return x;
}

// Prefetches the elements of a tile into L2 before its products
// are computed: it has too many rows for the hardware to follow.
// Inlined, because GCC removes calls of functions that only prefetch.
template <class E>
PYATTN_INLINE void prefetch_bias(const E* elements, const BiasView& bias, const Head& head, const Tile& tile) {
  if (bias.stride_k != 1 || bias.stride_q == 0) return;
  for (int64_t i = 0; i < tile.rows; ++i) {
    const E* row = elements + offset_of_row(bias, head, tile.r0 + i) + tile.n0;
    for (int64_t k = 0; k < tile.keys; k += kCacheLine / sizeof(E)) __builtin_prefetch(row + k, 0, 2);
  }
}

// scores[keys][queries] = scores * factor + bias, for the keys of a strip.
template <class T, class E>
void add_bias(Matrix<T> scores, const E* elements, const BiasView& bias, const Head& head, const Tile& tile,
              Strip strip, T factor) {
  constexpr int L = kLanes<T>;
  elements += tile.n0 * bias.stride_k;
  if (bias.stride_q == 0 && (head.group == 1 || bias.stride_h == 0)) {  // one row for all lanes
    elements += offset_of_row(bias, head, tile.r0);
    for (int64_t k = strip.begin; k < strip.end; ++k) {
      const vec<T> x = set1(load_elements<T>(elements + k * bias.stride_k, 1)[0]);
      for (int64_t j = strip.j0; j < strip.j1; j += L) {
        T* score = scores.from(k).data + j;
        store(score, fma(load(score), set1(factor), x));
      }
    }
    return;
  }
  for (int64_t j = strip.j0; j < strip.j1; j += L) {
    const int64_t m = min(L, tile.rows - j);
    const E* row[L];
    for (int64_t l = 0; l < L; ++l) row[l] = elements + offset_of_row(bias, head, tile.r0 + j + min(l, m - 1));
    for (int64_t k = strip.begin; k < strip.end; k += L) {
      const int64_t n = min(L, strip.end - k);
      vec<T> square[L];
      if (m == L && n == L && bias.stride_k == 1) {
        PYATTN_UNROLL(16)
        for (int l = 0; l < L; ++l) square[l] = load_elements<T>(row[l] + k, L);
      } else {
        PYATTN_UNROLL(16)
        for (int l = 0; l < L; ++l)  // lanes without a row get 0
          square[l] = load_strided<T>(row[l] + k * bias.stride_k, bias.stride_k, l < m ? n : 0);
      }
      transpose<T>(square);
      PYATTN_UNROLL(16)
      for (int c = 0; c < L; ++c) {
        if (c >= n) break;
        T* score = scores.from(k + c).data + j;
        store(score, fma(load(score), set1(factor), square[c]));
      }
    }
  }
}

// The same for tiles [queries][keys].
template <class T, class E>
void add_bias_by_rows(Matrix<T> scores, const E* elements, const BiasView& bias, const Head& head, const Tile& tile,
                      T factor) {
  constexpr int L = kLanes<T>;
  for (int64_t r = 0; r < tile.rows; ++r) {
    const E* row = elements + offset_of_row(bias, head, tile.r0 + r) + tile.n0 * bias.stride_k;
    for (int64_t k = 0; k < tile.keys; k += L) {
      T* score = scores.from(r).data + k;
      const vec<T> x = load_strided<T>(row + k * bias.stride_k, bias.stride_k, min(L, tile.keys - k));
      store(score, fma(load(score), set1(factor), x));
    }
  }
}

// dbias = 0 for these rows and keys; dbias is dense.
template <class S>
void clear_bias_gradient(const BackwardParams& p, const Head& head, Range rows, Range keys) {
  if (keys.empty()) return;
  with_floats<S>(p.dbias, [&](auto* dbias) {
    for (int64_t r = rows.begin; r < rows.end; ++r)
      fill_zero(dbias + offset_of_row(p.dbias, head, r) + keys.begin, keys.count());
  });
}

// dS[keys][queries] -> dbias, for the keys of a strip; dbias is dense.
template <class T, class E>
void store_bias_gradient(Matrix<T> dS, E* elements, const BiasView& view, const Head& head, const Tile& tile,
                         Strip strip) {
  constexpr int L = kLanes<T>;
  for (int64_t j = strip.j0; j < strip.j1; j += L) {
    const int64_t m = min(L, tile.rows - j);
    E* row[L];
    for (int64_t l = 0; l < m; ++l) row[l] = elements + offset_of_row(view, head, tile.r0 + j + l) + tile.n0;
    for (int64_t k = strip.begin; k < strip.end; k += L) {
      const int64_t n = min(L, strip.end - k);
      vec<T> square[L];
      PYATTN_UNROLL(16)
      for (int c = 0; c < L; ++c) square[c] = load(dS.from(k + min(c, n - 1)).data + j);
      transpose<T>(square);
      if (m == L && n == L) {
        PYATTN_UNROLL(16)
        for (int l = 0; l < L; ++l) store_elements<T>(row[l] + k, square[l], L);
      } else {
        for (int64_t l = 0; l < m; ++l) store_elements<T>(row[l] + k, square[l], n);
      }
    }
  }
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
