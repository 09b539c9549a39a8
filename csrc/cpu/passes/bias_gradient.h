// The gradient of a bias that broadcasts: each element sums dS over all scores that share it. A
// work item owns elements and visits the scores that share them in order, recomputing the tiles of
// backward. If each element belongs to one score, backward itself writes it (tiles/tile_bias.h).
#pragma once

#include "cpu/passes/backward_tile.h"
#include "cpu/passes/stopwatch.h"
#include "cpu/plan/units.h"
#include "cpu/products/dots.h"
#include "cpu/products/matrix.h"
#include "cpu/products/operand.h"
#include "cpu/products/scratch.h"
#include "cpu/simd/simd.h"
#include "cpu/tiles/keys.h"
#include "cpu/tiles/strips.h"
#include "cpu/tiles/tile_bias.h"
#include "shared/mask.h"

namespace pyattn::PYATTN_ISA {
namespace {

// Keys of a work item, for which a block of query rows is packed once.
inline constexpr int64_t kBiasKeys = 4 * kBackwardBlockK;

// The scores that a work item sums: ranges of sequences, KV heads, queries and keys. A
// dimension in which the bias broadcasts is taken whole, because its scores share one element.
struct BiasItem {
  Range sequences, kv_heads, queries, keys;
};

// How dbias is divided into work items.
template <class S>
struct BiasItems {
  int64_t queries, keys;                     // of an item
  int64_t batch, heads, blocks, key_blocks;  // items along each dimension

  // About as many rows as a block has, in whole BlockKeys; all queries if they share elements.
  explicit BiasItems(const BackwardParams& p)
      : queries(p.dbias.stride_q ? kBlockRows * max(1, kBlockQ<Compute<S>> / (kBlockRows * group_size(p)))
                                 : p.seqlen_q),
        keys(p.dbias.stride_k ? kBiasKeys : p.seqlen_k),
        batch(p.dbias.stride_b ? p.batch : 1),
        heads(p.dbias.stride_h ? p.num_heads_kv : 1),
        blocks(ceil_div(p.seqlen_q, queries)),
        key_blocks(ceil_div(p.seqlen_k, keys)) {}

  BiasItem of(const BackwardParams& p, int64_t i) const {
    const int64_t n = i % key_blocks, m = i / key_blocks % blocks, h = i / key_blocks / blocks % heads,
                  b = i / key_blocks / blocks / heads;
    return {batch > 1 ? Range{b, b + 1} : Range{0, p.batch}, heads > 1 ? Range{h, h + 1} : Range{0, p.num_heads_kv},
            Range{m * queries, min((m + 1) * queries, p.seqlen_q)}, Range{n * keys, min((n + 1) * keys, p.seqlen_k)}};
  }
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
  const BiasItem& item_;
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
      for (int64_t n = 0; n < keys_; n += kBackwardBlockK) {
        const int64_t m = min(kBlockQ<T>, rows - i), keys = min(kBackwardBlockK, keys_ - n);
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

// Adds the scores of one head to the sums of a work item.
template <class S, class Score>
void add_head(const BackwardParams& p, const Head& head, const BiasItem& item, const BackwardScratch<S>& s,
              BiasSums<S>& sums) {
  using T = Compute<S>;
  using E = Operand<S>;
  const Mask mask(p, head);
  const Score score(p);
  Stopwatch watch(p.cpu.counts);
  BackwardTile<S, Score> weights{p, mask, s, score, watch};
  if (few_rows<S>(p, head.count))
    pack_few_queries<S>(s.few_Q, head.count, p.head_dim, score.power,
                        [&](int64_t r) { return head.row<const S>(p.q, r); });
  const int64_t end = item.queries.end * head.group;
  for (int64_t r0 = item.queries.begin * head.group; r0 < end; r0 += kBlockQ<T>) {
    const int64_t rows = min(kBlockQ<T>, end - r0);
    const Range keys = mask.keys_of_any(r0, rows).in(item.keys);
    if (keys.empty()) continue;
    s.queries.pack(mask, score, r0, 0, rows);
    for (int64_t n0 = round_down(keys.begin, kBackwardBlockK); n0 < keys.end; n0 += kBackwardBlockK) {
      const Tile tile{r0, rows, round_up(rows, kLanes<T>), n0, min(kBackwardBlockK, keys.end - n0)};
      const Strips<T> strips = weights.cut(tile);
      if (strips.empty()) continue;
      const Strided<E> K = left_keys<S>(head, p.k, n0, tile.keys, p.head_dim, kPairs<S> ? s.left_K : s.K);
      const Strided<E> V = left_keys<S>(head, p.v, n0, tile.keys, p.head_dim_v, s.V);
      watch.lap(Phase::kPack);
      weights.make(tile, strips, 0, K, V, [&](Strip strip) { sums.add(s.dP, tile, strip); });
    }
  }
}

template <class S>
struct BiasScratch {
  Carver carver;
  BiasSums<S> sums;
  BackwardScratch<S> tiles;

  BiasScratch(const BackwardParams& p, const BiasItem& item, void* base)
      : carver(base),
        sums(p, item, carver),
        tiles(p, false, 0, base ? static_cast<char*>(base) + carver.bytes() : nullptr) {}

  int64_t bytes() const { return carver.bytes() + tiles.bytes; }
};

template <class S>
Plan plan_bias_gradient(const BackwardParams& p) {
  if (!p.dbias.data || one_score_each(p)) return {0, 0, 0};
  const BiasItems<S> items(p);
  const BiasItem first = items.of(p, 0);  // none is larger
  return {items.batch * items.heads * items.blocks * items.key_blocks, BiasScratch<S>(p, first, nullptr).bytes(), 0};
}

// Each work item is a (sequence, KV head, block of queries, block of keys), in the dimensions that the bias has.
template <class S, template <class> class Score>
void bias_gradient(const BackwardParams& p, int64_t begin, int64_t end, void* scratch) {
  const BiasItems<S> items(p);
  for (int64_t i = begin; i < end; ++i) {
    const BiasItem item = items.of(p, i);
    BiasScratch<S> carved(p, item, scratch);
    carved.sums.clear();
    for (int64_t b = item.sequences.begin; b < item.sequences.end; ++b)
      for (int64_t h = item.kv_heads.begin; h < item.kv_heads.end; ++h)
        add_head<S, Score<S>>(p, Head(p, b * p.num_heads_kv + h), item, carved.tiles, carved.sums);
    carved.sums.write(carved.tiles.dP);
  }
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
