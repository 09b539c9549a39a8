// Relative biases: the entry of the table that a key's distance gives it.
//
//   reach 2, q_offset 0    key  0 1 2 3 4
//                        row 0  2 3 4 4 4    entries 0 and 4 are the ends: of distances -2 and 2, and all beyond
//                        row 1  1 2 3 4 4    the others, of shorter distances, lie on the inner diagonals
//                        row 2  0 1 2 3 4
#pragma once

#include "cuda/ptx/primitives.h"
#include "shared/distances.h"

namespace pyattn::cuda {
namespace {

// The relative biases of row r on the keys of a tile, which count from n0 and are fewer than kMost.
template <class T>
struct RelativeRow {
  static constexpr int kMost = 1 << 10;
  const T* values;  // that of key 0 if the table had no ends
  int low, high;    // keys up to low take the table's first entry, and keys from high on its last one

  PYATTN_DEVICE RelativeRow(const ForwardParams& p, const Head& head, int64_t r, int64_t n0) {
    const int64_t reach = p.score.reach;
    const int64_t first = clamp(distance_of(p, head, head.query(r), n0), -reach - kMost, reach);
    values = relative_bias_of<T>(p, head, head.query_head(r)) + first;
    low = static_cast<int>(max(-reach - first, -1)), high = static_cast<int>(min(reach - first, kMost));
  }

  PYATTN_DEVICE bool at_first(int key) const { return key <= low; }
  PYATTN_DEVICE bool at_last(int key) const { return key >= high; }
  PYATTN_DEVICE T at(int key) const { return values[at_first(key) ? low : at_last(key) ? high : key]; }
};

}  // namespace
}  // namespace pyattn::cuda
