// Factors that go from global memory straight to registers, for keys and values that one warp reads once: without a copy in
// shared memory there is no barrier, and each warp has its own reads under way.
//
// A lane reads chunks of 16 bytes. A sum over columns may take them in any order, so a slice takes its columns from the chunks of
// the four lanes that share a key; a product over keys writes columns in the order in which its lanes read them.
#pragma once

#include <cstdint>

#include "cuda/products/fragment.h"
#include "cuda/products/matrix.h"
#include "cuda/products/product.h"
#include "cuda/ptx/primitives.h"

namespace pyattn::cuda {
namespace {

// 16 bytes of a row.
struct Chunk {
  uint32_t words[4];
};

// Rows `stride` elements apart; rows from count on and columns from cols on read as 0.
template <class S>
struct DirectRows {
  static constexpr int kElements = kChunkBytes / sizeof(S);
  const S* first;
  int64_t stride;
  int count, cols;
  bool whole;  // chunks lie within the columns, on multiples of 16 bytes

  PYATTN_DEVICE DirectRows(const S* first, const View& view, int64_t count, int64_t cols)
      : first(first),
        stride(view.stride_s),
        count(static_cast<int>(count)),
        cols(static_cast<int>(cols)),
        whole(cols % kElements == 0 && whole_chunks<S>(view)) {}

  PYATTN_DEVICE Chunk chunk(int row, int col) const {
    Chunk chunk = {};
    if (row >= count || col >= cols) return chunk;
    const S* from = first + row * stride + col;
    if (whole) {
      load_16_bytes(chunk.words, from);
    } else {
#pragma unroll
      for (int i = 0; i < kElements; ++i)
        if (col + i < cols) set(chunk, i, from[i]);
    }
    return chunk;
  }

 private:
  static PYATTN_DEVICE void set(Chunk& chunk, int i, const S& x) {
    if constexpr (sizeof(S) == 4)
      chunk.words[i] = bits_of(x);
    else
      chunk.words[i / 2] |= uint32_t{x.bits} << i % 2 * 16;
  }
};

// A piece of 16 keys: the part of their rows that a warp holds at once, half of it at most in the registers of a lane.
template <class S, int kDim>
struct Piece {
  static constexpr int kElements = DirectRows<S>::kElements;
  // Where O takes half of a lane's registers, less is left for a piece.
  static constexpr int kMost = (kDim * sizeof(S) < 1024 ? 256 : 128) / sizeof(S),
                       kColumns = kDim < kMost ? kDim : kMost;
  static constexpr int kCount = kDim / kColumns, kChunks = kColumns / kElements;  // pieces, chunks of a row in one
  static constexpr int kSlices = 4 * kElements / kSlice;                          // of the four lanes' chunks
  Chunk chunks[kChunks / 2];

  // Keys lane / 4 and 8 after it, whose chunks four lanes share.
  PYATTN_DEVICE void load_keys(const DirectRows<S>& keys, int n0, int piece) {
#pragma unroll
    for (int i = 0; i < kChunks / 2; ++i)
      chunks[i] = keys.chunk(n0 + lane() / 4 + i / (kChunks / 4) * 8, column(piece, i % (kChunks / 4)));
  }

  // The first column of the lane's j-th chunk of a query or key.
  static PYATTN_DEVICE int column(int piece, int j) { return piece * kColumns + (4 * j + lane() % 4) * kElements; }

  // Values 2 (lane % 4), 1, 8 and 9 after it, whose chunks eight lanes share.
  PYATTN_DEVICE void load_values(const DirectRows<S>& values, int n0, int piece) {
#pragma unroll
    for (int i = 0; i < kChunks / 2; ++i)
      chunks[i] = values.chunk(n0 + value(i % 4), column_of_value(piece, i / 4, lane() / 4));
  }
  static PYATTN_DEVICE int value(int i) { return lane() % 4 * 2 + i % 2 + i / 2 * 8; }
  static PYATTN_DEVICE int column_of_value(int piece, int j, int of) {
    return piece * kColumns + (8 * j + of) * kElements;
  }

  // Sets values that are not finite to 0: 0 * NaN would reach rows that do not see them. Returns a bit for each of the 16 keys
  // that had any in this lane's chunks.
  PYATTN_DEVICE unsigned clear_nonfinite() {
    unsigned bad = 0;
#pragma unroll
    for (int i = 0; i < kChunks / 2; ++i)
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        uint32_t& word = chunks[i].words[e * sizeof(S) / 4];
        if (finite(element(word, e))) continue;
        bad |= 1u << value(i % 4);
        word = 0;
      }
    return bad;
  }

 private:
  static PYATTN_DEVICE float element(uint32_t word, int e) {
    if constexpr (sizeof(S) == 4)
      return float_of(word);
    else
      return widen(S{static_cast<uint16_t>(e % 2 ? word >> 16 : word)});
  }
};

// The left factor of a slice of two rows' chunks, and the right factor of one.
template <class S>
PYATTN_DEVICE Left<S> left_of(const Chunk (&rows)[2], int slice) {
  Left<S> a;
  if constexpr (sizeof(S) == 4) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < 4; ++i) split(float_of(rows[i % 2].words[2 * half + i / 2]), a.high[half][i], a.low[half][i]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) a.data[i] = rows[i % 2].words[2 * slice + i / 2];
  }
  return a;
}
template <class S>
PYATTN_DEVICE Right<S> right_of(const Chunk& key, int slice) {
  Right<S> b;
  if constexpr (sizeof(S) == 4) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < 2; ++i) split(float_of(key.words[2 * half + i]), b.high[half][i], b.low[half][i]);
  } else {
    b = {{key.words[2 * slice], key.words[2 * slice + 1]}};
  }
  return b;
}

// The right factor of element e of the chunks of a lane's four values: a slice of keys.
template <class S>
PYATTN_DEVICE Right<S> right_of_values(const Chunk* values, int e) {
  Right<S> b;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Chunk *x = values + 2 * half, *y = x + 1;
    if constexpr (sizeof(S) == 4) {
      split(float_of(x->words[e]), b.high[half][0], b.low[half][0]);
      split(float_of(y->words[e]), b.high[half][1], b.low[half][1]);
    } else {
      const uint32_t first = x->words[e / 2], second = y->words[e / 2];
      b.data[half] = e % 2 ? first >> 16 | (second & 0xffff0000) : (first & 0xffff) | second << 16;
    }
  }
  return b;
}

}  // namespace
}  // namespace pyattn::cuda
