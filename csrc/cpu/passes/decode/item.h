// A work item of decoding: all query rows of one KV head over a range of its keys, and its scratch. Columns lie on the lanes in
// both products, unless tile registers multiply.
#pragma once

#include "cpu/plan/units.h"
#include "cpu/products/dots.h"
#include "cpu/products/few/few_products.h"
#include "cpu/products/few/pair_products.h"
#include "cpu/products/few/register_products.h"
#include "cpu/simd/simd.h"
#include "cpu/tiles/few_rows.h"
#include "cpu/tiles/keys.h"
#include "shared/mask.h"

namespace pyattn::PYATTN_ISA {
namespace {

// Keys of a block. A block waits once for its largest scores and rescales O once: in groups of 8, bfloat16 with 128 keys takes
// 1.13 times as long. The scores of 8 rows are 16 KB, a third of L1. Rows of 8 bits: as many as their products take.
template <class KV>
inline constexpr int64_t kDecodeBlockK = sizeof(KV) == 1 ? kByteKeys : 512;

// KV: the type that keys and values are stored in.
template <class S, class KV = S>
struct DecodeScratch {
  using T = Compute<S>;
  using E = Operand<S>;
  static constexpr int64_t kBlockK = kDecodeBlockK<KV>;
  int64_t rows;                 // of a head
  FewProducts<S, KV> products;  // [heads x rows]
  RegisterProducts registers;   // [heads], where tile registers multiply
  Matrix<T> P;                  // [heads x rows][keys]
  T* row_sum;                   // [heads x rows][lanes]: partial sums, added up at the end
  // [keys of an item]: the addresses of rows of K and V; empty where one head's rows are evenly spaced.
  const KV **k_rows, **v_rows;
  T* scales;    // [heads][keys]: those of a block, if keys are stored in 8 bits
  Matrix<E> W;  // [heads x rows][terms(keys)]: weights of a block as bf16 pairs
  T* part;      // [heads]: the results where a head's keys are one range
  int64_t part_size;
  // Invariant rows alone:
  Matrix<E> V;  // [terms(keys)][head_dim_v]: values of a block as bf16 pairs, where some are not finite
  T* decay;     // [heads x rows]: the factors that rescale O
  int64_t bytes;

  DecodeScratch(const ForwardParams& p, void* base) : rows(min(most_decode_rows<S>(p), most_rows(p))) {
    Carver carver(base);
    const bool together = decodes_together<S>(p);
    const int64_t heads = together ? p.num_heads_kv : 1, all = heads * rows;
    const int64_t listed = together || keys_apart(p) ? kDecodeSplit : 0;
    products.take(carver, all, kBlockK, p.head_dim, p.head_dim_v);
    registers.take(carver, std::is_same_v<S, KV> && register_rows<S>(rows) ? heads : 0, p.head_dim, p.head_dim_v);
    P = carver.take<T>(all, kBlockK);
    row_sum = carver.take<T>(all * kLanes<T>);
    k_rows = carver.take<const KV*>(listed);
    v_rows = carver.take<const KV*>(listed);
    scales = carver.take<T>(std::is_same_v<S, KV> ? 0 : heads * kBlockK);
    // A tile register of weights is 16 rows, from the first one of a head on.
    W = carver.take<E>(kPairs<S> && std::is_same_v<S, KV> ? all + kRegisterTerms - 1 : 0, kBlockK / 2);
    part_size = DecodePart<T>::size(rows, columns_v<S>(p));
    part = carver.take<T>(heads * part_size);
    const bool invariant = p.cpu.row_invariant;
    V = carver.take<E>(invariant && kPairs<S> ? terms<S>(kInvariantBlockK) : 0, round_up(p.head_dim_v, 2 * kLanes<E>));
    decay = carver.take<T>(invariant ? all : 0);
    bytes = carver.bytes();
  }

  // The scratch of head h of those that run together.
  DecodeScratch of(int64_t h) const {
    DecodeScratch own = *this;
    own.products = products.from(h * rows), own.P = P.from(h * rows);
    own.row_sum = row_sum + h * rows * kLanes<T>, own.decay = decay + h * rows, own.W = W.from(h * rows);
    own.scales = scales + h * kBlockK, own.part = part + h * part_size;
    own.registers = registers.of(h);
    return own;
  }
};

template <class S, template <class> class Score, class KV>
struct DecodeItem {
  using T = Compute<S>;
  using Element = S;
  using Stored = KV;
  using Scratch = DecodeScratch<S, KV>;
  static constexpr int L = kLanes<T>;
  static constexpr bool kScaled = !std::is_same_v<S, KV>;  // whether keys are stored in 8 bits
  static constexpr bool kRegisters = kTileRegisters<Operand<S>> && !kScaled;
  static constexpr bool kFiniteValues = FewProducts<S, KV>::kFiniteValues;
  static constexpr int64_t kBlockK = kDecodeBlockK<KV>;
  // Keys whose product with V is one sum before it is added to O: rounding errors grow with longer sums. Turns divide it.
  static constexpr int64_t kSumKeys = 128;

  // The end of the block that begins at key n0.
  static int64_t block_end(int64_t n0) { return n0 + kBlockK; }

  // Keys of a turn. Four rows or more load and store the sums of their product with V once a turn, so theirs is longer: with
  // 16 keys, groups of 8 take 1.2 times as long in bf16 pairs and 1.03 in float, for which 64 keys are too many for L1. Rows of
  // 8 bits: with 16, too few bytes are on their way, and the product with V takes 1.25 times as long. CPUs with AMX take 0.82 to
  // 0.98 of the time with 64, one row of bf16 too.
  static int64_t turn_keys(int64_t rows) {
    if (sizeof(KV) == 1) return 32;
    if (kRegisters || sums_pairs(rows)) return 64;
    return rows < kSideBySide ? 16 : kLongTurn;
  }

  // Whether products prefetch later keys.
  template <class Rows>
  static bool prefetches(int64_t rows) {
    return kAsksAhead<KV, Rows, 1> || rows > 1;
  }

  const ForwardParams& p;
  const Head head;
  const Mask mask{p, head};
  const int64_t rows = head.count;
  const Score<S> score{p};
  const DecodeScratch<S, KV> s;
  const bool whole = decode_splits(p, head.seqlen_k) == 1;  // whether the head's keys are one range
  const DecodePart<T> part;
  const Range keys;  // from the first to the last one that some row sees, or a few keys before

  DecodeItem(const ForwardParams& p, int64_t head, int64_t split, const DecodeScratch<S, KV>& s)
      : p(p),
        head(p, head),
        s(s),
        part(whole ? DecodePart<T>(s.part, rows, columns_v<S>(p)) : DecodeParts<S>(p, this->head).of(split)),
        keys(whole_strips(p, split_keys(p, this->head, split).in(mask.keys_of_any(0, rows)))) {}

  // Invariant rows begin where a strip would, so pairs of bf16 keys are the same.
  static Range whole_strips(const ForwardParams& p, Range keys) {
    return {p.cpu.row_invariant && !keys.empty() ? round_down(keys.begin, kStripKeys) : keys.begin, keys.end};
  }

  void start() const {
    const auto row = [&](int64_t r) { return head.row<const S>(p.q, r); };
    with_products(s, rows, [&](const auto& products) { products.start(rows, p.head_dim, score.power, row); });
    for (int64_t r = 0; r < rows; ++r) part.row_max[r] = kNegInf<T>;
    fill_zero(s.row_sum, rows * L);
    fill_zero(part.O.data, rows * part.O.row);
  }

  void list_key_scales(const Tile& tile) const {
    if constexpr (kScaled) list_scales<KV>(p, head, p.cpu.bytes.scale_k, {tile.n0, tile.n0 + tile.keys}, s.scales);
  }

  void to_scores(const Tile& tile) const {
    if constexpr (kScaled && !FewProducts<S, KV>::kScalesKeys)
      scale_keys<T>(s.P, rows, tile.keys, s.scales, false, [&](int64_t r) { return s.products.query_factor(r); });
    score.to_scores_by_rows(p, s.P, head, tile);
  }

  // s.P[rows][keys] = Q K^T for the keys of a turn. Prefetches the rows of `ahead`.
  template <class Rows, class Ahead>
  static PYATTN_MEMBER_INLINE void multiply_keys(const ForwardParams& p, const Scratch& s, const Tile& tile, Range turn,
                                                 Rows K, Ahead& ahead) {
    if constexpr (kRegisters)
      if (register_rows<S>(tile.rows))
        return s.registers.multiply_keys(tile.rows, turn.count(), p.head_dim, K.from(turn.begin),
                                         s.P.from_column(turn.begin), ahead);
    if constexpr (FewProducts<S, KV>::kScalesKeys)
      s.products.multiply_keys(tile.rows, turn.count(), p.head_dim, K.from(turn.begin), s.scales + turn.begin,
                               s.P.from_column(turn.begin), ahead);
    else
      s.products.with_rows(tile.rows, turn.count(), p.head_dim, K.from(turn.begin), ahead,
                           [&](auto keys, auto& later) PYATTN_MEMBER_INLINE {
                             using R = typename decltype(keys)::Element;
                             constexpr int kRows =
                                 kWidensTurns<S, KV> && std::is_same_v<R, KV> ? kSideBySide / 2 : kSideBySide;
                             for (int64_t j = 0; j < turn.count(); j += L)
                               dots<R, T, min(kRows, L)>(tile.rows, turn.count() - j, p.head_dim, s.products.Q,
                                                         keys.from(j), s.P.from_column(turn.begin + j), later);
                           });
  }

  // The product += P V for the keys of a turn, of which every row sees all. Prefetches the rows of `ahead`.
  template <class Rows, class Ahead>
  static PYATTN_MEMBER_INLINE void multiply_values(const ForwardParams& p, const Scratch& s, const Tile& tile,
                                                   Range turn, Rows V, Ahead& ahead) {
    if constexpr (kRegisters)
      if (register_rows<S>(tile.rows))
        return s.registers.add_values(turn.count(), p.head_dim_v, s.W.from_column(turn.begin / 2).strided(),
                                      V.from(turn.begin), ahead);
    if constexpr (kPairs<S> && !kScaled && !kRegisters)
      if (sums_pairs(tile.rows)) return add_pairs_of_turn(p, s, tile, turn, V, ahead);
    s.products.add_values(tile.rows, turn.count(), p.head_dim_v, s.P.from_column(turn.begin), turn.begin,
                          V.from(turn.begin), ahead);
  }

  // Calls f with the products of that many rows.
  template <class F>
  static PYATTN_MEMBER_INLINE void with_products(const Scratch& s, int64_t rows, F f) {
    if constexpr (kRegisters)
      if (register_rows<S>(rows)) return f(s.registers);
    f(s.products);
  }

  // Whether the product with V sums pairs of bf16 keys. Memory takes longer than fewer rows, whose weights stay float.
  static bool sums_pairs(int64_t rows) { return kPairs<S> && !kScaled && rows >= kSideBySide; }

  template <class Rows, class Ahead>
  static PYATTN_MEMBER_INLINE void add_pairs_of_turn(const ForwardParams& p, const Scratch& s, const Tile& tile,
                                                     Range turn, Rows V, Ahead& ahead) {
    add_pairs<S>(tile.rows, turn.count(), p.head_dim_v, s.W.strided().from(0, turn.begin / 2), V.from(turn.begin),
                 s.products.O, ahead);
  }

  // O += P V for the keys of the tile that each row sees.
  template <class Rows>
  void add_seen_values(const Tile& tile, Rows V) const {
    BlockProduct<S, Rows>(p, mask, tile, s.P, V).add_to(part.O);
  }

  // Scores in s.P -> weights. Rescales O.
  void weigh(const Tile& tile) const {
    for (int64_t r = 0; r < rows; ++r) {
      T* scores = s.P.from(r).data;
      const Range seen = mask_scores<S>(mask, tile, r, scores);
      const T decay = softmax_row(scores, seen, score, part.row_max[r], s.row_sum + r * L);
      T* o = part.O.from(r).data;
      for (int64_t d = 0; d < part.O.row; d += L) store(o + d, load(o + d) * decay);
    }
    if (sums_pairs(rows)) pair_weights(tile);
  }

  void pair_weights(const Tile& tile) const {
    tile_over_lanes<S>(s.P, 0, rows, 0, round_up(tile.keys, L), s.W);
    const int64_t written = round_up(tile.keys, L) / 2, whole = round_up(written, kRegisterTerms);
    for (int64_t r = 0; r < rows && written < whole; ++r) fill_zero(s.W.at(r) + written, whole - written);
  }

  // The weights of values of 8 bits: multiplied by their scales. sees_all: no key is hidden, whose scale may be NaN.
  void scale_weights(const Tile& tile, bool sees_all) const {
    if constexpr (kScaled) {
      list_scales<KV>(p, head, p.cpu.bytes.scale_v, {tile.n0, tile.n0 + tile.keys}, s.scales);
      scale_keys<T>(s.P, rows, tile.keys, s.scales, !sees_all, [](int64_t) { return T(1); });
      for (int64_t r = 0; r < rows; ++r)
        s.products.round_weights(r, s.P.at(r), mask.keys_of(r).within(tile.n0, tile.keys), tile.keys);
    }
  }

  // O += the product of at most kSumKeys keys.
  void add_product() const {
    with_products(s, rows, [&](const auto& products) { products.add_to(part.O, rows, p.head_dim_v); });
  }

  void finish() const {
    for (int64_t r = 0; r < rows; ++r) {
      T sum = 0;
      for (int i = 0; i < L; ++i) sum += s.row_sum[r * L + i];
      part.row_sum[r] = sum;
    }
  }

  // Writes the head's results, if no other item takes keys of it.
  void write() const {
    if (whole) merge_parts<S>(p, head, score, 1, [&](int64_t) { return part; });
  }
};

}  // namespace
}  // namespace pyattn::PYATTN_ISA
