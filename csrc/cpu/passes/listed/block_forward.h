// Forward of queries that list blocks of keys, block by block: the rows of all queries of an item that list a block share
// tiles. Their sums of online softmax wait in scratch:
//
//   S^T = K Q^T      O = O * decay + P V
#pragma once

#include "cpu/passes/listed/block_lists.h"
#include "cpu/passes/stopwatch.h"
#include "cpu/plan/units.h"
#include "cpu/products/operand.h"
#include "cpu/products/product.h"
#include "cpu/tiles/softmax.h"

namespace pyattn::PYATTN_ISA {
namespace {

template <class S>
struct BlockForwardScratch {
  using T = Compute<S>;
  using E = Operand<S>;
  Carver carver;
  BlockLists lists;
  Matrix<E> K, V;                // [keys][cols_k], [terms(keys)][cols_v]: copies, if the tensor can't be read in place
  Matrix<S> listed_K, listed_V;  // [keys][cols]: copies of keys that are not a whole block
  Matrix<E> Qt;                  // [terms(head_dim)][rows of a tile]
  Matrix<T> P;                   // [keys][rows of a tile]
  Matrix<E> weights;             // [terms(keys)][rows of a tile]: P as an operand of bf16 pairs
  Matrix<T> tile_O;              // [rows of a tile][cols_v]
  Matrix<T> O;                   // [rows][cols_v]: exp(S - row_max) V
  T *row_max, *row_sum;          // [rows]
  int64_t bytes;

  BlockForwardScratch(const ForwardParams& p, void* base) : carver(base), lists(p, forward_block_queries(p), carver) {
    constexpr int64_t kRows = kBlockQ<T>, kKeys = kTileKeys;
    const int64_t cols_k = columns_k<S>(p), cols_v = columns_v<S>(p), rows = forward_block_queries(p) * group_size(p);
    K = carver.take<E>(kInPlace<S> ? 0 : kKeys, cols_k);
    V = carver.take_spread<E>(summed_in_place<S>(p.v, p.head_dim_v) ? 0 : terms<S>(kKeys), cols_v);
    listed_K = carver.take<S>(kKeys, cols_k);
    listed_V = carver.take<S>(kKeys, cols_v);
    Qt = carver.take<E>(query_terms<S>(p.head_dim), kRows);
    P = carver.take_spread<T>(kKeys, kRows);
    weights = carver.take_spread<E>(kPairs<S> ? terms<S>(kKeys) : 0, kRows);
    tile_O = carver.take<T>(kRows, cols_v);
    O = carver.take<T>(rows, cols_v);
    row_max = carver.take<T>(rows);
    row_sum = carver.take<T>(rows);
    bytes = carver.bytes();
  }
};

template <class S>
Plan plan_block_forward(const ForwardParams& p) {
  const int64_t items = p.batch * p.num_heads_kv * ceil_div(p.seqlen_q, forward_block_queries(p));
  return {items, BlockForwardScratch<S>(p, nullptr).bytes, 0};
}

// One work item: some queries of a KV head.
template <class S, class Score>
class BlockForwardItem {
  using T = Compute<S>;
  using E = Operand<S>;
  static constexpr int L = kLanes<T>;

 public:
  BlockForwardItem(const ForwardParams& p, BlockForwardScratch<S>& s) : p(p), s(s) {}

  void run(Range heads) {
    s.lists.begin(heads, 0);
    const Head first = s.lists.first();
    const int64_t rows = heads.count() * group;
    for (int64_t i = 0; i < rows; ++i) s.row_max[i] = kNegInf<T>, s.row_sum[i] = 0;
    fill_zero(s.O.data, rows * s.O.row);
    watch.lap(Phase::kPack);
    const int64_t most = kBlockQ<T> / group, step = block_tile(p), block_keys = p.cpu.selected.block;
    s.lists.each_block([&](int64_t n) {
      for (int64_t n0 = 0; n0 < block_keys; n0 += step) {
        const int64_t keys = min(step, block_keys - n0);
        const Keys block = operands(block_rows<S>(p, first, p.k, n, n0), block_rows<S>(p, first, p.v, n, n0), keys);
        s.lists.each_tile(n, most, [&](const int32_t* queries, int64_t count) { add(first, queries, count, block); });
      }
    });
    s.lists.each_rest([&](int64_t i, Range places) {
      const Head head = first.later(i);
      const auto query = static_cast<int32_t>(i);
      for (int64_t n0 = places.begin; n0 < places.end; n0 += kTileKeys) {
        const Range some{n0, min(n0 + kTileKeys, places.end)};
        add(first, &query, 1,
            operands(whole_rows<S>(p, head, p.k, some, p.head_dim, s.listed_K),
                     whole_rows<S>(p, head, p.v, some, p.head_dim_v, s.listed_V), some.count()));
      }
    });
    for (int64_t i = 0; i < heads.count(); ++i) finish(first.later(i), i);
    watch.lap(Phase::kStore);
  }

 private:
  struct Keys {
    int64_t count;
    Strided<E> K;       // [keys][head_dim], the left factor in S
    Matrix<const E> V;  // [terms(keys)][head_dim_v], the right factor in O
  };

  const ForwardParams& p;
  BlockForwardScratch<S>& s;
  const int64_t group = group_size(p);
  const Score score{p};
  Stopwatch watch{p.cpu.counts};
  SoftmaxState<T> state;  // of a tile
  LaneMask<T> unmasked;   // softmax without a mask reads none

  Keys operands(Matrix<const S> k_rows, Matrix<const S> v_rows, int64_t keys) const {
    return {keys, left_keys<S>(k_rows, keys, p.head_dim, s.K),
            summed_keys<S>(v_rows, keys, p.head_dim_v, summed_in_place<S>(p.v, p.head_dim_v), s.V)};
  }

  // Adds the products of these queries, at most a tile of them, with the keys of a block.
  void add(const Head& first, const int32_t* queries, int64_t count, const Keys& block) {
    const int64_t rows = count * group, lanes = round_up(rows, L), keys = block.count;
    const S* q_rows[kBlockQ<T>];
    for (int64_t n = 0; n < count; ++n) {
      const Head head = first.later(queries[n]);
      for (int64_t r = 0; r < group; ++r) q_rows[n * group + r] = head.row<const S>(p.q, r);
      __builtin_memcpy(state.row_max + n * group, s.row_max + queries[n] * group, group * sizeof(T));
      __builtin_memcpy(state.row_sum + n * group, s.row_sum + queries[n] * group, group * sizeof(T));
    }
    pack_queries<S>(s.Qt, rows, lanes, p.head_dim, score.power, [&](int64_t r) { return q_rows[r]; });
    watch.lap(Phase::kPack);
    score_gemm<T>(keys, 0, lanes, terms<S>(p.head_dim), block.K, s.Qt, s.P);
    watch.lap(Phase::kScores, 2 * rows * keys * p.head_dim);
    softmax_strip<false>(s.P, Strip{0, lanes, 0, keys}, unmasked, score, state);
    watch.lap(Phase::kSoftmax);
    const Strided<E> weights = tile_over_keys<S>(s.P, 0, keys, 0, lanes, s.weights).strided().transposed();
    gemm<T>(rows, 0, s.O.row, terms<S>(keys), weights, block.V, s.tile_O, Update<T>::add_unless(true));
    for (int64_t n = 0; n < count; ++n) {
      __builtin_memcpy(s.row_max + queries[n] * group, state.row_max + n * group, group * sizeof(T));
      __builtin_memcpy(s.row_sum + queries[n] * group, state.row_sum + n * group, group * sizeof(T));
      for (int64_t r = 0; r < group; ++r) {
        T* const sums = s.O.at(queries[n] * group + r);
        const T* const more = s.tile_O.at(n * group + r);
        const vec<T> decay = set1(state.decay[n * group + r]);
        for (int64_t d = 0; d < s.O.row; d += L) store(sums + d, fma(load(sums + d), decay, load(more + d)));
      }
    }
    watch.lap(Phase::kOut, 2 * rows * keys * p.head_dim_v);
  }

  // Writes out and the row statistics of a query.
  void finish(const Head& head, int64_t i) {
    alignas(kScratchAlign) T row_max[kBlockQ<T>] = {}, row_sum[kBlockQ<T>] = {}, scale[kBlockQ<T>];
    __builtin_memcpy(row_max, s.row_max + i * group, group * sizeof(T));
    __builtin_memcpy(row_sum, s.row_sum + i * group, group * sizeof(T));
    finish_rows<S>(p, Mask(p, head), 0, group, row_max, row_sum, scale, score);
    for (int64_t r = 0; r < group; ++r)
      unpack_rows<S>(Matrix<const T>(s.O.from(i * group + r)), 1, p.head_dim_v, scale[r],
                     [&](int64_t) { return head.row<S>(p.out, r); });
  }
};

template <class S, class Score>
void block_forward(const ForwardParams& p, int64_t begin, int64_t end, void* scratch) {
  BlockForwardScratch<S> s(p, scratch);
  BlockForwardItem<S, Score> one(p, s);
  const int64_t queries = forward_block_queries(p), items = ceil_div(p.seqlen_q, queries);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t first = item / items * p.seqlen_q, n = item % items;
    one.run({first + n * queries, first + min((n + 1) * queries, p.seqlen_q)});
  }
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
