// Sums of dS over the scores that share elements of a bias, which broadcasts: the gradient of these elements.
#pragma once

#include "cpu/products/matrix.h"
#include "cpu/products/scratch.h"
#include "cpu/simd/simd.h"
#include "cpu/tiles/strips.h"
#include "cpu/tiles/tile_bias.h"
#include "shared/heads.h"

namespace pyattn::PYATTN_ISA {
namespace {

// The scores that a work item sums: ranges of sequences, KV heads, queries and keys. A
// dimension in which the bias broadcasts is taken whole, because its scores share one element.
struct BiasItem {
  Range sequences, kv_heads, queries, keys;
};

// The sums of a work item, in double because they may be long.
template <class S>
class BiasSums {
  using T = Compute<S>;
  typedef double doubles __attribute__((vector_size(kLanes<T> * sizeof(double))));

 public:
  BiasSums(const BackwardParams& p, const BiasItem& item, Carver& carver)
      : p_(p),
        item_(item),
        group_(group_size(p)),
        by_lanes_(group_ == 1 || (p.dbias.stride_q != 0) == (p.dbias.stride_h != 0)),
        keys_(p.dbias.stride_k ? item.keys.count() : 1),
        rows_(by_lanes_          ? p.dbias.stride_q ? round_up(item.queries.count() * group_, kBlockQ<T>) : kBlockQ<T>
              : p.dbias.stride_q ? item.queries.count()
                                 : group_),
        sums_(carver.take<double>(keys_ * rows_)) {}

  void clear() { fill_zero(sums_, keys_ * rows_); }

  // Adds the sums of other scores of the same elements.
  void add(const BiasSums& other) {
    for (int64_t i = 0; i < keys_ * rows_; ++i) sums_[i] += other.sums_[i];
  }

  // Adds dS[keys][queries] of a strip.
  void add(Matrix<T> dS, const Tile& tile, Strip strip) {
    double* sums = sums_ + (p_.dbias.stride_k ? (tile.n0 - item_.keys.begin) * rows_ : 0);
    const int64_t row = p_.dbias.stride_k ? rows_ : 0;  // from one key to the next
    if (by_lanes_) {
      if (p_.dbias.stride_q) sums += tile.r0 - item_.queries.begin * group_;
      for (int64_t k = strip.begin; k < strip.end; ++k)
        for (int64_t j = strip.j0; j < strip.j1; j += kLanes<T>) {
          // Lanes after the last row may hold NaN: a table of distances may be infinite there.
          const T* ds = dS.from(k).data + j;
          const int64_t lanes = tile.rows - j;
          add_vector(sums + k * row + j, lanes < kLanes<T> ? load(ds, lanes) : load(ds));
        }
      return;
    }
    int64_t place[kBlockQ<T>];
    for (int64_t j = strip.j0; j < min(strip.j1, tile.rows); ++j)
      place[j] = p_.dbias.stride_q ? (tile.r0 + j) / group_ - item_.queries.begin : (tile.r0 + j) % group_;
    for (int64_t k = strip.begin; k < strip.end; ++k)
      for (int64_t j = strip.j0; j < min(strip.j1, tile.rows); ++j) sums[k * row + place[j]] += dS.from(k).data[j];
  }

  // Rounds the sums, once, and writes the elements; `tile` is a buffer for some of them.
  void write(Matrix<T> tile) const {
    const Head head(p_, item_.sequences.begin * p_.num_heads_kv + item_.kv_heads.begin);
    with_floats<S>(p_.dbias, [&](auto* dbias) {
      if (by_lanes_ && p_.dbias.stride_q && p_.dbias.stride_k)
        write_tiles(dbias, head, tile);
      else
        write_elements(dbias, head);
    });
  }

 private:
  const BackwardParams& p_;
  BiasItem item_;
  int64_t group_;
  bool by_lanes_;  // rows_ are lanes: one for each query row, or those of any tile if queries share elements
  int64_t keys_, rows_;
  double* sums_;  // [keys][rows]

  static PYATTN_MEMBER_INLINE void add_vector(double* p, vec<T> x) {
    doubles sum;
    __builtin_memcpy(&sum, p, sizeof sum);
    sum += __builtin_convertvector(x, doubles);
    __builtin_memcpy(p, &sum, sizeof sum);
  }

  template <class E>
  void write_tiles(E* dbias, const Head& head, Matrix<T> tile) const {
    const int64_t first = item_.queries.begin * group_, rows = item_.queries.count() * group_;
    for (int64_t i = 0; i < rows; i += kBlockQ<T>)
      for (int64_t n = 0; n < keys_; n += kTileKeys) {
        const int64_t m = min(kBlockQ<T>, rows - i), keys = min(kTileKeys, keys_ - n);
        for (int64_t k = 0; k < keys; ++k)
          for (int64_t j = 0; j < kBlockQ<T>; ++j)
            tile.from(k).data[j] = static_cast<T>(sums_[(n + k) * rows_ + i + j]);
        store_bias_gradient(tile, dbias, p_.dbias, head,
                            {first + i, m, round_up(m, kLanes<T>), item_.keys.begin + n, keys}, {0, m, 0, keys});
      }
  }

  template <class E>
  void write_elements(E* dbias, const Head& head) const {
    const BiasView& view = p_.dbias;
    const bool shared = by_lanes_ && !view.stride_q;  // all lanes share one element
    const int64_t count = shared ? 1 : by_lanes_ ? item_.queries.count() * group_ : rows_;
    const int64_t apart = by_lanes_ || !view.stride_q ? 1 : group_;  // rows from one sum to the next
    for (int64_t k = 0; k < keys_; ++k)
      for (int64_t i = 0; i < count; ++i) {
        double sum = 0;
        for (int64_t l = i; l < (shared ? rows_ : i + 1); ++l) sum += sums_[k * rows_ + l];
        const int64_t at = offset_of_row(view, head, item_.queries.begin * group_ + i * apart);
        store_elements<T>(dbias + at + (item_.keys.begin + k) * view.stride_k, set1(static_cast<T>(sum)), 1);
      }
  }
};

}  // namespace
}  // namespace pyattn::PYATTN_ISA
