// Forward for few query rows, as in decoding: too few to fill the lanes, and each element of K and V is used so little that
// reading it is the cost. Columns lie on the lanes, K and V are read where they are and as they are stored, and the keys of a
// head are split among work items, each of which leaves a part (maximum, sum, unscaled output) for merge_out.
#pragma once

namespace pyattn::PYATTN_ISA {
namespace {

// From 5 rows (bf16 in AVX2) to 12 (fp16 in AVX-512) on, the kernel that has queries on the lanes is faster.
inline constexpr int64_t kDecodeRows = 8;
// Scores of a block stay in L1 (8 rows of 128 float are 4 KB), and rows are rescaled once a block.
inline constexpr int64_t kDecodeBlockK = 128;
// Keys of an item: merging costs a thousandth of reading them, and 16k keys of one head still feed 16 threads.
inline constexpr int64_t kDecodeSplit = 1024;
// How far ahead rows of K are prefetched where several are read side by side: 12 instead of 28 GB/s without.
inline constexpr int64_t kPrefetchKeys = 16;

template <class S>
bool few_rows(const ForwardParams& p) {
  const auto whole_vectors = [](int64_t cols, int64_t width) { return cols > 0 && cols % width == 0; };
  const int64_t rows = p.seqlen_q * group_size(p), lanes = kLanes<Compute<S>>;
  return rows > 0 && rows <= kDecodeRows && !p.dropout.threshold && whole_vectors(p.head_dim, kColumns<S> * lanes) &&
         whole_vectors(p.head_dim_v, lanes);
}

PYATTN_INLINE int64_t decode_splits(const ForwardParams& p) { return max(1, ceil_div(p.seqlen_k, kDecodeSplit)); }

// What one item leaves of its keys.
template <class T>
struct DecodePart {
  Rows<T> O;  // sum of exp(S - factor * row_max) V
  T *row_max, *row_sum;

  DecodePart(const ForwardParams& p, const HeadRows& head, int64_t item)
      : O{static_cast<T*>(p.workspace) + item * head.count * (p.head_dim_v + 2), p.head_dim_v},
        row_max(O.from(head.count).data),
        row_sum(row_max + head.count) {}
};

template <class S>
struct DecodeScratch {
  using T = Compute<S>;
  using E = Operand<S>;
  Rows<E> Q, Kt;
  Rows<T> P;
  T* row_sum;  // lane by lane
  int64_t bytes;

  DecodeScratch(const ForwardParams& p, void* base) {
    Carver carver(base);
    const int64_t ld = terms<S>(p.head_dim);
    Q = {carver.take<E>(kDecodeRows * ld), ld};
    Kt = {carver.take<E>(ld * kDecodeBlockK), kDecodeBlockK};
    P = {carver.take<T>(kDecodeRows * kDecodeBlockK), kDecodeBlockK};
    row_sum = carver.take<T>(kDecodeRows * kLanes<T>);
    bytes = carver.bytes();
  }
};

template <class S>
Plan plan_decode(const ForwardParams& p) {
  using T = Compute<S>;
  const int64_t rows = p.seqlen_q * group_size(p), items = p.batch * p.num_heads_kv * decode_splits(p);
  return {items, DecodeScratch<S>(p, nullptr).bytes,
          items * rows * (p.head_dim_v + 2) * static_cast<int64_t>(sizeof(T))};
}

// The dot products of kRows rows of Q with the first kLanes / kRows keys; where there are fewer, the last one stands in.
// (Inlined, it spills.)
template <int kRows, class S, class T = Compute<S>, class E = Operand<S>>
[[gnu::noinline]] void dot_tile(Rows<const E> Q, Rows<const S> K, int64_t keys, int64_t cols, Rows<T> out) {
  constexpr int kKeys = kLanes<T> / kRows;
  // One key after the other is what memory likes best; from 4 rows on, arithmetic is better off with several at a time.
  constexpr int kStreams = kRows < 4 ? 1 : kKeys;
  const S* key[kKeys];
  for (int i = 0; i < kKeys; ++i) key[i] = K.from(min(i, keys - 1)).data;
  if constexpr (kStreams > 1)
    prefetch_rows(kPrefetchKeys, kPrefetchKeys + kKeys, cols, [&](int64_t i) { return K.from(i).data; });
  const int64_t count = terms<S>(cols);
  vec<T> sum[kLanes<T>] = {};
#pragma GCC unroll 16
  for (int i = 0; i < kKeys; i += kStreams)
#pragma GCC unroll 1
    for (int64_t d = 0; d < count; d += kLanes<E>) {
      vec<E> k[kStreams];
#pragma GCC unroll 16
      for (int e = 0; e < kStreams; ++e) k[e] = load_operands(key[i + e] + d * kColumns<S>);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const vec<E> q = load(Q.from(r).data + d);
#pragma GCC unroll 16
        for (int e = 0; e < kStreams; ++e) sum[r * kKeys + i + e] = fma(q, k[e], sum[r * kKeys + i + e]);
      }
    }
  sum_lanes<T>(sum);
  T scores[kLanes<T>];
  store(scores, sum[0]);
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) __builtin_memcpy(out.from(r).data, scores + r * kKeys, kKeys * sizeof(T));
}

// out[r][j] = Q[r] K[j] for the first kLanes keys, or as many as there are.
template <class S, class T = Compute<S>, int kRows = min(4, kLanes<T>)>
PYATTN_INLINE void dots(int64_t rows, int64_t keys, int64_t cols, Rows<const Operand<S>> Q, Rows<const S> K,
                        Rows<T> out) {
  constexpr int kKeys = kLanes<T> / kRows;
  int64_t r = 0;
  for (; r + kRows <= rows; r += kRows)
    for (int64_t j = 0; j < min(keys, kLanes<T>); j += kKeys)
      dot_tile<kRows, S>(Q.from(r), K.from(j), keys - j, cols, {out.from(r).data + j, out.row});
  if constexpr (kRows > 1)
    if (r < rows) dots<S, T, kRows / 2>(rows - r, keys, cols, Q.from(r), K, out.from(r));
}

// P = exp(S - row_max) in place of the first seen entries of a row of S / factor, row_max and the lanes' share of row_sum
// brought up to date. Returns by how much what was summed before has decayed.
template <class T>
T softmax_row(T* s, int64_t seen, Scale<T> scale, T& row_max, T* row_sum) {
  constexpr int L = kLanes<T>;
  const int64_t end = round_up(seen, L);
  for (int64_t k = seen; k < end; ++k) s[k] = kNegInf<T>;
  vec<T> largest = set1(row_max);
  for (int64_t k = 0; k < end; k += L) largest = max(load(s + k), largest);
  T new_max = row_max;
  for (int i = 0; i < L; ++i) new_max = largest[i] > new_max ? largest[i] : new_max;
  const vec<T> shift = finite_shift<T>(set1(new_max));
  const vec<T> decay = scale.exp(set1(row_max) - shift);
  vec<T> sum = load(row_sum) * decay;
  for (int64_t k = 0; k < end; k += L) {
    const vec<T> p = scale.exp(load(s + k) - shift);
    sum += p;
    store(s + k, p);
  }
  store(row_sum, sum);
  row_max = new_max;
  return decay[0];
}

// The scores of all rows with the keys [n0, n0 + keys), into P. Where a row has few keys, its scores are summed as backward
// will sum them: weights that then add up to exactly 1 are what keeps dq of a row with one key 0.
template <class S>
void decode_scores(const ForwardParams& p, const HeadRows& head, int64_t n0, int64_t keys, const DecodeScratch<S>& s) {
  using T = Compute<S>;
  const Rows<const S> K = key_rows<S>(head, p.k, n0);
  if (head.visible_keys(0) < kDecodeBlockK) {
    const int64_t lanes = round_up(keys, kLanes<T>);
    pack_queries<S>(s.Kt, keys, lanes, p.head_dim, T(1), [&](int64_t j) { return K.from(j).data; });
    score_gemm<T>(head.count, 0, lanes, terms<S>(p.head_dim), s.Q.strided(), s.Kt, s.P);
  } else {
    for (int64_t j = 0; j < keys; j += kLanes<T>)
      dots<S>(head.count, keys - j, p.head_dim, s.Q, K.from(j), {s.P.data + j, s.P.row});
  }
}

// One work item: the keys [k_begin, k_end) of one KV head, for all its query rows.
template <class S>
void decode_keys(const ForwardParams& p, const HeadRows& head, int64_t k_begin, int64_t k_end,
                 const DecodePart<Compute<S>>& part, const DecodeScratch<S>& s) {
  using T = Compute<S>;
  constexpr int L = kLanes<T>;
  const int64_t rows = head.count;
  const Scale<T> scale(p.softmax_scale);
  Stopwatch watch(p.counts);
  for (int64_t r = 0; r < rows; ++r) {
    const S* q = head.row<const S>(p.q, r);
    for (int64_t d = 0; d < terms<S>(p.head_dim); d += L)
      store(s.Q.from(r).data + d, scale_operands(load_operands(q + d * kColumns<S>), scale.power));
    part.row_max[r] = kNegInf<T>;
  }
  fill_zero(s.row_sum, rows * L);
  fill_zero(part.O.data, rows * p.head_dim_v);
  watch.lap(Phase::kPack);

  const int64_t visible = min(k_end, head.visible_keys(rows - 1));
  for (int64_t n0 = k_begin; n0 < visible; n0 += kDecodeBlockK) {
    const int64_t keys = min(kDecodeBlockK, visible - n0);
    const auto seen = [&](int64_t r) { return clamp(head.visible_keys(r) - n0, 0, keys); };
    decode_scores<S>(p, head, n0, keys, s);
    watch.lap(Phase::kScores, 2 * rows * keys * p.head_dim);
    for (int64_t r = 0; r < rows; ++r) {
      const T decay = softmax_row(s.P.from(r).data, seen(r), scale, part.row_max[r], s.row_sum + r * L);
      T* o = part.O.from(r).data;
      for (int64_t d = 0; d < p.head_dim_v; d += L) store(o + d, load(o + d) * decay);
    }
    watch.lap(Phase::kSoftmax);
    // The keys that all rows see together, the rest row by row: no product with a value that is not seen, which may be NaN.
    const Rows<const S> V = key_rows<S>(head, p.v, n0);
    const int64_t common = seen(0);
    gemm<T, T, S, kWideNV>(rows, 0, p.head_dim_v, common, s.P.strided(), V, part.O, {true});
    for (int64_t r = 1; r < rows; ++r)
      if (seen(r) > common)
        gemm<T, T, S, kWideNV>(1, 0, p.head_dim_v, seen(r) - common, s.P.strided().from(r, common), V.from(common),
                               part.O.from(r), {true});
    watch.lap(Phase::kOut, 2 * rows * keys * p.head_dim_v);
  }
  for (int64_t r = 0; r < rows; ++r) {
    T sum = 0;
    for (int i = 0; i < L; ++i) sum += s.row_sum[r * L + i];
    part.row_sum[r] = sum;
  }
  watch.lap(Phase::kStore);
}

// Work items: (batch, KV head, range of keys).
template <class S>
void decode(const ForwardParams& p, int64_t begin, int64_t end, void* scratch) {
  const DecodeScratch<S> carved(p, scratch);
  const int64_t splits = decode_splits(p);
  for (int64_t item = begin; item < end; ++item) {
    const HeadRows head(p, item / splits);
    const int64_t k_begin = item % splits * kDecodeSplit, k_end = min(k_begin + kDecodeSplit, p.seqlen_k);
    decode_keys<S>(p, head, k_begin, k_end, {p, head, item}, carved);
  }
}

template <class S>
Plan plan_merge_out(const ForwardParams& p) {
  return {few_rows<S>(p) ? p.batch * p.num_heads_kv : 0, 0, 0};
}

// Work items: (batch, KV head).
template <class S>
void merge_out(const ForwardParams& p, int64_t begin, int64_t end, void*) {
  using T = Compute<S>;
  const int64_t splits = decode_splits(p);
  const Scale<T> scale(p.softmax_scale);
  Stopwatch watch(p.counts);
  for (int64_t item = begin; item < end; ++item) {
    const HeadRows head(p, item);
    const auto part = [&](int64_t split) { return DecodePart<T>(p, head, item * splits + split); };
    for (int64_t r = 0; r < head.count; ++r) {
      T row_max = kNegInf<T>, row_sum = 0;
      for (int64_t split = 0; split < splits; ++split)
        row_max = part(split).row_max[r] > row_max ? part(split).row_max[r] : row_max;
      const vec<T> shift = finite_shift<T>(set1(row_max));
      for (int64_t split = 0; split < splits; ++split) {
        T& weight = part(split).row_max[r];  // of the part, in place of its maximum
        weight = scale.exp(set1(weight) - shift)[0];
        row_sum += weight * part(split).row_sum[r];
      }
      const T inverse = finish_row(p, head, r, row_max, row_sum, scale);
      S* out = head.row<S>(p.out, r);
      for (int64_t d = 0; d < p.head_dim_v; d += kLanes<T>) {
        vec<T> sum = {};
        for (int64_t split = 0; split < splits; ++split)
          sum = fma(set1(part(split).row_max[r]), load(part(split).O.from(r).data + d), sum);
        store(out + d, sum * inverse);
      }
    }
  }
  watch.lap(Phase::kStore);
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
