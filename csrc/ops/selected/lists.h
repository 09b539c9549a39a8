// Sorts lists of keys and checks their entries.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <vector>

#include "ops/checks.h"

namespace pyattn {

// Unused entries come after all others.
inline constexpr int32_t kUnused = std::numeric_limits<int32_t>::max();

// Sorts the lists of a call and leaves out repeated entries.
class Sorter {
 public:
  // blocks: entries are below it.
  Sorter(int64_t blocks, int64_t count) : blocks_(blocks), marks_(count * kWord >= blocks / kFewMarks ? words() : 0) {}

  // from[count], `stride` apart -> to[count], ascending, then kUnused. Returns the place of an entry out of range, or -1.
  template <class Index>
  int64_t sort(const Index* from, int64_t stride, int64_t count, int32_t* to) {
    int32_t* end = to;
    for (int64_t n = 0; n < count; ++n) {
      const int64_t entry = from[n * stride];
      if (entry == -1) continue;
      if (entry < 0 || entry >= blocks_) return n;
      *end++ = static_cast<int32_t>(entry);
    }
    if (!std::is_sorted(to, end)) end = order(to, end);
    std::fill(std::unique(to, end), to + count, kUnused);
    return -1;
  }

 private:
  static constexpr int64_t kWord = 64;
  // Marking entries in a bit map and reading it in order is faster than sorting while there are at most this many words
  // for an entry.
  static constexpr int64_t kFewMarks = 8;

  int64_t blocks_;
  std::vector<uint64_t> marks_;

  size_t words() const { return static_cast<size_t>((blocks_ + kWord - 1) / kWord); }

  int32_t* order(int32_t* begin, int32_t* end) {
    if (marks_.empty()) {
      std::sort(begin, end);
      return end;
    }
    for (const int32_t* entry = begin; entry < end; ++entry) marks_[*entry / kWord] |= uint64_t{1} << *entry % kWord;
    for (size_t word = 0; word < marks_.size(); ++word)
      for (uint64_t& left = marks_[word]; left; left &= left - 1)
        *begin++ = static_cast<int32_t>(word * kWord + std::countr_zero(left));
    return begin;
  }
};

// int32 or int64 lists (batch or 1, lists, seqlen_q, count) -> sorted ones.
inline Tensor sorted(const Tensor& selected, int64_t block, int64_t seqlen_k) {
  const auto sizes = selected.sizes(), strides = selected.strides();
  Tensor entries = at::empty(sizes, selected.options().dtype(at::kInt));
  int32_t* to = entries.mutable_data_ptr<int32_t>();
  const int64_t blocks = (seqlen_k + block - 1) / block, count = sizes[3];
  Sorter sorter(blocks, count);
  const auto sort = [&](const auto* from) {
    for (int64_t b = 0; b < sizes[0]; ++b)
      for (int64_t h = 0; h < sizes[1]; ++h)
        for (int64_t i = 0; i < sizes[2]; ++i, to += count) {
          const auto* row = from + b * strides[0] + h * strides[1] + i * strides[2];
          const int64_t wrong = sorter.sort(row, strides[3], count, to);
          TORCH_CHECK_VALUE(wrong < 0, "pyattn: selected must hold ", block == 1 ? "keys" : "blocks of keys",
                            " from 0 to ", blocks - 1, ", or -1 for none, got ", row[wrong * strides[3]], " in entry ",
                            wrong, " of query ", i, ", sequence ", b, ", list ", h);
        }
  };
  if (selected.scalar_type() == at::kInt)
    sort(selected.const_data_ptr<int32_t>());
  else
    sort(selected.const_data_ptr<int64_t>());
  return entries;
}

}  // namespace pyattn
