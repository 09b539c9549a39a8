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

PYATTN_INLINE void keep_awake(int64_t) {}

#else

static_assert(kRegisterTerms == kRegisterWords);

// Four of the eight registers hold neighbouring sums of 16 rows, the fifth holds A, and the others hold B in turn.
inline constexpr int kSumRegisters = 4, kRegisterA = 4, kRegisterB = 5, kRegistersB = 3;

// Vectors between products call this with the number of a key: the unit that multiplies registers sleeps after some 400 ns
// without a product, and the next ones then wait 350 ns. One product that nobody reads, every 32 keys of up to 64 queries, keeps
// it awake.
PYATTN_INLINE void keep_awake(int64_t key) {
  if (key % 32 == 0) multiply_registers<0, kRegisterA, kRegisterB>();
}

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

// Calls f with that many registers of sums, 1 to 4, as a sequence of their numbers.
template <class F>
PYATTN_INLINE void with_sums(int64_t registers, F f) {
  switch (registers) {
    case 1: return f(std::make_integer_sequence<int, 1>{});
    case 2: return f(std::make_integer_sequence<int, 2>{});
    case 3: return f(std::make_integer_sequence<int, 3>{});
    default: return f(std::make_integer_sequence<int, kSumRegisters>{});
  }
}

// Terms that one pass over registers multiplies: 128 keys, more than a tile has, or columns.
inline constexpr int64_t kPassTerms = 4 * kRegisterWords;

// The left factors of 16 rows. Where they don't fill a register they are copied.
template <bool kFinite>
class LeftRows {
 public:
  LeftRows(Strided<bf16_pair> A, int64_t rows, int64_t inner)
      : A_(A), rows_(rows), in_place_(!kFinite && A.col == 1 && rows == kRegisterWords) {
    begin(0, min(kPassTerms, inner));
  }

  // Goes on to the terms [k, k + count), at most kPassTerms.
  void begin(int64_t k, int64_t count) {
    if (k == begin_) return;
    begin_ = k;
    for (int64_t n = 0; n * kRegisterWords < count; ++n)
      if (!loads_in_place(count - n * kRegisterWords))
        copy_left<kFinite>(A_.from(0, k + n * kRegisterWords), rows_, min(kRegisterWords, count - n * kRegisterWords),
                           images_[n]);
  }

  // Where register n lies, of which `left` terms are left.
  const bf16_pair* at(int64_t n, int64_t left) const {
    return loads_in_place(left) ? A_.data + begin_ + n * kRegisterWords : images_[n].words[0];
  }
  int64_t row_bytes(int64_t left) const {
    return loads_in_place(left) ? A_.row * static_cast<int64_t>(sizeof(bf16_pair)) : RegisterImage::kRowBytes;
  }
  // From one register to the next.
  int64_t step() const { return in_place_ ? kRegisterWords : kRegisterWords * kRegisterWords; }

 private:
  const Strided<bf16_pair> A_;
  const int64_t rows_;
  const bool in_place_;
  int64_t begin_ = -1;
  RegisterImage images_[kPassTerms / kRegisterWords];

  bool loads_in_place(int64_t left) const { return in_place_ && left >= kRegisterWords; }
};

// Adds products of n registers to sums, which are registers. Not inlined: with few variables, none is moved to the stack.
template <class Beside, int... kV>
[[gnu::noinline]] void multiply_whole(const bf16_pair* a, int64_t a_bytes, int64_t a_step, const bf16_pair* b,
                                      int64_t b_bytes, int64_t n, Beside beside, std::integer_sequence<int, kV...>) {
  constexpr int64_t kWords = sizeof(bf16_pair), kVectors = sizeof...(kV);
  for (; n > 0; --n, a += a_step, b += kRegisterWords * b_bytes / kWords) {
    if constexpr (requires { beside.before_tile(0); })  // multiply-adds take a sixteenth of a vector's time
      beside.before_tile(kRegisterWords * kRegisterWords * kVectors);
    load_register<kRegisterA>(a, a_bytes);
    ((load_register<kRegisterB + kV % kRegistersB>(b + kV * kRegisterWords, b_bytes),
      multiply_registers<kV, kRegisterA, kRegisterB + kV % kRegistersB>()),
     ...);
  }
}

// The same for the rows [0, inner) of B, at most a register, which are copied.
template <bool kFinite, int... kV>
void multiply_copied(const bf16_pair* a, int64_t a_bytes, Matrix<const bf16_pair> B, int64_t inner,
                     std::integer_sequence<int, kV...>) {
  RegisterImage image;
  load_register<kRegisterA>(a, a_bytes);
  ((copy_words<kFinite, false>(B.data + kV * kRegisterWords, B.row, inner, kRegisterWords, image),
    load_register<kRegisterB + kV % kRegistersB>(&image, RegisterImage::kRowBytes),
    multiply_registers<kV, kRegisterA, kRegisterB + kV % kRegistersB>()),
   ...);
}

// Sums of 16 rows that are added to C once the next ones have been issued: they arrive some 100 cycles later.
template <class Update>
class WaitingSums {
 public:
  explicit WaitingSums(Update update) : update_(update) {}

  // Stores the sums in registers, for C[rows][...], and adds those before.
  template <int... kV>
  void add(int64_t rows, Matrix<float> C, int64_t j, std::integer_sequence<int, kV...>) {
    (store_register<kV>(sums_[1 - at_][kV], RegisterImage::kRowBytes), ...);
    finish();
    at_ = 1 - at_, rows_ = rows, vectors_ = sizeof...(kV), C_ = C, j_ = j;
  }

  void finish() {
    const Update update = update_;
    const int64_t rows = rows_, row = C_.row;
    for (int64_t v = 0, j = j_; v < vectors_; ++v, j += kRegisterWords) {
      const float* sum = sums_[at_][v][0];
      float* c = C_.data + j;
      for (int64_t i = 0; i < rows; ++i, c += row, sum += kRegisterWords) update.apply(c, j, load(sum));
    }
    vectors_ = 0;
  }

 private:
  const Update update_;
  int at_ = 0;
  int64_t rows_ = 0, vectors_ = 0, j_ = 0;
  Matrix<float> C_ = {};
  alignas(64) float sums_[2][kSumRegisters][kRegisterWords][kRegisterWords];
};

// C[rows][16 for each kV] (update) A[rows][inner] B[inner][...] from column j on, for at most 16 rows.
template <bool kFinite, class Update, class Beside, int... kV>
void gemm_registers(int64_t rows, int64_t inner, LeftRows<kFinite>& A, Matrix<const bf16_pair> B, Matrix<float> C,
                    int64_t j, Update update, WaitingSums<Update>& sums, Beside beside,
                    std::integer_sequence<int, kV...> columns) {
  (zero_register<kV>(), ...);
  for (int64_t k = 0; k < inner; k += kPassTerms) {
    const int64_t count = min(kPassTerms, inner - k), whole = kFinite ? 0 : round_down(count, kRegisterWords);
    A.begin(k, count);
    if (whole)
      multiply_whole(A.at(0, count), A.row_bytes(count), A.step(), B.at(k) + j,
                     B.row * static_cast<int64_t>(sizeof(bf16_pair)), whole / kRegisterWords, beside, columns);
    for (int64_t n = whole; n < count; n += kRegisterWords)
      multiply_copied<kFinite>(A.at(n / kRegisterWords, count - n), A.row_bytes(count - n),
                               B.from(k + n).from_column(j), min(kRegisterWords, count - n), columns);
  }
  if (update.replaces() && rows == kRegisterWords)
    (store_register<kV>(C.data + j + kV * kRegisterWords, C.row * static_cast<int64_t>(sizeof(float))), ...);
  else
    sums.add(rows, C, j, columns);
}

// The columns [j0, cols) of C[rows x cols] (update) A[rows x inner] B[inner x cols]; j0 and cols are multiples of
// 16. kFinite leaves out the terms that have a factor NaN or inf.
template <bool kFinite, class Update, class Beside>
void gemm_by_registers(int64_t rows, int64_t j0, int64_t cols, int64_t inner, Strided<bf16_pair> A,
                       Matrix<const bf16_pair> B, Matrix<float> C, Update update, Beside beside) {
  WaitingSums<Update> sums(update);
  for (int64_t i = 0; i < rows; i += kRegisterWords) {
    const int64_t count = min(kRegisterWords, rows - i);
    LeftRows<kFinite> left(A.from(i, 0), count, inner);
    for (int64_t j = j0; j < cols; j += kSumRegisters * kRegisterWords)
      with_sums(min(kSumRegisters, (cols - j) / kRegisterWords), [&](auto columns) {
        gemm_registers(count, inner, left, B, C.from(i), j, update, sums, beside, columns);
      });
  }
  sums.finish();
}

#endif

}  // namespace
}  // namespace pyattn::PYATTN_ISA
