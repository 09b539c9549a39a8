// Prefetching, some cache lines before each register tile of a product, so that memory delivers rows while the product
// computes. The hardware does not foresee where the next sequence or block lies, and one burst of prefetches delays the
// loads that follow: with batches of short sequences it gained nothing, where a few lines at a time saved a quarter.
// One vector of long rows needs a line for nearly every term, and takes twice the time unless they come term by term.
//
// Where L1 has 32 KB, prefetches into it keep the loads of products waiting, and lines go into L2. With RowsAhead, on a
// Zen 4, one token of groups of 4 and 8 query heads takes 0.66 to 0.78 of the time, keys in pages 0.62 to 0.80. With LinesAhead,
// batches of 16 to 200 tokens take 0.92 to 0.99 there, and 0.95 to 1.01 on a Zen 3, which has AVX2 alone. On a Zen 5,
// whose L1 has 48 KB, L2 takes 0.98 to 1.1 of the time, and one head's rows in pages past L2 0.65 to 0.95. Intel's processors
// wait for few lines of L1 at a time: on a Xeon with 48 KB, L2 takes 0.82 to 0.95 of the time from memory, at most 1.05 elsewhere.
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
  // pace: the multiply-adds for each line.
  LinesAhead(bool to_l2, int64_t pace) : to_l2_(to_l2), pace_(static_cast<uint32_t>(pace)) {}

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

    PYATTN_MEMBER_INLINE void before_tile(int64_t multiply_adds) const {
      if (!lines.empty()) lines.take(1 + static_cast<uint32_t>(multiply_adds) / lines.pace_);
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
  const bool to_l2_;     // whether lines go into L2, not L1
  const uint32_t pace_;  // of 32 bits: some CPUs divide 64 several times more slowly
  Rows rows_[kMost];
  int first_ = 0, past_ = 0;                     // of the rows in the queue
  int64_t row_ = 0, head_ = 0;                   // the next row of the first ones
  const char *line_ = nullptr, *end_ = nullptr;  // the lines left of the row before it

  PYATTN_MEMBER_INLINE bool empty() const { return line_ >= end_ && first_ == past_; }

  PYATTN_MEMBER_INLINE void take_one() {
    if (line_ >= end_ && !begin_row()) return;
    if (to_l2_)
      __builtin_prefetch(line_, 0, 2);
    else
      __builtin_prefetch(line_);
    line_ += kCacheLine;
  }

  // Takes at most `count` lines. Not inlined into the products: they have no registers to spare.
  [[gnu::noinline]] void take(int64_t count) {
    while (count > 0 && (line_ < end_ || begin_row())) {
      const int64_t lines = min(count, ceil_div(end_ - line_, kCacheLine));
      const char* const past = line_ + lines * kCacheLine;
      count -= lines;
      if (to_l2_)
        for (; line_ < past; line_ += kCacheLine) __builtin_prefetch(line_, 0, 2);
      else
        for (; line_ < past; line_ += kCacheLine) __builtin_prefetch(line_);
    }
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

// The rows [0, count) of `group` neighbouring matrices, prefetched line by line: row (i, g) at rows.at(i) + g * next, the
// rows i of all matrices before the rows i + 1. Rows is a Matrix or a RowTable. Adjacent rows are one long row.
template <class Rows>
class RowsAhead {
 public:
  RowsAhead() = default;  // no rows
  RowsAhead(Rows rows, int64_t count, int64_t cols, int64_t group, int64_t next, bool to_l2)
      : to_l2_(to_l2),
        past_l2_(kListed && group == 1),
        rows_(rows),
        left_(cols > 0 ? max(0, count) : 0),
        bytes_(cols * kSize),
        lines_(ceil_div(bytes_, kCacheLine)),
        group_(group),
        next_(next * kSize) {
    if (group_ > 1 && next == cols) bytes_ *= group_, group_ = 1;
    if constexpr (!kListed)
      if (group_ == 1 && rows.row * kSize == bytes_ && left_ > 0) bytes_ *= left_, left_ = 1;
  }

  // Takes as many lines as n rows have. Not inlined into the products: they have no registers to spare.
  [[gnu::noinline]] void take(int64_t n) { take_lines(n * lines_); }

  // Takes n lines, at each step of a product.
  PYATTN_MEMBER_INLINE void take_lines(int64_t n) {
    if (end_ - line_ < n * kCacheLine) {
      for (; n > 0 && (line_ < end_ || begin_row()); --n) take_one();
    } else if (to_l2_) {
      for (; n > 0; --n, line_ += kCacheLine) __builtin_prefetch(line_, 0, 2);
    } else if (kListed && past_l2_) {
      for (; n > 0; --n, line_ += kCacheLine) __builtin_prefetch(line_, 0, 0);
    } else {
      for (; n > 0; --n, line_ += kCacheLine) __builtin_prefetch(line_);
    }
  }

  void take_all() {
    while (line_ < end_ || begin_row()) take_one();
  }

 private:
  static constexpr bool kListed = !requires(Rows r) { r.row; };  // in a RowTable
  static constexpr int64_t kSize = sizeof(*Rows{}.at(0));
  const char *line_ = nullptr, *end_ = nullptr;  // the lines left of a row
  bool to_l2_ = false, past_l2_ = false;         // where lines go, if not into L1 and L2
  Rows rows_{};                                  // from the next one on
  int64_t left_ = 0, bytes_ = 0;                 // rows of each matrix, and their bytes
  int64_t lines_ = 0;                            // of a row of one matrix
  int64_t group_ = 1, next_ = 0, g_ = 0;         // g_: the matrix of the next row

  PYATTN_MEMBER_INLINE void take_one() {
    if (to_l2_)
      __builtin_prefetch(line_, 0, 2);
    else if (kListed && past_l2_)
      __builtin_prefetch(line_, 0, 0);
    else
      __builtin_prefetch(line_);
    line_ += kCacheLine;
  }

  // Goes on to the next row, if there is one.
  PYATTN_MEMBER_INLINE bool begin_row() {
    if (left_ <= 0) return false;
    line_ = reinterpret_cast<const char*>(rows_.at(0)) + g_ * next_;
    end_ = line_ + bytes_;
    if (++g_ == group_) g_ = 0, --left_, rows_ = rows_.from(1);
    return true;
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
