// Matrix products: one register tile of vectors serves the products of blocks of query rows, and those of few rows with V,
// except for bf16 where the instruction set has tile registers (register_product.h).
#pragma once

#include <type_traits>

#include "cpu/products/matrix.h"
#include "cpu/products/register_product.h"
#include "cpu/products/scratch.h"
#include "cpu/simd/simd.h"
#include "shared/index.h"

namespace pyattn::PYATTN_ISA {
namespace {

// Updates C[i][j] with a product. The product is summed from zero and added
// once, so rounding errors grow with the number of blocks and not of terms.
template <class T>
class Update {
 public:
  // C += product, or C = C * decay[j] + product; the first product replaces C.
  static Update add() { return {true, nullptr}; }
  static Update add_unless(bool first) { return {!first, nullptr}; }
  static Update decay_and_add_unless(bool first, const T* decay) { return {!first, decay}; }

  // Whether C becomes the product itself.
  bool replaces() const { return !accumulate_; }

  PYATTN_MEMBER_INLINE void apply(T* c, int64_t j, vec<T> product) const {
    if (accumulate_) product = decay_ ? fma(load(c), load(decay_ + j), product) : load(c) + product;
    store(c, product);
  }

 private:
  Update(bool accumulate, const T* decay) : accumulate_(accumulate), decay_(decay) {}
  bool accumulate_;
  const T* decay_;
};

// Continues a product whose terms so far are summed in C.
template <class T>
struct Resume {
  PYATTN_MEMBER_INLINE void apply(T* c, int64_t, vec<T> product) const { store(c, product); }
};

// Terms of one sum in products that make scores, whose rounding error
// the exponential amplifies: longer sums are cut into blocks of this
// many. The error of bf16 lies in the factors, so its sums are not cut.
template <class E>
inline constexpr int64_t kScoreBlock = std::is_same_v<E, bf16_pair> ? int64_t{1} << 30 : 32;

// Calls f(k, count, update) for each block [k, k + count) of the terms of scores.
template <class T, class E, class F>
PYATTN_INLINE void each_block(int64_t inner, F f) {
  int64_t k = 0;
  do {
    f(k, min(kScoreBlock<E>, inner - k), Update<T>::add_unless(k == 0));
  } while ((k += kScoreBlock<E>) < inner);
}

// In place of an Update: each register tile sums one block of terms after another.
struct InBlocks {};

// `beside` prefetches: a product calls beside(k) at each term or beside.before_tile(multiply_adds) before each register
// tile, whichever it has. The default has neither.
struct Nothing {};

// The register tile: C[kM][kNV vectors from j0] (update) A[kM][inner] B[inner][...].
// T is the type of sums, E that of factors: T, or pairs of bf16, each of which counts
// as one term. B may be stored in another type, which loading widens to E. Its rows
// are a Matrix, or a RowTable and then lie anywhere.
template <int kM, int kNV, class Rows, class T, class E, class Updates, class Beside>
PYATTN_INLINE void gemm_tile(int64_t inner, Strided<E> A, Rows B, Matrix<T> C, int64_t j0, Updates update,
                             Beside beside) {
  // Whether B's vectors, each read by two rows, fit in registers beside the sums.
  constexpr bool kShared = kM == 2 && kNV * (kM + 1) + kM <= kVectorRegisters;
  const Rows columns = B.from_column(j0);
  vec<T> sum[kM][kNV] = {};
  if constexpr (std::is_same_v<Updates, Resume<T>>) {
    PYATTN_UNROLL(16)
    for (int i = 0; i < kM; ++i) {
      PYATTN_UNROLL(16)
      for (int v = 0; v < kNV; ++v) sum[i][v] = load(C.data + i * C.row + j0 + v * kLanes<T>);
    }
  }
  if constexpr (requires { beside.before_tile(0); }) beside.before_tile(inner * kM * kNV * kLanes<T>);
  PYATTN_UNROLL(kUnrolledTerms)
  for (int64_t k = 0; k < inner; ++k) {
    if constexpr (requires { beside(k); }) beside(k);
    const auto* row = columns.at(k);
    vec<E> b[kNV];
    PYATTN_UNROLL(16)
    for (int v = 0; v < kNV; ++v) {
      b[v] = load(row + v * kLanes<T>);
      if constexpr (kShared) PYATTN_IN_REGISTER(b[v]);  // gcc would load it for each of two rows
    }
    PYATTN_UNROLL(16)
    for (int i = 0; i < kM; ++i) {
      const vec<E> a = broadcast(A.data + i * A.row + k * A.col);
      PYATTN_UNROLL(16)
      for (int v = 0; v < kNV; ++v) sum[i][v] = fma(a, b[v], sum[i][v]);
    }
  }
  PYATTN_UNROLL(16)
  for (int i = 0; i < kM; ++i) {
    PYATTN_UNROLL(16)
    for (int v = 0; v < kNV; ++v) {
      const int64_t j = j0 + v * kLanes<T>;
      update.apply(C.data + i * C.row + j, j, sum[i][v]);
    }
  }
}

// The rows of the tile for rows that a tile of kM leaves: eight sums keep both multipliers busy (four cycles each), so the
// next tile has eight, and below that there is a tile of each height. Every height would take twice the code.
template <int kNV, int kM>
inline constexpr int kLower = kM * kNV > 8 && 8 / kNV < kM ? 8 / kNV : kM - 1;

// A panel of kNV vectors of columns from j0 on: tiles of kM rows, then lower ones for the remaining rows.
template <int kNV, class T, class E, class Rows, class Updates, class Beside, int kM = kMR[kNV]>
void gemm_panel(int64_t rows, int64_t inner, Strided<E> A, Rows B, Matrix<T> C, int64_t j0, Updates update,
                Beside beside) {
  int64_t i = 0;
  for (; i + kM <= rows; i += kM) {
    const auto tile = [&](int64_t k, int64_t count, auto updates) PYATTN_MEMBER_INLINE {
      gemm_tile<kM, kNV>(count, A.from(i, k), B.from(k), C.from(i), j0, updates, beside);
    };
    if constexpr (std::is_same_v<Updates, InBlocks>)
      each_block<T, E>(inner, tile);
    else
      tile(0, inner, update);
  }
  if constexpr (kM > 1)
    if (i < rows)
      gemm_panel<kNV, T, E, Rows, Updates, Beside, kLower<kNV, kM>>(rows - i, inner, A.from(i, 0), B, C.from(i), j0,
                                                                    update, beside);
}

// The columns [j0, cols) of C[rows x cols] (update) A[rows x inner] B[inner x cols];
// j0 and cols are multiples of the lanes.
template <class T, class E, class Rows = Matrix<const E>, int kNV = kMaxNV, class Updates, class Beside = Nothing>
void gemm(int64_t rows, int64_t j0, int64_t cols, int64_t inner, Strided<E> A, std::type_identity_t<Rows> B,
          Matrix<T> C, Updates update, Beside beside = {}) {
  if constexpr (kTileRegisters<E>) {
    gemm_by_registers<false>(rows, j0, cols, inner, A, B, C, update, beside);
  } else {
    for (; j0 + kNV * kLanes<T> <= cols; j0 += kNV * kLanes<T>)
      gemm_panel<kNV>(rows, inner, A, B, C, j0, update, beside);
    if constexpr (kNV > 1)
      if (j0 < cols) gemm<T, E, Rows, kNV - 1>(rows, j0, cols, inner, A, B, C, update, beside);
  }
}

// The columns [j0, cols) of C[rows x cols] = A[rows x inner] B[inner x cols].
template <class T, class E, int kNV = kMaxNV, class Beside = Nothing>
void score_gemm(int64_t rows, int64_t j0, int64_t cols, int64_t inner, Strided<E> A,
                std::type_identity_t<Matrix<const E>> B, Matrix<T> C, Beside beside = {}) {
  // Where a row of a panel of B is one cache line, all terms of the panel stay in L1; of wider panels, those of one block do.
  constexpr bool kOneLine = kMaxNV * kVectorBytes <= kCacheLine;
  if constexpr (kOneLine)
    gemm<T, E, Matrix<const E>, kNV>(rows, j0, cols, inner, A, B, C, InBlocks{}, beside);
  else
    each_block<T, E>(inner, [&](int64_t k, int64_t count, Update<T> update) {
      gemm<T, E, Matrix<const E>, kNV>(rows, j0, cols, count, A.from(0, k), B.from(k), C, update, beside);
    });
}

// gemm for tiles whose masked values may be NaN or inf, which gemm would multiply
// by 0: the same sums in the same order, without the terms for which seen(i, j, k),
// a vector of columns from j on, is false. k counts both elements of a pair. Tile registers
// sum the terms of finite factors, so one factor of a masked term must be 0 or not
// finite; terms of other factors, if seen, are added after.
template <class T, class E, class Rows = Matrix<const E>, class Seen>
void gemm_seen(int64_t rows, int64_t j0, int64_t cols, int64_t inner, Strided<E> A, std::type_identity_t<Rows> B,
               Matrix<T> C, Update<T> update, Seen seen) {
  if constexpr (kTileRegisters<E>) gemm_by_registers<true>(rows, j0, cols, inner, A, B, C, update, Nothing{});
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = j0; j < cols; j += kLanes<T>) {
      vec<T> sum = {};
      for (int64_t k = 0; k < inner; ++k) {
        const vec<E> a = broadcast(A.data + i * A.row + k * A.col), b = load(B.at(k) + j);
        if constexpr (std::is_same_v<E, bf16_pair>) {
          vec<bf16_pair> both = bit_cast<bf16_pair>((seen(i, j, 2 * k) & 0xffff) | (seen(i, j, 2 * k + 1) & ~0xffff));
          if constexpr (kTileRegisters<E>) both &= non_finite_halves(a) | non_finite_halves(b);
          sum = fma(a & both, b & both, sum);
        } else {
          const vec<T> term = fma(a, b, sum);
          sum = seen(i, j, k) ? term : sum;
        }
      }
      T* c = C.data + i * C.row + j;
      if constexpr (kTileRegisters<E>)
        store(c, sum == 0 ? load(c) : load(c) + sum);  // adding 0 would change the sign of -0
      else
        update.apply(c, j, sum);
    }
}

// sums[rows][cols] = sums * decay[rows] + weights[rows][terms] V[terms][cols]. If columns do not fill the last vector of a
// row of sums, it holds the last kLanes columns, as in dots.h.
template <int kNV, class E, class Rows, class T>
void add_decayed(int64_t rows, int64_t terms, int64_t cols, Strided<E> weights, Rows V, const T* decay,
                 Matrix<T> sums) {
  constexpr int L = kLanes<T>;
  const int64_t whole = round_down(cols, L);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t d = 0; d < sums.row; d += L) store(sums.at(r) + d, load(sums.at(r) + d) * decay[r]);
  gemm<T, E, Rows, kNV>(rows, 0, whole, terms, weights, V, sums, Update<T>::add());
  if (whole < cols)
    gemm<T, E, Rows, kNV>(rows, 0, L, terms, weights, V.from_column(cols - L), sums.from_column(whole),
                          Update<T>::add());
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
