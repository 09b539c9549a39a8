// Scratch: one buffer, carved into the arrays of a work item.
#pragma once

#include "attention.h"
#include "cpu/products/matrix.h"
#include "shared/index.h"

namespace pyattn::PYATTN_ISA {
namespace {

inline constexpr int64_t kCacheLine = 64;

// With base null it only counts.
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

  // For a matrix that a product reads down its rows, a few columns of each: rows of whole cache
  // lines lie an odd number of lines apart. An even number would put them into half of the cache's
  // sets, or fewer, where they evict each other.
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

template <class T>
void fill_zero(T* p, int64_t n) {
  __builtin_memset(p, 0, n * sizeof(T));
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
