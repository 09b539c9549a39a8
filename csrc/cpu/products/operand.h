// Operands: the form in which products read tensors and tiles, rows in place or packed
// copies in the compute type. Where the instruction set multiplies pairs of bf16
// (kPairs<S>), operands are pairs along the dimension that is summed over, padded with 0.
#pragma once

#include <utility>

#include "cpu/products/matrix.h"
#include "cpu/products/pack.h"
#include "cpu/simd/simd.h"
#include "shared/index.h"

namespace pyattn::PYATTN_ISA {
namespace {

// Rows of a KV tensor in the compute type: in place, or packed into the buffer.
template <class S>
Matrix<const Compute<S>> load_keys(Matrix<const S> rows, int64_t keys, int64_t cols, bool in_place,
                                   Matrix<Compute<S>> buffer) {
  if constexpr (kInPlace<S>)
    if (in_place) return {rows.data, rows.row};
  pack_rows<S>(buffer, keys, cols, [&](int64_t i) { return rows.at(i); });
  return {buffer.data, buffer.row};
}

template <class S>
PYATTN_INLINE vec<Operand<S>> load_operands(const S* p) {
  if constexpr (kPairs<S>)
    return load_unaligned(reinterpret_cast<const bf16_pair*>(p));
  else
    return load(p);
}

PYATTN_INLINE vec<i16_pair> load_operands(const i8* p) { return load_pairs(p); }

// Loads the first n columns and pads with zeros.
template <class S>
PYATTN_INLINE vec<Operand<S>> load_operands(const S* p, int64_t n) {
  if constexpr (kPairs<S>)
    return load_pairs(p, n);
  else
    return load(p, n);
}

// Multiplies by a power of two, which is exact except for subnormal numbers.
PYATTN_INLINE vec<float> scale_operands(vec<float> x, float power) { return x * power; }
PYATTN_INLINE vec<double> scale_operands(vec<double> x, double power) { return x * power; }
PYATTN_INLINE vec<bf16_pair> scale_operands(vec<bf16_pair> x, float power) {
  if (power == 1) return x;
  const vec<uint32_t> low = bit_cast<uint32_t>(bit_cast<float>(x << 16) * power);
  const vec<uint32_t> high = bit_cast<uint32_t>(bit_cast<float>(x & 0xffff0000) * power);
  return low >> 16 | (high & 0xffff0000);
}

// From this many rows on, arithmetic takes as long as memory, so several keys
// are multiplied side by side. Fewer rows read fastest one key after another.
inline constexpr int kSideBySide = 4;

// Whether that many rows or more widen K and V once a turn: they are stored in 16 bits, and a tile has registers for one row
// times whole rows of V, as in AVX2, so each query row would widen them again.
template <class S, class KV>
inline constexpr bool kWidensTurns = std::is_same_v<S, KV> && sizeof(KV) == 2 && !kPairs<S> && kMR[kWideNV] == 1;

// Terms of a row where rows are few, with columns on the lanes: whole vectors. If columns do not fill the last vector, it
// ends with the last column and overlaps the vector before (dots.h).
template <class S>
constexpr int64_t few_terms(int64_t cols) {
  return round_up(terms<S>(cols), kLanes<Operand<S>>);
}

// Loads the vector that ends at `end`; all but its last n columns read as 0, whatever K or V holds there.
template <class S>
PYATTN_INLINE vec<Operand<S>> load_last(const S* end, int64_t n) {
  using E = Operand<S>;
  struct Bytes {
    unsigned char at[2 * kVectorBytes];
  };
  alignas(kVectorBytes) static constexpr Bytes kKept = [] {
    Bytes bytes{};
    for (int i = kVectorBytes; i < 2 * kVectorBytes; ++i) bytes.at[i] = 0xff;
    return bytes;
  }();
  vec<typename Bits<Compute<S>>::type> kept;
  __builtin_memcpy(&kept, kKept.at + n * (sizeof(E) / kColumns<S>), sizeof kept);
  const auto bits = reinterpret_cast<decltype(kept)>(load_operands(end - kColumns<S> * kLanes<E>));
  return reinterpret_cast<vec<E>>(bits & kept);
}

// row(i)[d] -> Q[rows][few_terms(cols)], times a power of two.
template <class S, class Row>
void pack_few_queries(Matrix<Operand<S>> Q, int64_t rows, int64_t cols, Compute<S> scale, Row row) {
  constexpr int64_t kWidth = kColumns<S> * kLanes<Operand<S>>;
  const int64_t last = cols % kWidth;
  for (int64_t r = 0; r < rows; ++r) {
    const S* q = row(r);
    Operand<S>* packed = Q.from(r).data;
    for (int64_t d = 0; d < cols - last; d += kWidth, packed += kLanes<Operand<S>>)
      store(packed, scale_operands(load_operands(q + d), scale));
    if (last) store(packed, scale_operands(load_last(q + cols, last), scale));
  }
}

// Rows of packed queries: terms of their columns, with zeros up to whole tile registers.
template <class S>
constexpr int64_t query_terms(int64_t cols) {
  return kTileRegisters<Operand<S>> ? round_up(terms<S>(cols), kRegisterTerms) : terms<S>(cols);
}

// row(i)[d] -> dst[query_terms(cols)][lanes], transposed: dst[d][i] = scale * row(i)[d], 0 for
// rows <= i < lanes. scale is a power of two.
template <class S, class Row>
void pack_queries(Matrix<Operand<S>> dst, int64_t rows, int64_t lanes, int64_t cols, Compute<S> scale, Row row) {
  using E = Operand<S>;
  constexpr int L = kLanes<E>, kWidth = L * kColumns<S>;
  for (int64_t i = 0; i < lanes; i += L) {
    const int64_t m = min(L, rows - i);
    const S* from[L];
    for (int64_t r = 0; r < m; ++r) from[r] = row(i + r);
    prefetch_rows(i + L, min(i + 2 * L, rows), cols, row);
    for (int64_t d = 0; d < cols; d += kWidth) {
      const int64_t n = min(kWidth, cols - d);
      E* to = dst.from(d / kColumns<S>).data + i;
      vec<E> square[L];
      if (m == L && n == kWidth) {
        PYATTN_UNROLL(16)
        for (int r = 0; r < L; ++r) square[r] = scale_operands(load_operands(from[r] + d), scale);
        transpose<E>(square);
        PYATTN_UNROLL(16)
        for (int c = 0; c < L; ++c) store(to + c * dst.row, square[c]);
        continue;
      }
      for (vec<E>& x : square) x = vec<E>{};
      for (int64_t r = 0; r < m; ++r) square[r] = scale_operands(load_operands(from[r] + d, n), scale);
      transpose<E>(square);
      for (int64_t c = 0; c < terms<S>(n); ++c) store(to + c * dst.row, square[c]);
    }
    for (int64_t d = terms<S>(cols); d < query_terms<S>(cols); ++d) store(dst.from(d).data + i, vec<E>{});
  }
}

// Two rows of bf16 -> pairs of both rows, column by column; a gets the first half of the columns.
template <std::size_t... I>
PYATTN_INLINE void interleave(vec<bf16_pair>& a, vec<bf16_pair>& b, std::index_sequence<I...>) {
  typedef uint16_t columns __attribute__((vector_size(kVectorBytes)));
  constexpr int n = sizeof...(I);
  const columns x = (columns)a, y = (columns)b;
  a = (vec<bf16_pair>)__builtin_shufflevector(x, y, (I % 2 * n + I / 2)...);
  b = (vec<bf16_pair>)__builtin_shufflevector(x, y, (I % 2 * n + I / 2 + n / 2)...);
}

// Packs rows that are summed over: row(i)[d] -> dst[terms(rows)][cols], padded to a whole vector of columns.
template <class S, class Row>
void pack_summed_rows(Matrix<Operand<S>> dst, int64_t rows, int64_t cols, Row row) {
  if constexpr (!kPairs<S>) {
    pack_rows<S>(dst, rows, cols, row);
  } else {
    constexpr int L = kLanes<bf16_pair>;
    for (int64_t i = 0; i < rows; i += 2)
      for (int64_t d = 0; d < cols; d += 2 * L) {
        const int64_t n = min(2 * L, cols - d);
        vec<bf16_pair> a = load_operands(row(i) + d, n), b = {};
        if (i + 1 < rows) b = load_operands(row(i + 1) + d, n);
        interleave(a, b, std::make_index_sequence<2 * L>{});
        store(dst.from(i / 2).data + d, a);
        if (n > L) store(dst.from(i / 2).data + d + L, b);
      }
  }
}

// Packs rows as a left factor of tile registers: from[rows][cols] -> dst[rows][query_terms(cols)], padded with zeros.
template <class S, class Rows>
void pack_left_rows(Matrix<Operand<S>> dst, int64_t rows, int64_t cols, Rows from) {
  constexpr int64_t kWidth = 2 * kRegisterTerms;
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t d = 0; d < cols; d += kWidth)
      store(dst.at(i) + d / 2, load_operands(from.at(i) + d, min(kWidth, cols - d)));
}

// Keys or values [keys][cols] as the left factor of a sum over columns.
template <class S>
Strided<Operand<S>> left_keys(Matrix<const S> rows, int64_t keys, int64_t cols, Matrix<Operand<S>> buffer) {
  if constexpr (kPairs<S>) {
    if (cols == 0 || (rows.row % 2 == 0 && cols % 2 == 0))  // without columns nothing is read
      return {reinterpret_cast<const bf16_pair*>(rows.data), rows.row / 2, 1};
    for (int64_t i = 0; i < keys; ++i) {
      buffer.from(i).data[terms<S>(cols) - 1] = 0;
      __builtin_memcpy(buffer.at(i), rows.at(i), cols * sizeof(S));
    }
    return buffer.strided();
  } else {
    return load_keys<S>(rows, keys, cols, true, buffer).strided();
  }
}

// Keys or values [keys][cols] as rows that are summed over: in place if that is possible and requested.
template <class S>
Matrix<const Operand<S>> summed_keys(Matrix<const S> rows, int64_t keys, int64_t cols, bool in_place,
                                     Matrix<Operand<S>> buffer) {
  if constexpr (kPairs<S>) {
    pack_summed_rows<S>(buffer, keys, cols, [&](int64_t i) { return rows.at(i); });
    return buffer;
  } else {
    return load_keys<S>(rows, keys, cols, in_place, buffer);
  }
}

// The keys [k0, k1) and lanes [j0, j1) of a tile[keys][lanes], for a sum over the keys; k0 is even.
template <class S>
Matrix<const Operand<S>> tile_over_keys(Matrix<Compute<S>> tile, int64_t k0, int64_t k1, int64_t j0, int64_t j1,
                                        [[maybe_unused]] Matrix<Operand<S>> buffer) {
  if constexpr (kPairs<S>) {
    for (int64_t k = k0; k < k1; k += 2)
      for (int64_t j = j0; j < j1; j += kLanes<float>) {
        const vec<float> high = k + 1 < k1 ? load(tile.from(k + 1).data + j) : vec<float>{};
        store(buffer.from(k / 2).data + j, make_pairs(load(tile.from(k).data + j), high));
      }
    return buffer;
  } else {
    return tile;
  }
}

// The keys [k0, k1) and lanes [j0, j1) of a tile[keys][lanes], for a sum over the lanes. An odd last lane is paired with 0: the
// lane after it, of no row, may hold NaN.
template <class S>
Strided<Operand<S>> tile_over_lanes(Matrix<Compute<S>> tile, int64_t k0, int64_t k1, int64_t j0, int64_t j1,
                                    [[maybe_unused]] Matrix<Operand<S>> buffer) {
  if constexpr (kPairs<S>) {
    for (int64_t k = k0; k < k1; ++k) {
      Operand<S>* const pairs = buffer.from(k).data;
      for (int64_t j = j0; j < j1; j += kLanes<float>) store_pairs(pairs + j / 2, load(tile.from(k).data + j));
      if (j1 % 2) pairs[j1 / 2] &= 0xffff;
    }
    return buffer.strided();
  } else {
    return tile.strided();
  }
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
