// Matrices in shared memory, the tiles of Q, K, V, dO and dS: where their chunks lie,
// how they are filled, and which of their rows are not finite.
#pragma once

#include "storage.h"
#include "cuda/products/fragment.h"
#include "cuda/ptx/primitives.h"

namespace pyattn::cuda {
namespace {

inline constexpr int kChunkBytes = 16;  // one asynchronous copy, or one row of a matrix that ldmatrix reads

// Where panels of a matrix that wgmma reads may begin: eight rows of 128 bytes.
inline constexpr int kPanelAlignment = 1024;

// kRows rows of kCols columns with an XOR swizzle: chunk c of row r is stored at chunk
// c ^ (r % 8), so eight consecutive rows hit different banks. A matrix whose rows are a multiple of 128 bytes is stored in
// panels, one after the other, each all rows' 128 bytes: the layout that wgmma reads. Other rows swizzle within 4
// chunks, by r / 2 % 4.
template <class S, int kRows, int kCols>
struct SharedMatrix {
  static constexpr int kChunkCols = kChunkBytes / sizeof(S), kChunks = kCols / kChunkCols;
  static constexpr int kBytes = kRows * kCols * sizeof(S), kSwap = kChunks % 8 == 0 ? 8 : 4;
  static constexpr int kPitch = (kSwap == 8 ? 8 : kChunks) * kChunkBytes, kPanel = kRows * kPitch;
  static_assert(kChunks % kSwap == 0);
  char* data;

  static constexpr int swapped(int row, int chunk) { return chunk ^ (kSwap == 8 ? row & 7 : row >> 1 & 3); }
  static constexpr int offset(int row, int chunk) {
    return chunk / (kPitch / kChunkBytes) * kPanel + row * kPitch +
           swapped(row, chunk) % (kPitch / kChunkBytes) * kChunkBytes;
  }

  PYATTN_DEVICE char* chunk(int row, int chunk) const { return data + offset(row, chunk); }
  PYATTN_DEVICE S& at(int row, int col) const {
    return reinterpret_cast<S*>(chunk(row, col / kChunkCols))[col % kChunkCols];
  }
};

// A lane's cursor in a matrix: reaches chunks first + 2 s of one row, and of rows a multiple of 8
// after it. One register holds all that depends on the lane, so a step is an exclusive or with
// one constant and the addition of another.
template <class T>
struct Cursor {
  SharedAddress address;

  PYATTN_DEVICE Cursor(T tile, int row, int first) : address(shared_address(tile.chunk(row, first))) {}

  PYATTN_DEVICE SharedAddress at(int rows, int s) const {
    constexpr int kStep = T::kSwap == 8 ? T::kPanel : T::kSwap * kChunkBytes;
    return (address ^ (2 * s % T::kSwap * kChunkBytes)) + 2 * s / T::kSwap * kStep + rows * T::kPitch;
  }
};

// Whether rows of the view can be copied in whole chunks.
template <class S>
PYATTN_DEVICE bool whole_chunks(const View& view) {
  const auto strides = static_cast<unsigned>(view.stride_b | view.stride_h | view.stride_s);
  const unsigned address = opaque(static_cast<unsigned>(reinterpret_cast<uintptr_t>(view.data)));
  return ((address | strides * sizeof(S)) & (kChunkBytes - 1)) == 0;
}

// tile[i][j] = row(i)[j] for i < rows and j < cols, 0 elsewhere.
// Copies of whole chunks are asynchronous.
template <int kThreads, class S, int kRows, int kCols, class Row>
PYATTN_DEVICE void load_tile(SharedMatrix<S, kRows, kCols> tile, int rows, int cols, bool whole_chunks, Row row) {
  using T = SharedMatrix<S, kRows, kCols>;
  const auto copy = [&](char* to, int i, int col) {
    const int bytes = (cols - col) * static_cast<int>(sizeof(S));
    copy_16_bytes(shared_address(to), row(i) + col,
                  i < rows && bytes > 0 ? (bytes < kChunkBytes ? bytes : kChunkBytes) : 0);
  };
  const unsigned thread = opaque(thread_index());
  constexpr unsigned kAll = kRows * T::kChunks, kStep = kThreads / T::kChunks;
  if (!whole_chunks) {
#pragma unroll 1
    for (unsigned at = thread; at < kRows * kCols; at += kThreads) {
      const int i = at / kCols, col = at % kCols;
      tile.at(i, col) = i < rows && col < cols ? row(i)[col] : S{};
    }
  } else if constexpr (kThreads % T::kChunks == 0 && kStep % 8 == 0 && kRows % kStep == 0) {
    // A thread stays in its column, and its rows have the same swizzle.
    const int i = thread / T::kChunks, chunk = thread % T::kChunks;
    char* to = tile.chunk(i, chunk);
#pragma unroll
    for (unsigned step = 0; step < kRows; step += kStep) copy(to + step * T::kPitch, i + step, chunk * T::kChunkCols);
  } else {
#pragma unroll
    for (unsigned first = 0; first < kAll; first += kThreads) {
      const int i = (first + thread) / T::kChunks, chunk = (first + thread) % T::kChunks;
      if (kAll % kThreads == 0 || first + thread < kAll) copy(tile.chunk(i, chunk), i, chunk * T::kChunkCols);
    }
  }
}

// The same for rows that lie `stride` apart: row(i) = first + i * stride.
template <int kThreads, class S, int kRows, int kCols>
PYATTN_DEVICE void load_tile(SharedMatrix<S, kRows, kCols> tile, int rows, int cols, bool whole_chunks, const S* first,
                             int64_t stride) {
  using T = SharedMatrix<S, kRows, kCols>;
  constexpr int kStep = kThreads / T::kChunks;
  if constexpr (kThreads % T::kChunks == 0 && kStep % 8 == 0 && kRows % kStep == 0) {
    if (whole_chunks && rows >= kRows) {  // addresses step by sums
      const unsigned thread = opaque(thread_index());
      const int i = thread / T::kChunks, chunk = thread % T::kChunks;
      const int bytes = (cols - chunk * T::kChunkCols) * static_cast<int>(sizeof(S));
      const int count = bytes <= 0 ? 0 : bytes < kChunkBytes ? bytes : kChunkBytes;
      SharedAddress to = shared_address(tile.chunk(i, chunk));
      const S* from = first + i * stride + chunk * T::kChunkCols;
#pragma unroll
      for (int step = 0; step < kRows; step += kStep, from += kStep * stride)
        copy_16_bytes(to + step * T::kPitch, from, count);
      return;
    }
  }
  load_tile<kThreads>(tile, rows, cols, whole_chunks, [&](int i) { return first + i * stride; });
}

// ---- Rows that are not finite ----

template <class S>
PYATTN_DEVICE bool finite(S x) {
  return widen(x) - widen(x) == 0;
}

// Calls bad(row) for each chunk that is not finite, and
// returns whether there are any. Ends with a barrier.
template <int kThreads, class S, int kRows, int kCols, class Bad>
PYATTN_DEVICE bool find_nonfinite(SharedMatrix<S, kRows, kCols> tile, Bad bad) {
  using T = SharedMatrix<S, kRows, kCols>;
  bool any = false;
#pragma unroll 1
  for (unsigned at = thread_index(); at < kRows * T::kChunks; at += kThreads) {
    const S* chunk = reinterpret_cast<const S*>(tile.chunk(at / T::kChunks, at % T::kChunks));
    bool good = true;
#pragma unroll
    for (int c = 0; c < T::kChunkCols; ++c) good = good && finite(chunk[c]);
    if (!good) any = true, bad(at / T::kChunks);
  }
  return barrier_or(any);
}

// Sets rows of the tile that are not finite to 0, and their flags[kRows] to 1: 0 * NaN would reach
// rows that do not see them. Returns whether there are any. Begins and ends with a barrier.
template <int kThreads, class S, int kRows, int kCols>
PYATTN_DEVICE bool clear_nonfinite(SharedMatrix<S, kRows, kCols> tile, char* flags) {
#pragma unroll 1
  for (int i = thread_index(); i < kRows; i += kThreads) flags[i] = 0;
  barrier();
  if (!find_nonfinite<kThreads>(tile, [&](int row) { set_flag(flags[row]); })) return false;
#pragma unroll 1
  for (unsigned at = thread_index(); at < kRows * kCols; at += kThreads)
    if (flags[at / kCols]) tile.at(at / kCols, at % kCols) = S{};
  barrier();
  return true;
}

}  // namespace
}  // namespace pyattn::cuda
