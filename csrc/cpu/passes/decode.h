// Decoding is forward for few query rows, whose time goes into reading K and V. Columns lie on the
// lanes, and K and V are read in place. The keys of a head are split among work items (split-K);
// each item stores a partial result in the workspace, and merge.h combines these.
#pragma once

#include "cpu/passes/stopwatch.h"
#include "cpu/plan/units.h"
#include "cpu/products/dots.h"
#include "cpu/products/matrix.h"
#include "cpu/products/pack.h"
#include "cpu/tiles/keys.h"
#include "cpu/products/product.h"
#include "cpu/products/scratch.h"
#include "cpu/simd/simd.h"
#include "cpu/tiles/softmax.h"
#include "cpu/tiles/strips.h"
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

template <class S>
struct DecodeScratch {
  using T = Compute<S>;
  using E = Operand<S>;
  Matrix<E> Q;  // [rows][few_terms(head_dim)]
  Matrix<T> P;  // [rows][keys]
  T* row_sum;   // [rows][lanes]: partial sums, added up at the end
  // [keys of an item + keys prefetched after them]: the addresses of rows of K and V; empty without pages.
  const S **k_rows, **v_rows;
  int64_t bytes;

  DecodeScratch(const ForwardParams& p, void* base) {
    Carver carver(base);
    Q = carver.take<E>(kDecodeRows, few_terms<S>(p.head_dim));
    P = carver.take<T>(kDecodeRows, kDecodeBlockK);
    row_sum = carver.take<T>(kDecodeRows * kLanes<T>);
    k_rows = carver.take<const S*>(p.cpu.pages.table ? kDecodeSplit + kDecodeBlockK : 0);
    v_rows = carver.take<const S*>(p.cpu.pages.table ? kDecodeSplit + kPrefetchKeys : 0);
    bytes = carver.bytes();
  }
};

// s[keys] -> P = exp(s - row_max) in place, for one row and the keys in `seen`.
// Updates row_max and row_sum[lanes]; returns the factor that rescales earlier sums.
template <class T, class Score>
T softmax_row(T* s, Range seen, Score score, T& row_max, T* row_sum) {
  constexpr int L = kLanes<T>;
  const int64_t begin = round_down(seen.begin, L), end = round_up(seen.end, L);
  for (int64_t k = begin; k < seen.begin; ++k) s[k] = kNegInf<T>;
  for (int64_t k = seen.end; k < end; ++k) s[k] = kNegInf<T>;
  vec<T> largest = set1(row_max);
  for (int64_t k = begin; k < end; k += L) largest = max(load(s + k), largest);
  T new_max = row_max;
  for (int i = 0; i < L; ++i) new_max = largest[i] > new_max ? largest[i] : new_max;
  const vec<T> shift = finite_shift<T>(set1(new_max));
  const vec<T> decay = score.exp(set1(row_max) - shift);
  vec<T> sum = load(row_sum) * decay;
  for (int64_t k = begin; k < end; k += L) {
    const vec<T> p = score.exp(load(s + k) - shift);
    sum += p;
    store(s + k, p);
  }
  store(row_sum, sum);
  row_max = new_max;
  return decay[0];
}

// Masks scores[keys] of row r in `seen` that lie between its intervals.
template <class T>
void hide_gaps(const Mask& mask, const Tile& tile, int64_t r, Range seen, T* scores) {
  int64_t k = seen.begin;
  for (int64_t n = 0; n < mask.intervals(); ++n) {
    const Range keys = mask.keys_of(r, n).within(tile.n0, tile.keys);
    if (keys.empty()) continue;
    for (; k < keys.begin; ++k) scores[k] = kNegInf<T>;
    k = keys.end;
  }
  for (; k < seen.end; ++k) scores[k] = kNegInf<T>;
}

// O[rows][cols] += P[rows][keys] V[keys][cols], for the keys of a block that each row sees.
// Keys that every row sees are multiplied in one product, the others row by row. So a row is
// never multiplied by a value that it does not see, which may be NaN. If V is not finite,
// keys in holes are skipped too. Rows is a Matrix or a RowTable.
template <class S, class Rows>
class BlockProduct {
  using T = Compute<S>;

 public:
  BlockProduct(const ForwardParams& p, const Mask& mask, const Tile& tile, Matrix<T> P, Rows V, Rows next_K)
      : cols_(p.head_dim_v),
        cols_k_(p.head_dim),
        mask_(mask),
        tile_(tile),
        P_(P),
        V_(V),
        next_K_(next_K),
        select_(mask.any_holes(0, tile.rows) && !all_finite<S>(tile.keys, cols_, [&](int64_t j) { return V.at(j); })) {}

  void add_to(Matrix<T> O) const {
    for (int64_t n = 0; n < mask_.intervals(); ++n) {
      const Range common = mask_.keys_of_all(0, tile_.rows, n).within(tile_.n0, tile_.keys);
      add_rows(O, 0, tile_.rows, common);
      for (int64_t r = 0; r < tile_.rows; ++r) {
        const Range seen = mask_.keys_of(r, n).within(tile_.n0, tile_.keys);
        const Range apart[] = {{seen.begin, min(seen.end, common.begin)}, {max(seen.begin, common.end), seen.end}};
        for (const Range keys : apart)
          if (!keys.empty()) add_rows(O, r, 1, keys);
      }
    }
  }

 private:
  // A product's factors and its columns, for some rows and keys.
  struct Factors {
    Strided<T> weights;  // [rows][keys]
    Rows values;         // [keys][cols]
    int64_t rows, cols;
    Range keys;
  };

  int64_t cols_, cols_k_;  // head_dim_v, head_dim
  const Mask& mask_;
  const Tile& tile_;
  Matrix<T> P_;
  Rows V_, next_K_;
  bool select_;  // whether keys in holes are left out one by one

  void add_rows(Matrix<T> O, int64_t r, int64_t rows, Range keys) const {
    const int64_t whole = round_down(cols_, kLanes<T>);
    const Strided<T> weights = P_.strided().from(r, keys.begin);
    const Rows values = V_.from(keys.begin);
    add_columns({weights, values, rows, whole, keys}, r, O.from(r), kAsksAhead<S, Rows, 1> || rows > 1 ? cols_k_ : 0);
    if (whole < cols_)
      add_columns({weights, values.from_column(cols_ - kLanes<T>), rows, kLanes<T>, keys}, r,
                  O.from(r).from_column(whole), 0);
  }

  // The product prefetches the first `ahead` columns of the next block of K.
  void add_columns(const Factors& f, int64_t r, Matrix<T> O, int64_t ahead) const {
    if (select_)
      gemm_seen<T, T, Rows>(f.rows, 0, f.cols, f.keys.count(), f.weights, f.values, O, Update<T>::add(),
                            [&](int64_t i, int64_t, int64_t k) {
                              const bool sees = mask_.sees<S>(r + i, tile_.n0 + f.keys.begin + k);
                              return set1(static_cast<T>(sees)) != vec<T>{};
                            });
    else if (ahead)
      add_and_prefetch(f, O, ahead);
    else
      gemm<T, T, Rows, kWideNV>(f.rows, 0, f.cols, f.keys.count(), f.weights, f.values, O, Update<T>::add());
  }

  // In tiles, of which each prefetches its share of the columns.
  void add_and_prefetch(const Factors& f, Matrix<T> O, int64_t ahead) const {
    constexpr int64_t kHeight = kMR[kWideNV], kWidth = kWideNV * kLanes<T>, kLine = kCacheLine / sizeof(S);
    const int64_t tiles = ceil_div(f.rows, kHeight) * ceil_div(f.cols, kWidth);
    const Rows next_K = next_K_;  // a member, or rows from keys.begin on, would take 2 % longer
    const Range keys = f.keys;
    int64_t n = 0;
    for (int64_t i = 0; i < f.rows; i += kHeight)
      for (int64_t j = 0; j < f.cols; j += kWidth, ++n) {
        const int64_t first = round_down(ahead * n / tiles, kLine), past = ahead * (n + 1) / tiles;
        gemm<T, T, Rows, kWideNV>(min(kHeight, f.rows - i), j, min(j + kWidth, f.cols), f.keys.count(),
                                  f.weights.from(i, 0), f.values, O.from(i), Update<T>::add(), [=](int64_t k) {
                                    for (int64_t d = first; d < past; d += kLine)
                                      __builtin_prefetch(next_K.at(keys.begin + k) + d);
                                  });
      }
  }
};

// Computes one work item: all query rows of one KV head, over a range of its keys.
template <class S, template <class> class Score>
void decode_keys(const ForwardParams& p, const Head& head, int64_t split, const DecodeScratch<S>& s) {
  using T = Compute<S>;
  constexpr int L = kLanes<T>;
  const int64_t rows = head.count;
  const auto [k_begin, k_end] = split_keys(head, split);
  const auto part = DecodeParts<S>(p, head).of(split);
  const Mask mask(p, head);
  const Score<S> score(p);
  Stopwatch watch(p.cpu.counts);
  pack_few_queries<S>(s.Q, rows, p.head_dim, score.power, [&](int64_t r) { return head.row<const S>(p.q, r); });
  for (int64_t r = 0; r < rows; ++r) part.row_max[r] = kNegInf<T>;
  fill_zero(s.row_sum, rows * L);
  fill_zero(part.O.data, rows * part.O.row);
  watch.lap(Phase::kPack);

  const Range visible = mask.keys_of_any(0, rows).within(k_begin, k_end - k_begin);
  const auto run = [&](auto k_rows, auto v_rows) {  // each a Matrix or a RowTable
    for (int64_t n = visible.begin; n < visible.end; n += kDecodeBlockK) {
      const Tile tile{0, rows, rows, k_begin + n, min(kDecodeBlockK, visible.end - n)};
      if (mask.intervals() > 1 && !mask.in_any(0, rows, tile.n0, tile.keys)) continue;
      const auto K = k_rows.from(n - visible.begin), V = v_rows.from(n - visible.begin);
      for (int64_t j = 0; j < tile.keys; j += L)
        dots<S>(rows, tile.keys - j, p.head_dim, s.Q, K.from(j), {s.P.data + j, s.P.row}, [&](int64_t i, int64_t n) {
          prefetch_later_keys(K, j + i, n, p.head_dim);
          prefetch_rows(j + i, j + i + n, p.head_dim_v, [&](int64_t i) { return V.at(i); });
        });
      score.to_scores_by_rows(p, s.P, head, tile);
      watch.lap(Phase::kScores, 2 * rows * tile.keys * p.head_dim);
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
      watch.lap(Phase::kSoftmax);
      BlockProduct<S, decltype(v_rows)>(p, mask, tile, s.P, V, K.from(kDecodeBlockK)).add_to(part.O);
      watch.lap(Phase::kOut, 2 * rows * tile.keys * p.head_dim_v);
    }
  };
  const Range keys{k_begin + visible.begin, k_begin + visible.end};
  if (!keys.empty()) {
    const KeyRun<S> K = key_run<S>(p, head, p.k, keys), V = key_run<S>(p, head, p.v, keys);
    if (K.count == keys.count() && V.count == keys.count())
      run(K.rows, V.rows);
    else
      run(list_rows<S>(p, head, p.k, keys, kDecodeBlockK, s.k_rows),
          list_rows<S>(p, head, p.v, keys, kPrefetchKeys, s.v_rows));
  }
  for (int64_t r = 0; r < rows; ++r) {
    T sum = 0;
    for (int i = 0; i < L; ++i) sum += s.row_sum[r * L + i];
    part.row_sum[r] = sum;
  }
  watch.lap(Phase::kStore);
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
