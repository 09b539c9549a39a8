// Matrix products by tile registers, where the instruction set has them: 16 x 16 sums, each over 16
// pairs of bf16 at a time. Elsewhere product.h multiplies vectors.
#pragma once

#include <type_traits>
#include <utility>

#include "cpu/products/matrix.h"
#include "cpu/simd/simd.h"
#include "shared/index.h"

namespace pyattn::PYATTN_ISA {
namespace {

#ifndef PYATTN_HAS_TILE_REGISTERS

// Whether products of operands E run on tile registers.
template <class E>
inline constexpr bool kTileRegisters = false;

#else

template <class E>
inline constexpr bool kTileRegisters = std::is_same_v<E, bf16_pair>;

// Four of the eight registers hold neighbouring sums of 16 rows, the fifth holds A, and the others hold B in turn.
inline constexpr int kSumRegisters = 4, kRegisterA = 4, kRegisterB = 5, kRegistersB = 3;

// The content of a register, in memory.
struct alignas(64) RegisterImage {
  bf16_pair words[kRegisterWords][kRegisterWords];
  static constexpr int64_t kRowBytes = sizeof(words[0]);
};

// The halves of a pair that are NaN or inf, as masks.
PYATTN_INLINE vec<bf16_pair> non_finite_halves(vec<bf16_pair> x) {
  typedef int16_t halves __attribute__((vector_size(kVectorBytes)));
  return (vec<bf16_pair>)(((halves)x & 0x7f80) == 0x7f80);
}

// Loads the first n words and pads with zeros; kFinite also reads NaN and inf as 0.
template <bool kFinite>
PYATTN_INLINE vec<bf16_pair> load_words(const bf16_pair* p, int64_t n) {
  const auto x = (vec<bf16_pair>)_mm512_maskz_loadu_epi32(static_cast<__mmask16>(first(n)), p);
  return kFinite ? x & ~non_finite_halves(x) : x;
}

// lines[16][16] of words, `step` apart -> columns[16][16]. Loads that insert quarters of lines take the place of two of
// the four stages of transpose(), all of which run on one port.
PYATTN_INLINE void load_columns(const bf16_pair* lines, int64_t step, vec<bf16_pair> (&columns)[kRegisterWords]) {
  PYATTN_UNROLL(16)
  for (int c = 0; c < kRegisterWords; c += 4) {
    __m512i rows[4];  // row i: the quarters from column c on of the lines i, i + 4, i + 8, i + 12
    PYATTN_UNROLL(16)
    for (int i = 0; i < 4; ++i) {
      const auto quarter = [&](int line) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(lines + line * step + c));
      };
      rows[i] = _mm512_inserti32x4(_mm512_castsi128_si512(quarter(i)), quarter(i + 4), 1);
      rows[i] = _mm512_inserti32x4(_mm512_inserti32x4(rows[i], quarter(i + 8), 2), quarter(i + 12), 3);
    }
    const __m512i low[2] = {_mm512_unpacklo_epi32(rows[0], rows[1]), _mm512_unpacklo_epi32(rows[2], rows[3])};
    const __m512i high[2] = {_mm512_unpackhi_epi32(rows[0], rows[1]), _mm512_unpackhi_epi32(rows[2], rows[3])};
    columns[c] = (vec<bf16_pair>)_mm512_unpacklo_epi64(low[0], low[1]);
    columns[c + 1] = (vec<bf16_pair>)_mm512_unpackhi_epi64(low[0], low[1]);
    columns[c + 2] = (vec<bf16_pair>)_mm512_unpacklo_epi64(high[0], high[1]);
    columns[c + 3] = (vec<bf16_pair>)_mm512_unpackhi_epi64(high[0], high[1]);
  }
}

// lines[count][length] of contiguous words, `step` apart -> image, padded with zeros; kTransposed swaps rows and columns.
template <bool kFinite, bool kTransposed>
PYATTN_INLINE void copy_words(const bf16_pair* lines, int64_t step, int64_t count, int64_t length,
                              RegisterImage& image) {
  vec<bf16_pair> square[kRegisterWords];
  if (kTransposed && !kFinite && count == kRegisterWords && length == kRegisterWords) {
    load_columns(lines, step, square);
  } else {
    for (vec<bf16_pair>& line : square) line = vec<bf16_pair>{};
    for (int64_t i = 0; i < count; ++i) square[i] = load_words<kFinite>(lines + i * step, length);
    if constexpr (kTransposed) transpose<bf16_pair>(square);
  }
  PYATTN_UNROLL(16)
  for (int i = 0; i < kRegisterWords; ++i) store(image.words[i], square[i]);
}

// A[rows][inner], at most 16 x 16, of which either the rows or the columns are contiguous -> image.
template <bool kFinite>
PYATTN_INLINE void copy_left(Strided<bf16_pair> A, int64_t rows, int64_t inner, RegisterImage& image) {
  if (A.col == 1)
    copy_words<kFinite, false>(A.data, A.row, rows, inner, image);
  else
    copy_words<kFinite, true>(A.data, A.col, inner, rows, image);
}

// Loads B[inner][16], in place if it fills the register.
template <int kRegister, bool kFinite>
PYATTN_INLINE void load_right(Matrix<const bf16_pair> B, int64_t inner, RegisterImage& image) {
  if (!kFinite && inner == kRegisterWords)
    return load_register<kRegister>(B.data, B.row * static_cast<int64_t>(sizeof(bf16_pair)));
  copy_words<kFinite, false>(B.data, B.row, inner, kRegisterWords, image);
  load_register<kRegister>(&image, RegisterImage::kRowBytes);
}

// The left factors of 16 rows, whose registers are copied if they can't be loaded in place, the first ones only once.
template <bool kFinite>
class LeftRows {
 public:
  LeftRows(Strided<bf16_pair> A, int64_t rows, int64_t inner)
      : A_(A), rows_(rows), inner_(inner), in_place_(!kFinite && A.col == 1 && rows == kRegisterWords) {
    for (int64_t n = 0; n < min(kKept, ceil_div(inner, kRegisterWords)); ++n)
      if (!loads_in_place(n)) copy(n, images_[n]);
  }

  // Loads the columns [16 n, 16 n + 16).
  PYATTN_MEMBER_INLINE void load(int64_t n) {
    if (loads_in_place(n))
      return load_register<kRegisterA>(A_.from(0, n * kRegisterWords).data,
                                       A_.row * static_cast<int64_t>(sizeof(bf16_pair)));
    RegisterImage& image = images_[min(n, kKept)];
    if (n >= kKept) copy(n, image);
    load_register<kRegisterA>(&image, RegisterImage::kRowBytes);
  }

 private:
  static constexpr int64_t kKept = 4;  // 128 keys: more than a tile has
  Strided<bf16_pair> A_;
  int64_t rows_, inner_;
  bool in_place_;
  RegisterImage images_[kKept + 1];

  bool loads_in_place(int64_t n) const { return in_place_ && (n + 1) * kRegisterWords <= inner_; }
  PYATTN_MEMBER_INLINE void copy(int64_t n, RegisterImage& image) const {
    copy_left<kFinite>(A_.from(0, n * kRegisterWords), rows_, min(kRegisterWords, inner_ - n * kRegisterWords), image);
  }
};

// C[rows][16 for each kV] (update) A[rows][inner] B[inner][...] from column j on, for at most 16 rows.
template <bool kFinite, class Update, class Beside, int... kV>
void gemm_registers(int64_t rows, int64_t inner, LeftRows<kFinite>& A, Matrix<const bf16_pair> B, Matrix<float> C,
                    int64_t j, Update update, Beside beside, std::integer_sequence<int, kV...>) {
  RegisterImage image;
  (zero_register<kV>(), ...);
  for (int64_t n = 0; n * kRegisterWords < inner; ++n) {
    const int64_t k = n * kRegisterWords, count = min(kRegisterWords, inner - k);
    if constexpr (requires { beside.before_tile(0); })  // multiply-adds take a sixteenth of a vector's time
      beside.before_tile(count * kRegisterWords * static_cast<int64_t>(sizeof...(kV)));
    A.load(n);
    ((load_right<kRegisterB + kV % kRegistersB, kFinite>(B.from(k).from_column(j + kV * kRegisterWords), count, image),
      multiply_registers<kV, kRegisterA, kRegisterB + kV % kRegistersB>()),
     ...);
  }
  if (update.replaces() && rows == kRegisterWords)
    return (store_register<kV>(C.data + j + kV * kRegisterWords, C.row * static_cast<int64_t>(sizeof(float))), ...);
  alignas(64) float sums[sizeof...(kV)][kRegisterWords][kRegisterWords];
  (store_register<kV>(sums[kV], RegisterImage::kRowBytes), ...);
  for (int64_t i = 0; i < rows; ++i)
    (update.apply(C.from(i).data + j + kV * kRegisterWords, j + kV * kRegisterWords, load(sums[kV][i])), ...);
}

// The columns [j0, cols) of C[rows x cols] (update) A[rows x inner] B[inner x cols]; j0 and cols are multiples of
// 16. kFinite leaves out the terms that have a factor NaN or inf.
template <bool kFinite, class Update, class Beside>
void gemm_by_registers(int64_t rows, int64_t j0, int64_t cols, int64_t inner, Strided<bf16_pair> A,
                       Matrix<const bf16_pair> B, Matrix<float> C, Update update, Beside beside) {
  for (int64_t i = 0; i < rows; i += kRegisterWords) {
    const int64_t count = min(kRegisterWords, rows - i);
    LeftRows<kFinite> left(A.from(i, 0), count, inner);
    for (int64_t j = j0; j < cols; j += kSumRegisters * kRegisterWords) {
      const auto run = [&](auto columns) {
        gemm_registers(count, inner, left, B, C.from(i), j, update, beside, columns);
      };
      switch (min(kSumRegisters, (cols - j) / kRegisterWords)) {
        case 1: run(std::make_integer_sequence<int, 1>{}); break;
        case 2: run(std::make_integer_sequence<int, 2>{}); break;
        case 3: run(std::make_integer_sequence<int, 3>{}); break;
        default: run(std::make_integer_sequence<int, kSumRegisters>{});
      }
    }
  }
}

#endif

}  // namespace
}  // namespace pyattn::PYATTN_ISA
