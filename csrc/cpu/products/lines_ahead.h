// Prefetching, one cache line at each term of a product, so that memory delivers rows while the product computes. The
// hardware does not foresee where the next sequence or block lies, and a burst of prefetches holds up the loads behind
// it: with batches of short sequences bursts gained nothing, where single lines saved a quarter of the time.
#pragma once

#include "cpu/products/matrix.h"
#include "cpu/products/scratch.h"
#include "cpu/simd/inline.h"

namespace pyattn::PYATTN_ISA {
namespace {

// A queue of rows that are read or written later.
class LinesAhead {
 public:
  // Adds count x group rows of `cols` columns: row (i, g) at rows.at(i) + g * next. A full queue takes no more.
  template <class S>
  void add(Matrix<const S> rows, int64_t count, int64_t cols, int64_t group = 1, int64_t next = 0) {
    constexpr int64_t kSize = sizeof(S);
    if (first_ == past_) first_ = past_ = 0;
    if (past_ == kMost) return;
    const bool adjacent = group == 1 && rows.row == cols;  // then they are one long row
    rows_[past_++] = {
        reinterpret_cast<const char*>(rows.data), rows.row * kSize, next * kSize, adjacent ? 1 : count, group,
        (adjacent ? count : 1) * cols * kSize};
  }

  // Prefetches a line, if there is one.
  PYATTN_MEMBER_INLINE void next() {
    if (first_ == past_) return;
    const Rows& rows = rows_[first_];
    __builtin_prefetch(rows.data + row_ * rows.stride + head_ * rows.next + byte_);
    if ((byte_ += kCacheLine) < rows.bytes) return;
    byte_ = 0;
    if (++head_ < rows.group) return;
    head_ = 0;
    if (++row_ < rows.count) return;
    row_ = 0, ++first_;
  }

 private:
  struct Rows {
    const char* data;
    int64_t stride, next, count, group, bytes;
  };
  static constexpr int kMost = 12;
  Rows rows_[kMost];
  int first_ = 0, past_ = 0;               // of the rows in the queue
  int64_t row_ = 0, head_ = 0, byte_ = 0;  // the next line of the first rows
};

}  // namespace
}  // namespace pyattn::PYATTN_ISA
