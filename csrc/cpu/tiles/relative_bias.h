// A relative bias (Shaw et al. 2018, Raffel et al. 2020): adds a value to each score that depends only on the
// distance of the key from the query's position, and sums the gradients of all scores at the same distance.
//
// Rows interleave the `group` query heads that share a KV head, so the pair of row r and key k has the same head
// and distance as that of row r + group and key k + 1. For a band of keys that ends with key `last`, one array of
// diagonals therefore has the value of every pair, at r - r0 + (last - k) * group.
#pragma once

#include "cpu/products/matrix.h"
#include "cpu/products/pack.h"
#include "cpu/simd/simd.h"
#include "cpu/tiles/strips.h"
#include "shared/distances.h"

namespace pyattn::PYATTN_ISA {
namespace {

// Diagonals of a band: those of the widest strip and of 96 keys, if a KV head has up to two query heads.
inline constexpr int64_t kDiagonals = 256;

// The sums of a work item of backward for the query heads of its group: [heads] of gradients of slopes, and
// [heads][count_distances()] of gradients of the relative bias, from the sequence's first distance on.
struct HeadSums {
  double *slopes, *relative;
};

// Calls f(keys, count) for bands of the strip's keys, which have `count` diagonals.
template <class F>
void each_band(Strip strip, int64_t group, F f) {
  const int64_t lanes = strip.j1 - strip.j0, most = 1 + (kDiagonals - lanes) / group;
  for (int64_t k = strip.begin; k < strip.end; k += most) {
    const Range keys{k, min(k + most, strip.end)};
    f(keys, lanes + (keys.count() - 1) * group);
  }
}

// Calls f(t, member, distance) for the diagonals t of the rows from r0 on and of keys up to `last`: of
// query head `member` of the group.
template <class F>
PYATTN_INLINE void each_diagonal(const ForwardParams& p, const Head& head, int64_t r0, int64_t last, int64_t count,
                                 F f) {
  int64_t member = r0 - head.query(r0) * head.group, distance = distance_of(p, head, head.query(r0), last);
  for (int64_t t = 0; t < count; ++t) {
    f(t, member, distance);
    if (++member == head.group) member = 0, --distance;
  }
}

// scores[keys][queries] = scores * factor + relative bias, for the keys of a strip.
template <class T>
void add_relative_bias(const ForwardParams& p, Matrix<T> scores, const Head& head, const Tile& tile, Strip strip,
                       T factor) {
  const T* const values = relative_bias_of<T>(p, head, head.h_kv * head.group);
  const int64_t reach = p.score.reach, stride = p.score.relative_stride_h;
  each_band(strip, head.group, [&](Range keys, int64_t count) {
    T diagonals[kDiagonals];
    each_diagonal(p, head, tile.r0 + strip.j0, tile.n0 + keys.end - 1, count,
                  [&](int64_t t, int64_t member, int64_t distance) {
                    diagonals[t] = values[member * stride + clamp(distance, -reach, reach)];
                  });
    for (int64_t k = keys.begin; k < keys.end; ++k) {
      const T* const row = diagonals + (keys.end - 1 - k) * head.group;
      T* const score = scores.from(k).data + strip.j0;
      for (int64_t j = 0; j < strip.j1 - strip.j0; j += kLanes<T>)
        store(score + j, fma(load(score + j), set1(factor), load(row + j)));
    }
  });
}

// The same for tiles [queries][keys].
template <class T>
void add_relative_bias_by_rows(const ForwardParams& p, Matrix<T> scores, const Head& head, const Tile& tile, T factor) {
  const int64_t reach = p.score.reach;
  for (int64_t r = 0; r < tile.rows; ++r) {
    const T* const values = relative_bias_of<T>(p, head, head.query_head(tile.r0 + r));
    const int64_t first = distance_of(p, head, head.query(tile.r0 + r), tile.n0);
    for (int64_t k = 0; k < tile.keys; k += kLanes<T>) {
      T value[kLanes<T>];
      for (int l = 0; l < kLanes<T>; ++l) value[l] = values[clamp(first + k + l, -reach, reach)];
      T* const score = scores.from(r).data + k;
      store(score, fma(load(score), set1(factor), load(value)));
    }
  }
}

// Adds dS[keys][queries] of a strip to HeadSums::relative.
template <class T>
void add_relative_gradient(const ForwardParams& p, Matrix<T> dS, const Head& head, const Tile& tile, Strip strip,
                           double* sums) {
  const DistanceRange range(p, head);
  const int64_t each = count_distances(p, head.seqlen_q, head.seqlen_k);
  const int64_t rows = min(strip.j1, tile.rows) - strip.j0;
  each_band(strip, head.group, [&](Range keys, int64_t count) {
    T diagonals[kDiagonals] = {};
    for (int64_t k = keys.begin; k < keys.end; ++k) {
      T* const row = diagonals + (keys.end - 1 - k) * head.group;
      const T* const ds = dS.from(k).data + strip.j0;
      for (int64_t j = 0; j < rows; j += kLanes<T>)
        store(row + j, load(row + j) + (rows - j < kLanes<T> ? load(ds + j, rows - j) : load(ds + j)));
    }
    each_diagonal(p, head, tile.r0 + strip.j0, tile.n0 + keys.end - 1, count,
                  [&](int64_t t, int64_t member, int64_t distance) {
                    sums[member * each + clamp(distance, range.first, range.last) - range.first] += diagonals[t];
                  });
  });
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
