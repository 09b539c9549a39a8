// Backward, in one pass over the keys. With S = softmax_scale Q K^T, P = exp(S - factor * row_max) / row_sum and
// delta = rowsum(P * dP) = rowsum(dO * O):
//
//   dV += (P * D)^T dO      dP = dO V^T * D      dS = P * (dP - delta + dlse)      dK += dS^T Q      dQ += dS K
//
// where D is 1, or with dropout 0 for what was dropped and 1 / (1 - p) for the rest.
// S and dP are made transposed, queries on the lanes; dV, dK and dQ have their columns on the lanes. softmax_scale is
// applied to dQ and dK when they leave.
#pragma once

namespace pyattn::PYATTN_ISA {
namespace {

// Query rows whose packed copies and dQ are kept at a time: about 2 MB at head_dim 64.
inline constexpr int64_t kSuperBlock = 2048;

// Where all keys fit one block, delta is rowsum(P * dP), which is what softmax's own gradient subtracts; beyond, it is
// rowsum(dO * O), which is equal but for the rounding of O. (Of 1,022 dq and dk of random fp32 cases the accuracy
// rule refused 12 with O alone, 6 with this, 2 with dlse kept out of delta.)
inline bool one_block(const BackwardParams& p) { return p.seqlen_k <= kBackwardBlockK; }

// Query rows, or keys, that are read both as rows of the left and as whole vectors of the right factor of a product.
template <class S>
constexpr bool rows_in_place(int64_t group, int64_t cols) {
  return group == 1 && in_place<S>(cols, true);
}

template <class S>
struct BackwardScratch {
  using T = Compute<S>;
  using E = Operand<S>;
  int64_t ld_k, ld_v;       // columns of head_dim and head_dim_v in whole vectors
  Rows<E> Qt, dOt, Ot;      // transposed, block after block of kBlockQ queries
  Rows<E> Q, dO, K, V;      // packed copies, where the tensor can't be read in place
  Rows<E> left_K;           // K again, where the left factor and the rows that are summed over differ
  Rows<E> left_P, left_dS;  // tiles as operands, where these are not the tiles themselves
  Rows<E> summed_dS;
  Rows<T> P, dP;       // tiles
  Rows<T> kept;        // the tile of dropout's factors
  Rows<T> dQ, dK, dV;  // sums
  T *row_max, *inverse_sum, *delta, *dlse, *seen;
  int64_t bytes;

  BackwardScratch(const BackwardParams& p, void* base) {
    Carver carver(base);
    const int64_t group = group_size(p);
    const int64_t rows = min(round_up(p.seqlen_q * group, kBlockQ<T>), kSuperBlock);
    ld_k = round_up(p.head_dim, kLanes<T>), ld_v = round_up(p.head_dim_v, kLanes<T>);
    const auto take = [&](int64_t n, int64_t ld) { return Rows<T>{carver.take<T>(n * ld), ld}; };
    const auto take_operand = [&](int64_t n, int64_t ld) { return Rows<E>{carver.take<E>(n * ld), ld}; };
    const int64_t pairs = kPairs<S>;
    Qt = take_operand(terms<S>(p.head_dim) * (rows / kBlockQ<T>), kBlockQ<T>);
    dOt = take_operand(terms<S>(p.head_dim_v) * (rows / kBlockQ<T>), kBlockQ<T>);
    Ot = take_operand(terms<S>(p.head_dim_v), kBlockQ<T>);
    Q = take_operand(rows_in_place<S>(group, p.head_dim) ? 0 : terms<S>(rows), ld_k);
    dO = take_operand(rows_in_place<S>(group, p.head_dim_v) ? 0 : terms<S>(rows), ld_v);
    K = take_operand(in_place<S>(p.head_dim, true) ? 0 : terms<S>(kBackwardBlockK), ld_k);
    V = take_operand(in_place<S>(p.head_dim_v, false) ? 0 : kBackwardBlockK, ld_v);
    left_K = take_operand(pairs * kBackwardBlockK, ld_k);
    left_P = take_operand(pairs * kBackwardBlockK, terms<S>(kBlockQ<T>));
    left_dS = take_operand(pairs * kBackwardBlockK, terms<S>(kBlockQ<T>));
    summed_dS = take_operand(pairs * terms<S>(kBackwardBlockK), kBlockQ<T>);
    P = take(kBackwardBlockK, kBlockQ<T>);
    dP = take(kBackwardBlockK, kBlockQ<T>);
    kept = take(p.dropout.threshold ? kBackwardBlockK : 0, kBlockQ<T>);
    dQ = take(key_splits(p) > 1 ? 0 : rows, ld_k);
    const int64_t keys = longest_split(p);
    dK = take(keys, ld_k);
    dV = take(keys, ld_v);
    row_max = carver.take<T>(rows);
    inverse_sum = carver.take<T>(rows);
    delta = carver.take<T>(rows);
    dlse = carver.take<T>(rows);
    seen = carver.take<T>(kBlockQ<T>);
    bytes = carver.bytes();
  }
};

template <class S>
Plan plan_backward(const BackwardParams& p) {
  using T = Compute<S>;
  const int64_t heads = p.batch * p.num_heads_kv, splits = key_splits(p);
  const int64_t dq_part = p.num_heads_q * p.seqlen_q * round_up(p.head_dim, kLanes<T>) * sizeof(T);
  return {heads * splits, BackwardScratch<S>(p, nullptr).bytes, splits > 1 ? p.batch * splits * dq_part : 0};
}

// One work item: a range of keys of one KV head, against all its query rows.
template <class S>
class BackwardItem {
  using T = Compute<S>;
  using E = Operand<S>;

 public:
  BackwardItem(const BackwardParams& p, const HeadRows& head, int64_t k_begin, int64_t k_end, T* dq_part,
               const BackwardScratch<S>& scratch)
      : p(p), head(head), k_begin(k_begin), k_end(k_end), dq_part(dq_part), s(scratch) {}

  void run() {
    fill_zero(s.dK.data, (k_end - k_begin) * s.ld_k);
    fill_zero(s.dV.data, (k_end - k_begin) * s.ld_v);
    for (int64_t r0 = 0; r0 < head.count; r0 += kSuperBlock) super_block(r0, min(kSuperBlock, head.count - r0));
    unpack_rows<S>(Rows<const T>(s.dK), k_end - k_begin, p.head_dim, static_cast<T>(p.softmax_scale),
                   [&](int64_t j) { return head.key<S>(p.dk, k_begin + j); });
    unpack_rows<S>(Rows<const T>(s.dV), k_end - k_begin, p.head_dim_v, T(1),
                   [&](int64_t j) { return head.key<S>(p.dv, k_begin + j); });
    watch.lap(Phase::kStore);
  }

 private:
  const BackwardParams& p;
  const HeadRows head;
  const int64_t k_begin, k_end;
  T* const dq_part;  // this item's share of dQ for all rows, or null: it is the whole of it
  const BackwardScratch<S>& s;
  const Scale<T> scale{p.softmax_scale};
  Stopwatch watch{p.counts};

  void super_block(int64_t r0, int64_t rows) {
    const Rows<T> dQ = dq_part ? Rows<T>{dq_part + r0 * s.ld_k, s.ld_k} : s.dQ;
    const int64_t visible = min(k_end, head.visible_keys(r0 + rows - 1));
    const int64_t first = k_begin < visible ? max(r0, head.first_row(k_begin) / kBlockQ<T> * kBlockQ<T>) : r0 + rows;
    fill_zero(dQ.data, (first - r0) * s.ld_k);  // the other rows see the first block of keys, which writes theirs
    if (k_begin < visible) {
      for (int64_t i = first; i < r0 + rows; i += kBlockQ<T>) pack_block(i, i - r0, min(kBlockQ<T>, r0 + rows - i));
      const Rows<const E> Q = query_rows(p.q, r0, p.head_dim, s.Q), dO = query_rows(p.dout, r0, p.head_dim_v, s.dO);
      watch.lap(Phase::kPack);
      for (int64_t n0 = k_begin; n0 < visible; n0 += kBackwardBlockK)
        key_block(n0, min(kBackwardBlockK, visible - n0), r0, rows, Q, dO, dQ);
    }
    if (!dq_part)
      unpack_rows<S>(Rows<const T>(dQ), rows, p.head_dim, static_cast<T>(p.softmax_scale),
                     [&](int64_t i) { return head.row<S>(p.dq, r0 + i); });
    watch.lap(Phase::kStore);
  }

  Rows<const E> query_rows(const View& view, int64_t r0, int64_t cols, Rows<E> packed) const {
    if constexpr (sizeof(S) == sizeof(T))
      if (rows_in_place<S>(head.group, cols)) return {head.row<const T>(view, r0), view.stride_s};
    return packed;
  }

  // Everything that depends on the query rows [row, row + rows) alone, at place i of the super-block.
  void pack_block(int64_t row, int64_t i, int64_t rows) const {
    const auto from = [&](const View& view) {
      return [&, row](int64_t r) { return head.row<const S>(view, row + r); };
    };
    const int64_t lanes = round_up(rows, kLanes<T>);
    const Rows<E> Qt = transposed_block(s.Qt, p.head_dim, i), dOt = transposed_block(s.dOt, p.head_dim_v, i);
    pack_queries<S>(Qt, rows, lanes, p.head_dim, scale.power, from(p.q));
    pack_queries<S>(dOt, rows, lanes, p.head_dim_v, T(1), from(p.dout));
    if (!rows_in_place<S>(head.group, p.head_dim))
      pack_summed_rows<S>(s.Q.from(terms<S>(i)), rows, p.head_dim, from(p.q));
    if (!rows_in_place<S>(head.group, p.head_dim_v))
      pack_summed_rows<S>(s.dO.from(terms<S>(i)), rows, p.head_dim_v, from(p.dout));

    fill_zero(s.delta + i, lanes);
    if (!one_block(p)) {
      pack_queries<S>(s.Ot, rows, lanes, p.head_dim_v, T(1), from(p.out));
      score_row_sums(s.Ot, dOt, lanes, s.delta + i);
    }
    const T *row_max = static_cast<const T*>(p.row_max), *row_sum = static_cast<const T*>(p.row_sum);
    const T* dlse = static_cast<const T*>(p.dlse);
    for (int64_t r = 0; r < lanes; ++r) {
      const int64_t at = head.index(p, row + min(r, rows - 1));
      const bool sees_any = r < rows && head.visible_keys(row + r);
      s.row_max[i + r] = sees_any ? row_max[at] : T(0);
      s.inverse_sum[i + r] = sees_any ? 1 / row_sum[at] : T(0);
      s.dlse[i + r] = dlse && r < rows ? dlse[at] : T(0);
    }
  }

  // sums = rowsum(A * B) of transposed rows, in the order in which score_gemm makes dP: for a row with one key dP - delta is
  // exactly 0.
  void score_row_sums(Rows<E> At, Rows<E> Bt, int64_t lanes, T* sums) const {
    for (int64_t j = 0; j < lanes; j += kLanes<T>) {
      vec<T> total = {};
      for (int64_t d = 0, cols = terms<S>(p.head_dim_v); d < cols;) {
        vec<T> sum = {};
        for (const int64_t end = min(d + kScoreBlock<E>, cols); d < end; ++d)
          sum = fma(load(At.from(d).data + j), load(Bt.from(d).data + j), sum);
        total += sum;
      }
      store(sums + j, total);
    }
  }

  Rows<E> transposed_block(Rows<E> blocks, int64_t cols, int64_t i) const {
    return blocks.from(i / kBlockQ<T> * terms<S>(cols));
  }

  // The keys [n0, n0 + keys) against the rows of the super-block that see them.
  void key_block(int64_t n0, int64_t keys, int64_t r0, int64_t rows, Rows<const E> Q, Rows<const E> dO, Rows<T> dQ) {
    const Rows<const E> K = summed_keys<S>(head, p.k, n0, keys, p.head_dim, true, s.K);
    const Strided<E> left_K = kPairs<S> ? left_keys<S>(head, p.k, n0, keys, p.head_dim, s.left_K) : K.strided();
    const Strided<E> left_V = left_keys<S>(head, p.v, n0, keys, p.head_dim_v, s.V);
    const Rows<T> dK = s.dK.from(n0 - k_begin), dV = s.dV.from(n0 - k_begin);
    const int64_t first = max(0, head.first_row(n0) - r0) / kBlockQ<T> * kBlockQ<T>;
    for (int64_t i = first; i < rows; i += kBlockQ<T>) {
      const int64_t m = min(kBlockQ<T>, rows - i), lanes = round_up(m, kLanes<T>);
      const Strips<T> strips = mask_tile(head, r0 + i, m, lanes, n0, keys, s.seen);
      const Rows<const E> Qi = Q.from(terms<S>(i)), dOi = dO.from(terms<S>(i));
      watch.lap(Phase::kPack);

      strips.each([&](int64_t j0, int64_t j1, int64_t keys) {
        const int64_t pairs = keys * (j1 - j0);
        score_gemm<T>(keys, j0, j1, terms<S>(p.head_dim), left_K, transposed_block(s.Qt, p.head_dim, i), s.P);
        watch.lap(Phase::kScores, 2 * pairs * p.head_dim);
        score_gemm<T>(keys, j0, j1, terms<S>(p.head_dim_v), left_V, transposed_block(s.dOt, p.head_dim_v, i), s.dP);
        watch.lap(Phase::kdP, 2 * pairs * p.head_dim_v);
        if (p.dropout.threshold) {
          dropout_tile<T>(p, head, r0 + i, j0, j1, n0, keys, [&](int64_t k, int64_t j, vec<T> factor) {
            T* dp = s.dP.from(k).data + j;
            store(dp, load(dp) * factor);
            store(s.kept.from(k).data + j, factor);
          });
          watch.lap(Phase::kDropout);
        }
        if (strips.masked)
          softmax_gradient<true>(keys, j0, j1, i);
        else
          softmax_gradient<false>(keys, j0, j1, i);
        watch.lap(Phase::kSoftmax);
        if (p.dropout.threshold) {
          multiply_tile(s.P, s.kept, keys, j0, j1);
          watch.lap(Phase::kDropout);
        }
      });

      const auto k_row = [&](int64_t j) { return head.key<S>(p.k, n0 + j); };
      const auto q_row = [&](int64_t r) { return head.row<const S>(p.q, r0 + i + r); };
      const auto do_row = [&](int64_t r) { return head.row<const S>(p.dout, r0 + i + r); };
      if (strips.masked && !(all_finite<S>(keys, p.head_dim, k_row) && all_finite<S>(m, p.head_dim, q_row) &&
                             all_finite<S>(m, p.head_dim_v, do_row))) {
        const auto key_row = [&](int64_t j, int64_t, int64_t r) { return pair_seen(r, j); };
        const auto row_key = [&](int64_t r, int64_t, int64_t j) { return pair_seen(r, j); };
        const Strided<E> P = tile_over_lanes<S>(s.P, 0, keys, 0, lanes, s.left_P);
        const Strided<E> dS = tile_over_lanes<S>(s.dP, 0, keys, 0, lanes, s.left_dS);
        const Strided<E> dSt = tile_over_keys<S>(s.dP, keys, 0, lanes, s.summed_dS).strided().transposed();
        watch.lap(Phase::kPack);
        gemm_seen<T>(keys, 0, s.ld_v, terms<S>(m), P, dOi, dV, {true}, key_row);
        watch.lap(Phase::kdV, 2 * keys * m * p.head_dim_v);
        gemm_seen<T>(keys, 0, s.ld_k, terms<S>(m), dS, Qi, dK, {true}, key_row);
        watch.lap(Phase::kdK, 2 * keys * m * p.head_dim);
        gemm_seen<T>(m, 0, s.ld_k, terms<S>(keys), dSt, K, dQ.from(i), {n0 > k_begin}, row_key);
        watch.lap(Phase::kdQ, 2 * keys * m * p.head_dim);
      } else {
        strips.each_keys([&](int64_t k0, int64_t k1, int64_t j) {
          const Strided<E> P = tile_over_lanes<S>(s.P, k0, k1, j, lanes, s.left_P);
          const Strided<E> dS = tile_over_lanes<S>(s.dP, k0, k1, j, lanes, s.left_dS);
          const int64_t first = terms<S>(j), rows = terms<S>(m - j), pairs = (k1 - k0) * (m - j);
          watch.lap(Phase::kPack);
          gemm<T>(k1 - k0, 0, s.ld_v, rows, P.from(k0, first), dOi.from(first), dV.from(k0), {true});
          watch.lap(Phase::kdV, 2 * pairs * p.head_dim_v);
          gemm<T>(k1 - k0, 0, s.ld_k, rows, dS.from(k0, first), Qi.from(first), dK.from(k0), {true});
          watch.lap(Phase::kdK, 2 * pairs * p.head_dim);
        });
        strips.each([&](int64_t j0, int64_t j1, int64_t keys) {
          const Strided<E> dS = tile_over_keys<S>(s.dP, keys, j0, j1, s.summed_dS).strided().transposed();
          const int64_t rows = min(j1, m) - j0;
          watch.lap(Phase::kPack);
          gemm<T>(rows, 0, s.ld_k, terms<S>(keys), dS.from(j0, 0), K, dQ.from(i + j0), {n0 > k_begin});
          watch.lap(Phase::kdQ, 2 * keys * rows * p.head_dim);
        });
      }
    }
  }

  template <bool kMasked>
  void softmax_gradient(int64_t keys, int64_t j0, int64_t j1, int64_t i) const {
    const T *row_max = s.row_max + i, *inverse_sum = s.inverse_sum + i;
    if (one_block(p))
      add_delta_tile<kMasked>(s.P, s.dP, keys, j0, j1, s.seen, scale, row_max, inverse_sum, s.delta + i);
    softmax_gradient_tile<kMasked>(s.P, s.dP, keys, j0, j1, s.seen, scale, row_max, inverse_sum, s.delta + i,
                                   s.dlse + i);
  }

  auto pair_seen(int64_t r, int64_t j) const { return set1(static_cast<T>(j)) < set1(s.seen[r]); }
};

// Work items: (batch, KV head, range of keys).
template <class S>
void backward(const BackwardParams& p, int64_t begin, int64_t end, void* scratch) {
  using T = Compute<S>;
  const BackwardScratch<S> carved(p, scratch);
  const int64_t splits = key_splits(p);
  for (int64_t item = begin; item < end; ++item) {
    const HeadRows head(p, item / splits);
    const int64_t split = item % splits;
    T* dq_part = splits > 1 ? static_cast<T*>(p.workspace) + item * head.count * carved.ld_k : nullptr;
    BackwardItem<S>(p, head, split_begin(head, split, splits), split_begin(head, split + 1, splits), dq_part, carved)
        .run();
  }
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
