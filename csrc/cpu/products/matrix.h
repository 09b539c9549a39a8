// Matrices in memory, as the products see them: a pointer and strides.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cpu/simd/inline.h"

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

// Row i at data + i * row, columns contiguous. The right
// factor of a product is read in whole vectors of columns.
template <class T>
struct Matrix {
  using Element = std::remove_const_t<T>;
  T* data;
  int64_t row;
  T* at(int64_t i) const { return data + i * row; }
  Matrix from(int64_t i) const { return {at(i), row}; }
  Matrix from_column(int64_t j) const { return {data + j, row}; }
  operator Matrix<const T>() const { return {data, row}; }
  Strided<std::remove_const_t<T>> strided() const { return {data, row, 1}; }
};

// The same for rows anywhere in memory: row i at rows[i] + col.
template <class T>
struct RowTable {
  using Element = std::remove_const_t<T>;
  T* const* rows;
  int64_t col = 0;
  PYATTN_MEMBER_INLINE T* at(int64_t i) const {
    T* row = rows[i] + col;
    asm("" : "+r"(row));  // one address for a row's columns; gcc would keep one offset for each, and spill
    return row;
  }
  RowTable from(int64_t i) const { return {rows + i, col}; }
  RowTable from_column(int64_t j) const { return {rows, col + j}; }
};

// The same for rows that a list names: row i at data + list[i] * row.
template <class T>
struct ListedRows {
  T* data;
  int64_t row;
  const int32_t* list;
  PYATTN_MEMBER_INLINE T* at(int64_t i) const { return data + list[i] * row; }
  ListedRows from(int64_t i) const { return {data, row, list + i}; }
  ListedRows from_column(int64_t j) const { return {data + j, row, list}; }
};

}  // namespace
}  // namespace pyattn::PYATTN_ISA
