// Scratch: one buffer, carved into the arrays of a work item.
#pragma once

#include "attention.h"
#include "cpu/products/matrix.h"
#include "shared/index.h"

namespace pyattn::PYATTN_ISA {
namespace {

inline constexpr int64_t kCacheLine = 64;

// Carves arrays out of one buffer. With a null base it only counts bytes.
class Carver {
 public:
  explicit Carver(void* base) : base_(static_cast<char*>(base)) {}

  template <class T>
  T* take(int64_t n) {
    T* p = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    used_ += round_up(n * static_cast<int64_t>(sizeof(T)), kScratchAlign);
    return p;
  }

  template <class T>
  Matrix<T> take(int64_t rows, int64_t cols) {
    return {take<T>(rows * cols), cols};
  }

  // For a matrix of which a product reads a few columns of many rows: rows of
  // whole cache lines lie an odd number of lines apart. An even number would map
  // them to half of the cache's sets, or fewer, where they evict each other.
  template <class T>
  Matrix<T> take_spread(int64_t rows, int64_t cols) {
    const int64_t lines = cols * static_cast<int64_t>(sizeof(T)) / kCacheLine;
    const bool whole = cols * static_cast<int64_t>(sizeof(T)) % kCacheLine == 0;
    return take<T>(rows, whole ? (lines | 1) * kCacheLine / static_cast<int64_t>(sizeof(T)) : cols);
  }

  int64_t bytes() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

// memset takes no null pointer, which an empty workspace has, even for 0 bytes.
template <class T>
void fill_zero(T* p, int64_t n) {
  if (n > 0) __builtin_memset(p, 0, n * sizeof(T));
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
