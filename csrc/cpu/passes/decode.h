// Decoding is forward for few query rows, whose time goes into reading K and V. Columns lie on the
// lanes, and K and V are read in place. The keys of a head are split among work items (split-K);
// each item stores a partial result in the workspace, and merge.h combines these.
#pragma once

#include "cpu/passes/stopwatch.h"
#include "cpu/plan/units.h"
#include "cpu/products/dots.h"
#include "cpu/products/few_products.h"
#include "cpu/simd/simd.h"
#include "cpu/tiles/few_rows.h"
#include "cpu/tiles/keys.h"
#include "shared/mask.h"

namespace pyattn::PYATTN_ISA {
namespace {

// The scores of a block fit in L1 (8 rows of 128 floats are 4 KB), and O is rescaled only once per block.
inline constexpr int64_t kDecodeBlockK = 128;

// Locates a head's partial results in the workspace: one for each range of its keys.
template <class S>
class DecodeParts {
  using T = Compute<S>;

 public:
  struct Part {
    Matrix<T> O;           // [rows][head_dim_v in whole vectors, as in dots.h]: exp(S - row_max) V
    T *row_max, *row_sum;  // [rows]
  };

  DecodeParts(const ForwardParams& p, const Head& head)
      : rows_(head.count),
        cols_(columns(p)),
        first_(static_cast<T*>(p.workspace) + first_unit_of<S>(p, Unit::kPartRows, head) * (cols_ + 2)) {}

  static int64_t bytes(const ForwardParams& p) {
    return work_of<S>(p, Unit::kPartRows).count() * (columns(p) + 2) * static_cast<int64_t>(sizeof(T));
  }

  Part of(int64_t split) const {
    const Matrix<T> O{first_ + split * rows_ * (cols_ + 2), cols_};
    return {O, O.from(rows_).data, O.from(rows_).data + rows_};
  }

 private:
  int64_t rows_, cols_;
  T* first_;

  static int64_t columns(const ForwardParams& p) { return round_up(p.head_dim_v, kLanes<T>); }
};

// KV: the type that keys and values are stored in.
template <class S, class KV = S>
struct DecodeScratch {
  using T = Compute<S>;
  int64_t rows;                 // of a head
  FewProducts<S, KV> products;  // [heads x rows]
  Matrix<T> P;                  // [heads x rows][keys]
  T* row_sum;                   // [heads x rows][lanes]: partial sums, added up at the end
  // [keys of an item]: the addresses of rows of K and V; empty where one head's rows are evenly spaced.
  const KV **k_rows, **v_rows;
  T* scales;  // [keys]: those of a block, if keys are stored in 8 bits
  int64_t bytes;

  DecodeScratch(const ForwardParams& p, void* base) : rows(min(kDecodeRows, most_rows(p))) {
    Carver carver(base);
    const bool together = decodes_together<S>(p);
    const int64_t all = rows * (together ? p.num_heads_kv : 1), listed = together || keys_apart(p) ? kDecodeSplit : 0;
    products.take(carver, all, kDecodeBlockK, p.head_dim, p.head_dim_v);
    P = carver.take<T>(all, kDecodeBlockK);
    row_sum = carver.take<T>(all * kLanes<T>);
    k_rows = carver.take<const KV*>(listed);
    v_rows = carver.take<const KV*>(listed);
    scales = carver.take<T>(std::is_same_v<S, KV> ? 0 : kDecodeBlockK);
    bytes = carver.bytes();
  }

  // The scratch of head h of those that run together.
  DecodeScratch of(int64_t h) const {
    DecodeScratch own = *this;
    own.products = products.from(h * rows), own.P = P.from(h * rows), own.row_sum = row_sum + h * rows * kLanes<T>;
    return own;
  }
};

// One work item: all query rows of one KV head, over a range of its keys.
template <class S, template <class> class Score, class KV>
struct DecodeItem {
  using T = Compute<S>;
  static constexpr int L = kLanes<T>;
  static constexpr bool kScaled = !std::is_same_v<S, KV>;  // whether keys are stored in 8 bits

  const ForwardParams& p;
  const Head head;
  const Mask mask{p, head};
  const int64_t rows = head.count;
  const Score<S> score{p};
  const DecodeScratch<S, KV> s;
  const typename DecodeParts<S>::Part part;
  const Range keys;  // from the first to the last one that some row sees

  DecodeItem(const ForwardParams& p, int64_t head, int64_t split, const DecodeScratch<S, KV>& s)
      : p(p),
        head(p, head),
        s(s),
        part(DecodeParts<S>(p, this->head).of(split)),
        keys(split_keys(this->head, split).in(mask.keys_of_any(0, rows))) {}

  void start() const {
    s.products.start(rows, p.head_dim, score.power, [&](int64_t r) { return head.row<const S>(p.q, r); });
    for (int64_t r = 0; r < rows; ++r) part.row_max[r] = kNegInf<T>;
    fill_zero(s.row_sum, rows * L);
    fill_zero(part.O.data, rows * part.O.row);
  }

  // Whether every row sees these keys and no others.
  bool sees_exactly(Range all) const {
    return keys.begin == all.begin && keys.end == all.end && mask.sees_all(0, rows, all.begin, all.count());
  }

  void to_scores(const Tile& tile) const {
    if constexpr (kScaled) {
      list_scales<KV>(p, head, p.cpu.bytes.scale_k, {tile.n0, tile.n0 + tile.keys}, s.scales);
      scale_keys<T>(s.P, rows, tile.keys, s.scales, false, [&](int64_t r) { return s.products.query_factor(r); });
    }
    score.to_scores_by_rows(p, s.P, head, tile);
  }

  // Scores in s.P -> weights. Rescales O.
  void weigh(const Tile& tile) const {
    for (int64_t r = 0; r < rows; ++r) {
      T* scores = s.P.from(r).data;
      const Range seen = mask.keys_of(r).within(tile.n0, tile.keys);
      if (mask.intervals() > 1) hide_gaps(mask, tile, r, seen, scores);
      mask.each_filter<S>(r, [&](auto shown) {
        for (int64_t k = seen.begin; k < seen.end; ++k) scores[k] = shown(tile.n0 + k) ? scores[k] : kNegInf<T>;
      });
      const T decay = softmax_row(scores, seen, score, part.row_max[r], s.row_sum + r * L);
      T* o = part.O.from(r).data;
      for (int64_t d = 0; d < part.O.row; d += L) store(o + d, load(o + d) * decay);
    }
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

  // O += the product of a block.
  void add_product() const { s.products.add_to(part.O, rows, p.head_dim_v); }

  void finish() const {
    for (int64_t r = 0; r < rows; ++r) {
      T sum = 0;
      for (int i = 0; i < L; ++i) sum += s.row_sum[r * L + i];
      part.row_sum[r] = sum;
    }
  }
};

// Keys are multiplied in turns, of which each prefetches the next one. Where the rows of several heads are neighbours in
// memory, these heads take each turn one after another: memory is read in the order of addresses, and its lines stay in
// L2 until each head has had its turn. Rows of 8 bits take twice as many keys: with 16, too few bytes are on their way, and
// the product with V takes 1.25 times as long.
template <class KV>
inline constexpr int64_t kTurnKeys = sizeof(KV) == 1 ? 32 : 16;

// Computes the work items of `heads` KV heads of a sequence, from `first` on, for one range of keys. An item has the
// same bits alone and together with others.
template <class S, template <class> class Score, class KV = S>
void decode_keys(const ForwardParams& p, int64_t first, int64_t heads, int64_t split, const DecodeScratch<S, KV>& s) {
  using T = Compute<S>;
  constexpr int L = kLanes<T>;
  const auto item = [&](int64_t h) { return DecodeItem<S, Score, KV>(p, first + h, split, s.of(h)); };
  const DecodeItem<S, Score, KV> one = item(0);
  const auto each = [&](auto f) {
    f(one, 0);
    for (int64_t h = 1; h < heads; ++h) f(item(h), h);
  };
  const int64_t rows = one.rows;
  const Range keys = one.keys;
  bool alike = true;  // whether all heads see the same keys; without summaries they do
  if (heads > 1 && p.mask.blocks) each([&](const auto& other, int64_t) { alike = alike && other.sees_exactly(keys); });
  if (!alike) return each([&](const auto&, int64_t h) { decode_keys<S, Score, KV>(p, first + h, 1, split, s); });

  Stopwatch watch(p.cpu.counts);
  each([](const auto& item, int64_t) { item.start(); });
  watch.lap(Phase::kPack);
  const auto run = [&](auto k_rows, auto v_rows) {  // of the first head, each a Matrix or a RowTable
    using Rows = decltype(k_rows);
    const bool asks = kAsksAhead<KV, Rows, 1> || rows > 1;
    const int64_t turn = asks ? kTurnKeys<KV> : kDecodeBlockK;
    for (int64_t n0 = keys.begin; n0 < keys.end; n0 += kDecodeBlockK) {
      const Tile tile{0, rows, rows, n0, min(kDecodeBlockK, keys.end - n0)};
      if (one.mask.intervals() > 1 && !one.mask.in_any(0, rows, n0, tile.keys)) continue;
      const Rows K = k_rows.from(n0 - keys.begin), V = v_rows.from(n0 - keys.begin);
      const auto keys_ahead = [&](int64_t j) {
        const int64_t count = asks ? min(kTurnKeys<KV>, keys.end - n0 - j) : 0;
        return RowsAhead<Rows>{K.from(j), count, p.head_dim, heads, p.k.stride_h};
      };
      const auto values_ahead = [&](int64_t j) {
        const int64_t count = asks ? min(kTurnKeys<KV>, tile.keys - j) : 0;
        return RowsAhead<Rows>{V.from(j), count, p.head_dim_v, heads, p.v.stride_h};
      };
      for (int64_t j0 = 0; j0 < tile.keys; j0 += turn) {
        auto ahead = j0 + turn < tile.keys ? keys_ahead(j0 + turn) : values_ahead(0);
        for (int64_t h = 0; h < heads; ++h)
          for (int64_t j = j0; j < min(j0 + turn, tile.keys); j += L)
            dots<KV>(rows, tile.keys - j, p.head_dim, s.of(h).products.Q, K.from(j).from_column(h * p.k.stride_h),
                     {s.of(h).P.data + j, s.P.row}, [&](int64_t, int64_t n) {
                       for (int64_t k = 0; k < n; ++k) ahead.take_one();
                     });
      }
      each([&](const auto& item, int64_t) { item.to_scores(tile); });
      watch.lap(Phase::kScores, 2 * heads * rows * tile.keys * p.head_dim);
      each([&](const auto& item, int64_t) { item.weigh(tile); });
      watch.lap(Phase::kSoftmax);
      const bool sees_all = one.mask.sees_all(0, rows, n0, tile.keys);
      each([&](const auto& item, int64_t) { item.scale_weights(tile, sees_all); });
      if (sees_all || FewProducts<S, KV>::kFiniteValues) {
        for (int64_t j0 = 0; j0 < tile.keys; j0 += turn) {
          auto ahead = j0 + turn < tile.keys ? values_ahead(j0 + turn) : keys_ahead(tile.keys);
          for (int64_t h = 0; h < heads; ++h)
            s.of(h).products.add_values(rows, min(turn, tile.keys - j0), p.head_dim_v, s.of(h).P.from_column(j0), j0,
                                        V.from(j0).from_column(h * p.v.stride_h), ahead);
        }
        each([](const auto& item, int64_t) { item.add_product(); });
      } else {
        each([&](const auto& item, int64_t h) {
          BlockProduct<S, Rows>(p, item.mask, tile, item.s.P, V.from_column(h * p.v.stride_h)).add_to(item.part.O);
        });
      }
      watch.lap(Phase::kOut, 2 * heads * rows * tile.keys * p.head_dim_v);
    }
  };
  if (!keys.empty()) {
    const KeyRun<KV> K = key_run<KV>(p, one.head, p.k, keys), V = key_run<KV>(p, one.head, p.v, keys);
    if (heads == 1 && K.count == keys.count() && V.count == keys.count())
      run(K.rows, V.rows);
    else
      run(list_rows<KV>(p, one.head, p.k, keys, s.k_rows), list_rows<KV>(p, one.head, p.v, keys, s.v_rows));
  }
  each([](const auto& item, int64_t) { item.finish(); });
  watch.lap(Phase::kStore);
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
