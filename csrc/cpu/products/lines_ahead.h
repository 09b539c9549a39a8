// Prefetching, some cache lines before each register tile of a product, so that memory delivers rows while the product
// computes. The hardware does not foresee where the next sequence or block lies, and one burst of prefetches delays the
// loads that follow: with batches of short sequences it gained nothing, where a few lines at a time saved a quarter.
// One vector of long rows needs a line for nearly every term, and takes twice the time unless they come term by term.
#pragma once

#include "cpu/products/matrix.h"
#include "cpu/products/scratch.h"
#include "cpu/simd/inline.h"
#include "shared/index.h"

namespace pyattn::PYATTN_ISA {
namespace {

// A queue of rows that are read or written later.
class LinesAhead {
 public:
  // Adds count x group rows of `cols` columns: row (i, g) at rows.at(i) + g * next. A full queue takes no more.
  template <class S>
  void add(Matrix<const S> rows, int64_t count, int64_t cols, int64_t group = 1, int64_t next = 0) {
    constexpr int64_t kSize = sizeof(S);
    if (past_ == kMost) return;
    const auto* data = reinterpret_cast<const char*>(rows.data);
    if (group == 1 && rows.row == cols)  // adjacent rows are one long row
      rows_[past_++] = {data, 0, 0, 1, 1, count * cols * kSize};
    else
      rows_[past_++] = {data, rows.row * kSize, next * kSize, count, group, cols * kSize};
  }

  // Drops the rows that were not taken.
  void clear() {
    first_ = past_ = 0;
    row_ = head_ = 0;
    line_ = end_ = nullptr;
  }

  // Products call one of two types: every product is compiled again for each.
  struct BeforeTiles {
    LinesAhead& lines;

    // A line for 384 multiply-adds, which take about as long as its arrival.
    PYATTN_MEMBER_INLINE void before_tile(int64_t multiply_adds) const {
      if (!lines.empty()) lines.take(1 + multiply_adds / 384);
    }
  };
  struct AtTerms {
    LinesAhead& lines;
    PYATTN_MEMBER_INLINE void operator()(int64_t) const { lines.take_one(); }
  };
  BeforeTiles before_tiles() { return {*this}; }
  AtTerms at_terms() { return {*this}; }

 private:
  struct Rows {
    const char* data;
    int64_t stride, next, count, group, bytes;
  };
  static constexpr int kMost = 12;
  Rows rows_[kMost];
  int first_ = 0, past_ = 0;                     // of the rows in the queue
  int64_t row_ = 0, head_ = 0;                   // the next row of the first ones
  const char *line_ = nullptr, *end_ = nullptr;  // the lines left of the row before it

  PYATTN_MEMBER_INLINE bool empty() const { return line_ >= end_ && first_ == past_; }

  PYATTN_MEMBER_INLINE void take_one() {
    if (line_ >= end_ && !begin_row()) return;
    __builtin_prefetch(line_);
    line_ += kCacheLine;
  }

  // Takes at most `count` lines. Not inlined into the products: they have no registers to spare.
  [[gnu::noinline]] void take(int64_t count) {
    for (; count > 0 && !empty(); --count) take_one();
  }

  // Goes on to the next row, if there is one.
  PYATTN_MEMBER_INLINE bool begin_row() {
    if (first_ == past_) return false;
    const Rows& rows = rows_[first_];
    line_ = rows.data + row_ * rows.stride + head_ * rows.next;
    end_ = line_ + rows.bytes;
    if (++head_ < rows.group) return true;
    head_ = 0;
    if (++row_ < rows.count) return true;
    row_ = 0;
    if (++first_ == past_) first_ = past_ = 0;
    return true;
  }
};

// The rows [0, count) of `group` neighbouring matrices, prefetched one by one: row (i, g) at rows.at(i) + g * next, the
// rows i of all matrices before the rows i + 1. Rows is a Matrix or a RowTable.
template <class Rows>
class RowsAhead {
 public:
  RowsAhead() = default;  // no rows
  RowsAhead(Rows rows, int64_t count, int64_t cols, int64_t group, int64_t next)
      : rows_(rows), left_(count), bytes_(cols * int64_t{sizeof(*rows.at(0))}), group_(group), next_(next) {
    if constexpr (!kListed)
      if (group == 1 && rows.row == cols && count > 0) {
        line_ = reinterpret_cast<const char*>(rows.at(0)), end_ = line_ + count * bytes_;
        left_ = 0;
      }
  }

  // Takes n rows. Not inlined into the products: they have no registers to spare.
  [[gnu::noinline]] void take(int64_t n) {
    if constexpr (!kListed)
      for (const char* const past = line_ + min(n * bytes_, end_ - line_); line_ < past; line_ += kCacheLine)
        __builtin_prefetch(line_);
    for (; n > 0 && left_ > 0; --n) take_one();
  }

  // Takes n cache lines where rows are adjacent, elsewhere a row for as many lines as it has; not after take. Products call
  // this at each step, where a loop over rows and their lines would have as many instructions as the step itself.
  PYATTN_MEMBER_INLINE void take_lines(int64_t n) {
    if constexpr (!kListed)
      if (line_ < end_) {
        for (int64_t k = 0; k < n; ++k) __builtin_prefetch(line_ + k * kCacheLine);
        line_ += n * kCacheLine;
        return;
      }
    if (left_ <= 0) return;
    for (due_ += n * kCacheLine; due_ >= bytes_ && left_ > 0; due_ -= round_up(bytes_, kCacheLine)) take_one();
  }

  void take_all() {
    while (left_ > 0) take_one();
  }

 private:
  static constexpr bool kListed = !requires(Rows r) { r.row; };  // in a RowTable
  Rows rows_{};
  int64_t left_ = 0;                             // rows of each matrix; 0 where they are one long row
  int64_t bytes_ = 0;                            // of a row
  int64_t group_ = 1, next_ = 0, g_ = 0;         // g_: the matrix of the next row
  int64_t due_ = 0;                              // bytes for which take_lines has yet to take rows
  const char *line_ = nullptr, *end_ = nullptr;  // the lines left where adjacent rows are one long row

  PYATTN_MEMBER_INLINE void take_one() {
    const auto* line = reinterpret_cast<const char*>(rows_.at(0) + g_ * next_);
    if (kListed && group_ == 1)  // bypassing L2: shuffled pages take 0.65 to 0.95 of the time
      for (const char* const end = line + bytes_; line < end; line += kCacheLine) __builtin_prefetch(line, 0, 0);
    else
      for (const char* const end = line + bytes_; line < end; line += kCacheLine) __builtin_prefetch(line);
    if (++g_ == group_) g_ = 0, --left_, rows_ = rows_.from(1);
  }
};

// In place of RowsAhead: prefetches nothing.
struct NoRowsAhead {
  PYATTN_MEMBER_INLINE void take(int64_t) {}
  PYATTN_MEMBER_INLINE void take_lines(int64_t) {}
};

// How many turns of that many bytes are prefetched before they are read: at least one, and as many bytes as memory
// delivers, some 35 GB/s, in the 200 ns that a line takes.
inline int64_t turns_ahead(int64_t turn_bytes) {
  constexpr int64_t kOnTheirWay = 8192;
  return max(1, kOnTheirWay / max(1, turn_bytes));
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
