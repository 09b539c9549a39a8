// Forward: out = softmax(softmax_scale Q K^T) V by blocks of queries, transposed (S^T = K Q^T, O^T = V^T P^T) so that
// queries lie on the vector lanes and K and V are read as they come.
#pragma once

namespace pyattn::PYATTN_ISA {
namespace {

// Between 96 and 384 keys the time differs by 3 %; a sum over 96 terms rounds less than one over 192 (by the accuracy
// rule, 16 instead of 26 refusals among 7,444 fp32 tensors). A multiple of the tile height 6.
inline constexpr int64_t kForwardBlockK = 96;
static_assert(kForwardBlockK % kDrawKeys == 0);

template <class S>
struct ForwardScratch {
  using T = Compute<S>;
  using E = Operand<S>;
  Rows<T> P, Ot;
  Rows<E> Qt, K, V, weights;
  int64_t bytes;

  ForwardScratch(const ForwardParams& p, void* base) {
    Carver carver(base);
    const int64_t ld_k = round_up(p.head_dim, kLanes<T>), ld_v = round_up(p.head_dim_v, kLanes<T>);
    Qt = {carver.take<E>(terms<S>(p.head_dim) * kBlockQ<T>), kBlockQ<T>};
    P = {carver.take<T>(kForwardBlockK * kBlockQ<T>), kBlockQ<T>};
    Ot = {carver.take<T>(p.head_dim_v * kBlockQ<T>), kBlockQ<T>};
    const bool copies = !in_place<S>(0, false);
    K = {carver.take<E>(copies ? kForwardBlockK * ld_k : 0), ld_k};
    V = {carver.take<E>(copies ? kForwardBlockK * ld_v : 0), ld_v};
    weights = {carver.take<E>(kPairs<S> ? terms<S>(kForwardBlockK) * kBlockQ<T> : 0), kBlockQ<T>};
    bytes = carver.bytes();
  }
};

template <class S>
Plan plan_forward(const ForwardParams& p) {
  if (few_rows<S>(p)) return plan_decode<S>(p);
  return {p.batch * p.num_heads_kv * query_blocks<S>(p), ForwardScratch<S>(p, nullptr).bytes, 0};
}

// One work item: the block of query rows [r0, r0 + rows) of one KV head.
template <class S>
void forward_block(const ForwardParams& p, const HeadRows& head, int64_t r0, const ForwardScratch<S>& scratch) {
  using T = Compute<S>;
  using E = Operand<S>;
  const int64_t rows = min(kBlockQ<T>, head.count - r0), lanes = round_up(rows, kLanes<T>);
  const int64_t k_end = head.visible_keys(r0 + rows - 1);
  const Rows<T> P = scratch.P, Ot = scratch.Ot;
  const Scale<T> scale(p.softmax_scale);
  SoftmaxState<T> state;
  alignas(kScratchAlign) T seen[kBlockQ<T>];
  Stopwatch watch(p.counts);

  pack_queries<S>(scratch.Qt, rows, lanes, p.head_dim, scale.power,
                  [&](int64_t i) { return head.row<const S>(p.q, r0 + i); });
  if (k_end == 0)
    for (int64_t d = 0; d < p.head_dim_v; ++d) fill_zero(Ot.data + d * Ot.row, lanes);

  for (int64_t n0 = 0; n0 < k_end; n0 += kForwardBlockK) {
    const int64_t keys = min(kForwardBlockK, k_end - n0);
    const Strided<E> K = left_keys<S>(head, p.k, n0, keys, p.head_dim, scratch.K);
    const Strided<E> Vt = summed_keys<S>(head, p.v, n0, keys, p.head_dim_v, false, scratch.V).strided().transposed();
    const Strips<T> strips = mask_tile(head, r0, rows, lanes, n0, keys, seen);
    const bool select =
        strips.masked && !all_finite<S>(keys, p.head_dim_v, [&](int64_t j) { return head.key<S>(p.v, n0 + j); });
    const Update<T> update{n0 > 0, state.decay};
    watch.lap(Phase::kPack);

    strips.each([&](int64_t j0, int64_t j1, int64_t keys) {
      const int64_t pairs = keys * (j1 - j0);
      score_gemm<T>(keys, j0, j1, terms<S>(p.head_dim), K, scratch.Qt, P);
      watch.lap(Phase::kScores, 2 * pairs * p.head_dim);
      if (strips.masked)
        softmax_tile<true>(P, keys, j0, j1, seen, scale, state);
      else
        softmax_tile<false>(P, keys, j0, j1, seen, scale, state);
      watch.lap(Phase::kSoftmax);
      if (p.dropout.threshold) {
        dropout_tile<T>(p, head, r0, j0, j1, n0, keys, [&](int64_t k, int64_t j, vec<T> factor) {
          T* weight = P.from(k).data + j;
          store(weight, load(weight) * factor);
        });
        watch.lap(Phase::kDropout);
      }
      const Rows<const E> weights = tile_over_keys<S>(P, keys, j0, j1, scratch.weights);
      watch.lap(Phase::kPack);
      if (select)
        gemm_seen<T>(p.head_dim_v, j0, j1, terms<S>(keys), Vt, weights, Ot, update,
                     [&](int64_t, int64_t j, int64_t k) { return static_cast<T>(k) < load(seen + j); });
      else
        gemm<T>(p.head_dim_v, j0, j1, terms<S>(keys), Vt, weights, Ot, update);
      watch.lap(Phase::kOut, 2 * pairs * p.head_dim_v);
    });
  }

  alignas(kScratchAlign) T inverse[kBlockQ<T>];
  for (int64_t i = 0; i < lanes; ++i)
    inverse[i] = i < rows ? finish_row(p, head, r0 + i, state.row_max[i], state.row_sum[i], scale) : T(0);
  unpack_transposed<S>(Rows<const T>(Ot), rows, p.head_dim_v, inverse,
                       [&](int64_t i) { return head.row<S>(p.out, r0 + i); });
  watch.lap(Phase::kStore);
}

// Work items: (batch, KV head, block of query rows), the last block of a head, which under a causal mask is the
// longest, first.
template <class S>
void forward(const ForwardParams& p, int64_t begin, int64_t end, void* scratch) {
  if (few_rows<S>(p)) return decode<S>(p, begin, end, scratch);
  const ForwardScratch<S> carved(p, scratch);
  const int64_t blocks = query_blocks<S>(p);
  for (int64_t item = begin; item < end; ++item)
    forward_block<S>(p, HeadRows(p, item / blocks), (blocks - 1 - item % blocks) * kBlockQ<Compute<S>>, carved);
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
