// Selected keys: the list of a query, read in order.
#pragma once

#include "shared/heads.h"

namespace pyattn::PYATTN_ISA {
namespace {

// The keys of k and v that the query of a head lists, from key j of the list on. One division finds the first of them.
class SelectedKeys {
 public:
  constexpr SelectedKeys(const ForwardParams& p, const Head& head, int64_t j) : block_(p.cpu.selected.block) {
    const SelectedParams& s = p.cpu.selected;
    entry_ = s.entries + head.b * s.stride_b + head.h_kv * s.stride_h + head.first_q * s.count + j / block_;
    place_ = j % block_;
  }

  // The entries of the list from the current key's on.
  constexpr const int32_t* entries() const { return entry_; }
  constexpr int64_t key() const { return *entry_ * block_ + place_; }
  constexpr void next() {
    if (++place_ == block_) ++entry_, place_ = 0;
  }

  // Counts the keys among the next `most` that are neighbours in k and v, and passes over their entries.
  constexpr int64_t take_neighbours(int64_t most) {
    int64_t count = block_ - place_;
    place_ = 0;
    for (; count < most && entry_[1] == *entry_ + 1; ++entry_) count += block_;
    ++entry_;
    return min(count, most);
  }

 private:
  int64_t block_, place_;
  const int32_t* entry_;
};

}  // namespace
}  // namespace pyattn::PYATTN_ISA
