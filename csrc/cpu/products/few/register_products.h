// The products of few query rows on tile registers: S^T = K Q^T, whose left factor is 16 rows of K as they lie, and O += P V,
// whose right factor is pairs of rows of V. Rows on the lanes, or of P and O, that are no query's mean nothing.
#pragma once

#include "cpu/products/lines_ahead.h"
#include "cpu/products/matrix.h"
#include "cpu/products/operand.h"
#include "cpu/products/register_product.h"
#include "cpu/products/scratch.h"
#include "cpu/simd/simd.h"
#include "shared/index.h"

namespace pyattn::PYATTN_ISA {
namespace {

#ifndef PYATTN_HAS_TILE_REGISTERS

struct RegisterProducts {
  void take(Carver&, int64_t, int64_t, int64_t) {}
  RegisterProducts of(int64_t) const { return {}; }
};

#else

struct RegisterProducts {
  static constexpr int64_t L = kRegisterWords;
  // Keys of a turn: a register of Q multiplies four of K, and sums of O are loaded and stored once.
  static constexpr int64_t kTurn = 64;
  int64_t terms = 0;          // query_terms(head_dim)
  Matrix<bf16_pair> Qt = {};  // [heads x terms][16]
  Matrix<float> O = {};  // [heads x 16][head_dim_v in whole registers]: the product of at most kSumKeys keys, then 0
  Matrix<bf16_pair> K = {};       // [keys of a turn][terms]: rows that do not fill registers where they lie
  Matrix<bf16_pair> V = {};       // [pairs of a turn][head_dim_v in whole registers]
  RegisterImage* sums = nullptr;  // [kTurn / 16]

  void take(Carver& carver, int64_t heads, int64_t cols, int64_t cols_v) {
    if (!heads) return;
    terms = query_terms<bf16>(cols);
    const int64_t columns = round_up(cols_v, L);
    Qt = carver.take<bf16_pair>(heads * terms, L);
    O = carver.take<float>(heads * L, columns);
    K = carver.take_spread<bf16_pair>(kTurn, terms);
    V = carver.take_spread<bf16_pair>(kTurn / 2, columns);
    sums = carver.take<RegisterImage>(kTurn / L);
  }

  // The products of head h.
  RegisterProducts of(int64_t h) const {
    RegisterProducts own = *this;
    own.Qt = Qt.from(h * terms), own.O = O.from(h * L);
    return own;
  }

  template <class Row>
  void start(int64_t rows, int64_t cols, float power, Row row) const {
    pack_queries<bf16>(Qt, rows, L, cols, power, row);
    fill_zero(O.data, L * O.row);
  }

  // K[keys][cols] -> out[rows][keys] = Q K^T. Writes whole registers of keys.
  template <class Rows, class Ahead>
  void multiply_keys(int64_t rows, int64_t keys, int64_t cols, Rows rows_of_k, Matrix<float> out, Ahead& ahead) const {
    for (int64_t j = 0; j < keys; j += kTurn) {
      const int64_t some = min(kTurn, keys - j);
      with_sums(ceil_div(some, L), [&](auto groups) { add_keys(some, cols, rows_of_k.from(j), ahead, groups); });
      for (int64_t n = 0; n * L < some; ++n) {
        vec<float> square[L];
        PYATTN_UNROLL(16)
        for (int i = 0; i < L; ++i) square[i] = bit_cast<float>(load(sums[n].words[i]));
        transpose<float>(square);
        PYATTN_UNROLL(16)
        for (int r = 0; r < L; ++r)
          if (r < rows) store(out.at(r) + j + n * L, square[r]);
      }
    }
  }

  // O += P V, for the pairs of keys in P[rows][...]; weights of 0 follow the last key up to a multiple of 32.
  template <class Rows, class Ahead>
  void add_values(int64_t keys, int64_t cols, Strided<bf16_pair> P, Rows rows_of_v, Ahead& ahead) const {
    for (int64_t j = 0; j < keys; j += kTurn) {
      const int64_t some = min(kTurn, keys - j), terms = round_up(ceil_div(some, 2), L);
      for (int64_t i = 0; i < some; i += 2) {
        ahead.take(2);
        pack_summed_rows<bf16>(V.from(i / 2), min(2, some - i), cols,
                               [&](int64_t r) { return rows_of_v.at(j + i + r); });
      }
      for (int64_t i = ceil_div(some, 2); i < terms; ++i) fill_zero(V.at(i), O.row);
      for (int64_t d = 0; d < O.row; d += kSumRegisters * L) {
        with_sums(min(kSumRegisters, (O.row - d) / L),
                  [&](auto columns) { add_columns(P.data + j / 2, P.row, terms, d, columns); });
      }
    }
  }

  void add_to(Matrix<float> out, int64_t rows, int64_t cols) const {
    for (int64_t r = 0; r < rows; ++r) {
      float* const to = out.at(r);
      for (int64_t d = 0; d < cols; d += L) store(to + d, load(to + d) + load(O.at(r) + min(d, cols - L)));
      fill_zero(O.at(r), O.row);
    }
  }

 private:
  // A left factor of 16 rows.
  struct Left {
    const bf16_pair* data;
    int64_t bytes;  // from row to row
  };

  // sums[kN] = K Q^T for 16 keys each; the last ones may be fewer.
  template <class Rows, class Ahead, int... kN>
  void add_keys(int64_t keys, int64_t cols, Rows rows_of_k, Ahead& ahead, std::integer_sequence<int, kN...>) const {
    const Left left[] = {left_of(rows_of_k.from(kN * L), min(L, keys - kN * L), cols, K.from(kN * L))...};
    const int64_t each = max(1, keys * L / (terms * static_cast<int64_t>(sizeof...(kN))));  // rows that are prefetched
    (zero_register<kN>(), ...);
    for (int64_t k = 0; k < terms; k += L) {
      load_register<kRegisterA>(Qt.at(k), RegisterImage::kRowBytes);
      ((ahead.take(each), load_register<kRegisterB + kN % kRegistersB>(left[kN].data + k, left[kN].bytes),
        multiply_registers<kN, kRegisterB + kN % kRegistersB, kRegisterA>()),
       ...);
    }
    (store_register<kN>(&sums[kN], RegisterImage::kRowBytes), ...);
  }

  // Rows of K, in place where they are evenly spaced and fill registers, else copied.
  template <class Rows>
  static Left left_of(Rows rows_of_k, int64_t count, int64_t cols, Matrix<bf16_pair> copy) {
    constexpr int64_t kSize = sizeof(bf16);
    const auto address = [&](int64_t i) { return reinterpret_cast<uintptr_t>(rows_of_k.at(i)); };
    const uintptr_t bytes = count == L ? address(1) - address(0) : 1;
    bool in_place = (address(0) | bytes | static_cast<uintptr_t>(cols * kSize)) % kCacheLine == 0;
    if constexpr (!requires(Rows r) { r.row; })
      for (int64_t i = 2; in_place && i < L; ++i) in_place = address(i) - address(i - 1) == bytes;
    if (in_place) return {reinterpret_cast<const bf16_pair*>(rows_of_k.at(0)), static_cast<int64_t>(bytes)};
    pack_left_rows<bf16>(copy, count, cols, rows_of_k);
    return {copy.data, copy.row * static_cast<int64_t>(sizeof(bf16_pair))};
  }

  // O[16][16 for each kV] += P[16][terms] V[terms][...] from column d on.
  template <int... kV>
  void add_columns(const bf16_pair* P, int64_t row, int64_t terms, int64_t d, std::integer_sequence<int, kV...>) const {
    const int64_t o_bytes = O.row * static_cast<int64_t>(sizeof(float)),
                  v_bytes = V.row * static_cast<int64_t>(sizeof(bf16_pair));
    (load_register<kV>(O.data + d + kV * L, o_bytes), ...);
    for (int64_t k = 0; k < terms; k += L) {
      load_register<kRegisterA>(P + k, row * static_cast<int64_t>(sizeof(bf16_pair)));
      ((load_register<kRegisterB + kV % kRegistersB>(V.at(k) + d + kV * L, v_bytes),
        multiply_registers<kV, kRegisterA, kRegisterB + kV % kRegistersB>()),
       ...);
    }
    (store_register<kV>(O.data + d + kV * L, o_bytes), ...);
  }
};

#endif

}  // namespace
}  // namespace pyattn::PYATTN_ISA
