// Matrix product: one register tile serves every product of the forward and the backward.
#pragma once

#include <type_traits>

namespace pyattn::PYATTN_ISA {
namespace {

// Element (i, j) at data[i * row + j * col].
template <class T>
struct Strided {
  const T* data;
  int64_t row, col;
  Strided transposed() const { return {data, col, row}; }
  Strided from(int64_t i, int64_t j) const { return {data + i * row + j * col, row, col}; }
};

// Row i at data + i * row, columns contiguous. As the right factor of a product they are read in whole vectors.
template <class T>
struct Rows {
  T* data;
  int64_t row;
  Rows from(int64_t i) const { return {data + i * row, row}; }
  operator Rows<const T>() const { return {data, row}; }
  Strided<std::remove_const_t<T>> strided() const { return {data, row, 1}; }
};

// What becomes of the product in C[i][j]: it replaces C, is added to C, or is added to C * decay[j]. It is summed from
// zero and added once, so that rounding errors grow with the number of blocks and not of terms.
template <class T>
struct Update {
  bool accumulate;
  const T* decay = nullptr;

  __attribute__((always_inline)) void apply(T* c, int64_t j, vec<T> product) const {
    if (accumulate) product = decay ? fma(load(c), load(decay + j), product) : load(c) + product;
    store(c, product);
  }
};

// T is the type of sums, E that of factors: the same, or pairs of bf16, each of which counts as one term. B may lie in memory
// as another type, S, which loading makes E.
template <int kM, int kNV, class S, class T, class E>
PYATTN_INLINE void gemm_tile(int64_t inner, Strided<E> A, Rows<const S> B, Rows<T> C, int64_t j0, Update<T> update) {
  vec<T> sum[kM][kNV] = {};
#pragma GCC unroll 1
  for (int64_t k = 0; k < inner; ++k) {
    vec<E> b[kNV];
#pragma GCC unroll 16
    for (int v = 0; v < kNV; ++v) b[v] = load(B.data + k * B.row + j0 + v * kLanes<T>);
#pragma GCC unroll 16
    for (int i = 0; i < kM; ++i) {
      const vec<E> a = broadcast(A.data + i * A.row + k * A.col);
#pragma GCC unroll 16
      for (int v = 0; v < kNV; ++v) sum[i][v] = fma(a, b[v], sum[i][v]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kM; ++i)
#pragma GCC unroll 16
    for (int v = 0; v < kNV; ++v) {
      const int64_t j = j0 + v * kLanes<T>;
      update.apply(C.data + i * C.row + j, j, sum[i][v]);
    }
}

// The panel of columns [j0, j0 + kNV vectors): tiles of kM rows, the rest as one that is as high as it is.
template <int kNV, class T, class E, class S, int kM = kMR[kNV]>
void gemm_panel(int64_t rows, int64_t inner, Strided<E> A, Rows<const S> B, Rows<T> C, int64_t j0, Update<T> update) {
  int64_t i = 0;
  for (; i + kM <= rows; i += kM) gemm_tile<kM, kNV>(inner, A.from(i, 0), B, C.from(i), j0, update);
  if constexpr (kM > 1)
    if (i < rows) gemm_panel<kNV, T, E, S, kM - 1>(rows - i, inner, A.from(i, 0), B, C.from(i), j0, update);
}

// The columns [j0, cols) of C[rows x cols] (update) A[rows x inner] B[inner x cols]; j0 and cols are multiples of the lanes.
template <class T, class E, class S = E, int kNV = kMaxNV>
void gemm(int64_t rows, int64_t j0, int64_t cols, int64_t inner, Strided<E> A, std::type_identity_t<Rows<const S>> B,
          Rows<T> C, Update<T> update) {
  for (; j0 + kNV * kLanes<T> <= cols; j0 += kNV * kLanes<T>) gemm_panel<kNV>(rows, inner, A, B, C, j0, update);
  if constexpr (kNV > 1)
    if (j0 < cols) gemm<T, E, S, kNV - 1>(rows, j0, cols, inner, A, B, C, update);
}

// Products over the head dimension make scores, whose rounding error the exponential amplifies: they are summed in blocks
// of this many terms. Of 7,444 fp32 tensors of random cases the accuracy rule refused 26 with 32 terms, 37 with 64. The
// error of bf16 lies in the factors.
template <class E>
inline constexpr int64_t kScoreBlock = std::is_same_v<E, bf16_pair> ? int64_t{1} << 30 : 32;

// The columns [j0, cols) of C[rows x cols] = A[rows x inner] B[inner x cols].
template <class T, class E>
void score_gemm(int64_t rows, int64_t j0, int64_t cols, int64_t inner, Strided<E> A,
                std::type_identity_t<Rows<const E>> B, Rows<T> C) {
  int64_t k = 0;
  do {
    gemm<T>(rows, j0, cols, min(kScoreBlock<E>, inner - k), A.from(0, k), B.from(k), C, {k > 0});
  } while ((k += kScoreBlock<E>) < inner);
}

// The columns [j0, cols) of the same sums in the same order, leaving out the terms where seen(i, j, k), a vector of columns j,
// is false; k counts both of a pair. For tiles in which values that are not seen may be NaN or inf: the gemm above would
// multiply them by 0.
template <class T, class E, class Seen>
void gemm_seen(int64_t rows, int64_t j0, int64_t cols, int64_t inner, Strided<E> A,
               std::type_identity_t<Rows<const E>> B, Rows<T> C, Update<T> update, Seen seen) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = j0; j < cols; j += kLanes<T>) {
      vec<T> sum = {};
      for (int64_t k = 0; k < inner; ++k) {
        const vec<E> a = broadcast(A.data + i * A.row + k * A.col), b = load(B.data + k * B.row + j);
        if constexpr (std::is_same_v<E, bf16_pair>) {
          const vec<bf16_pair> both =
              bit_cast<bf16_pair>((seen(i, j, 2 * k) & 0xffff) | (seen(i, j, 2 * k + 1) & ~0xffff));
          sum = fma(a & both, b & both, sum);
        } else {
          const vec<T> term = fma(a, b, sum);
          sum = seen(i, j, k) ? term : sum;
        }
      }
      update.apply(C.data + i * C.row + j, j, sum);
    }
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
