// ALiBi (Press, Smith and Lewis 2021): subtracts from each score the distance
// between the query's position and the key, times the slope of the head.
#pragma once

#include "cpu/simd/math.h"
#include "shared/heads.h"

namespace pyattn::PYATTN_ISA {
namespace {

// The position of row r's query, i + q_offset: in double, as in the reference, because int64 may overflow.
inline double position(const ForwardParams& p, const Head& head, int64_t r) {
  return static_cast<double>(head.query(r)) +
         static_cast<double>(p.mask.q_offsets ? p.mask.q_offsets[head.b] : p.mask.q_offset);
}

// |position - key| on a vector of lanes, for the keys of a tile. The lanes are queries, or keys
// of one query. Neither this choice nor the place where tiles begin changes any bit, so backward
// repeats the scores of forward.
template <class T>
class Distances {
 public:
  // Lane l is row r0 + l, and its keys begin at n0; at(k) needs k < keys.
  static Distances of_rows(const ForwardParams& p, const Head& head, int64_t r0, int64_t n0, int64_t keys) {
    Distances d(keys);
    for (int l = 0; l < L; ++l) d.set(l, position(p, head, r0 + l), n0);
    return d;
  }

  // Lane l is key n0 + l of one row.
  static Distances of_keys(double position, int64_t n0, int64_t keys) {
    Distances d(keys);
    for (int l = 0; l < L; ++l) d.set(l, position, n0 + l);
    return d;
  }

  // The distances to the key k after each lane's first one.
  PYATTN_MEMBER_INLINE vec<T> at(int64_t k) const {
    if (exact_) return abs<T>(load(first_) - static_cast<T>(k));
    T distance[L];
    for (int l = 0; l < L; ++l)
      distance[l] = static_cast<T>(__builtin_fabs(position_[l] - static_cast<double>(key_[l] + k)));
    return load(distance);
  }

 private:
  static constexpr int L = kLanes<T>;
  // Sums of integers below this are exact in T.
  static constexpr double kExact = sizeof(T) == 4 ? 0x1p23 : 0x1p52;

  double position_[L];
  int64_t key_[L], keys_;
  T first_[L];  // position - key
  bool exact_ = true;

  explicit Distances(int64_t keys) : keys_(keys) {}

  void set(int l, double position, int64_t key) {
    const double first = position - static_cast<double>(key);
    position_[l] = position, key_[l] = key, first_[l] = static_cast<T>(first);
    exact_ = exact_ && __builtin_fabs(first) + static_cast<double>(keys_) < kExact;
  }
};

}  // namespace
}  // namespace pyattn::PYATTN_ISA
