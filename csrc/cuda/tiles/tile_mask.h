// The mask on tiles: which tiles a thread block runs over,
// and which sums of a tile the mask hides.
#pragma once

#include "cuda/plan/work.h"
#include "cuda/products/fragment.h"
#include "cuda/ptx/primitives.h"
#include "cuda/products/product.h"
#include "shared/mask.h"

namespace pyattn::cuda {
namespace {

// The range that a thread block runs over, tile by tile: the
// keys of a block of rows, or the rows of a block of keys.
struct Run {
  int begin, end;
  int all_begin, all_end;  // seen by every row, or seeing every key, of the block

  PYATTN_DEVICE Run(Range any, Range all)
      : begin(static_cast<int>(any.begin)),
        end(static_cast<int>(any.end)),
        all_begin(static_cast<int>(all.begin)),
        all_end(static_cast<int>(all.end)) {}

  PYATTN_DEVICE bool empty() const { return begin >= end; }
  PYATTN_DEVICE bool sees_all(int at, int count) const { return all_begin <= at && at + count <= all_end; }
};

// The range, extended to begin at a multiple of n.
PYATTN_DEVICE Range from_multiple(Range range, int n) {
  return range.empty() ? range : Range{round_down(range.begin, n), range.end};
}

// The keys of the rows [r0, r0 + rows), from a multiple of kDrawKeys, for which dropout draws at once.
PYATTN_DEVICE Run keys_of_rows(const Mask& mask, int r0, int rows) {
  return {from_multiple(mask.keys_of_any(r0, rows), kDrawKeys),
          mask.any_holes(r0, rows) ? Range{0, 0} : mask.keys_of_all(r0, rows, 0)};
}

// The rows that see some of the keys [n0, n0 + keys), by the summaries. Each lane searches a part.
PYATTN_DEVICE Range rows_of_summaries(const Mask& mask, int n0, int keys) {
  const int64_t part = round_up(ceil_div(mask.head.count, kWarpLanes), kBlockRows);
  const int64_t first = min(lane() * part, mask.head.count);
  const Range own = mask.rows_of_any(n0, keys, {first, min(first + part, mask.head.count)});
  Range rows{own.empty() ? mask.head.count : own.begin, own.empty() ? 0 : own.end};
#pragma unroll
  for (int lanes = kWarpLanes / 2; lanes; lanes /= 2)
    rows = {min(rows.begin, shuffle_xor(rows.begin, lanes)), max(rows.end, shuffle_xor(rows.end, lanes))};
  return rows;
}

// The rows of the keys [n0, n0 + keys), from a multiple of kBlockRows, so
// formulas and summaries that hide the same keys give the same bits.
PYATTN_DEVICE Run rows_of_keys(const Mask& mask, int n0, int keys) {
  const Range any = mask.p.mask.blocks ? rows_of_summaries(mask, n0, keys) : mask.rows_of_any(n0, keys);
  return {from_multiple(any, kBlockRows), mask.rows_of_all(n0, keys)};
}

// The mask on one tile, whose query rows are r0, r0 + step and so on, and
// whose keys begin at n0. Its functions take rows and keys of the tile.
struct TileMask {
  Mask mask;
  int r0, n0;
  int rows;  // of the head
  int step;

  PYATTN_DEVICE TileMask(const Mask& mask, int r0, int n0, int rows, int step = 1)
      : mask(mask), r0(r0), n0(n0), rows(rows), step(step) {}

  // The row, or key, of the head; the head's last one for those past its end.
  PYATTN_DEVICE int64_t row_of(int row) const { return min(r0 + row * step, rows - 1); }
  PYATTN_DEVICE int64_t key_of(int key) const { return min(n0 + key, mask.head.seqlen_k - 1); }

  // Whether the head has this row and this key.
  PYATTN_DEVICE bool contains(int row, int key) const {
    return r0 + row * step < rows && n0 + key < mask.head.seqlen_k;
  }

  struct Keys {
    int begin, end;

    PYATTN_DEVICE bool contains(int key) const { return begin <= key && key < end; }
  };

  // Rows past the head's last see no keys.
  PYATTN_DEVICE Keys keys_of(int row) const { return from_tile(row, mask.keys_of(row_of(row))); }
  PYATTN_DEVICE Keys keys_by_formula(int row) const {
    return from_tile(row, mask.by_formula(mask.head.query(row_of(row))));
  }

  // Whether the row sees the key: in keys_of, and not in a hole.
  template <class S>
  PYATTN_DEVICE bool sees(int row, int key) const {
    return keys_of(row).contains(key) && mask.sees<S>(row_of(row), n0 + key);
  }

 private:
  PYATTN_DEVICE Keys from_tile(int row, Range keys) const {
    if (r0 + row * step >= rows) return {0, 0};
    return {static_cast<int>(keys.begin) - n0, static_cast<int>(keys.end) - n0};
  }
};

// The mask of this block's rows on the keys from n0 on.
// Kernels rebuild it on use: see RowBlock.
template <int kRows>
PYATTN_DEVICE TileMask mask_of_rows(const ForwardParams& p, int n0) {
  const RowBlock<kRows> same(p);
  return {Mask(p, same.head), same.first(), n0, static_cast<int>(same.head.count)};
}

// The mask on this block's keys, of the rows from r0 on.
template <int kKeys>
PYATTN_DEVICE TileMask mask_of_keys(const ForwardParams& p, int r0) {
  const KeyBlock<kKeys> same(p);
  return {Mask(p, same.head), r0, same.first(), static_cast<int>(same.head.count)};
}

// ---- Tiles that summaries allow to skip; without summaries, a run has no gaps ----

PYATTN_DEVICE bool seen_by_any(const Mask& mask, int r0, int rows, int n0, int keys) {
  return !mask.rows_of_any(n0, keys, {r0, r0 + rows}).empty();
}

// The first tile of keys from n0 on that some row of this block sees, or where the run ends.
template <int kRows, int kKeys>
PYATTN_DEVICE int skip_keys(const ForwardParams& p, const Run& run, int n0) {
  if (p.mask.blocks) {
    const RowBlock<kRows> same(p);
    while (n0 < run.end && !seen_by_any(Mask(p, same.head), same.first(), same.rows(), n0, kKeys)) n0 += kKeys;
  }
  return n0;
}

// The first tile of rows from r0 on that sees some key of this block, or where the run ends.
template <int kRows, int kKeys>
PYATTN_DEVICE int skip_rows(const ForwardParams& p, const Run& run, int r0) {
  if (p.mask.blocks) {
    const KeyBlock<kKeys> same(p);
    while (r0 < run.end && !seen_by_any(Mask(p, same.head), r0, min(kRows, run.end - r0), same.first(), kKeys))
      r0 += kRows;
  }
  return r0;
}

// Whether the rows from r0 on see all of this block's keys. Summaries tell it for a tile, not for the whole run.
template <int kRows, int kKeys>
PYATTN_DEVICE bool sees_all_keys(const ForwardParams& p, const Run& run, int r0) {
  if (!p.mask.blocks) return run.sees_all(r0, kRows);
  const KeyBlock<kKeys> same(p);
  return r0 + kRows <= same.head.count && Mask(p, same.head).sees_all(r0, kRows, same.first(), kKeys);
}

// ---- Sums ----

// A bit for each of a lane's sums, in their order.
template <int kM, int kN>
struct HiddenSums {
  static_assert(kM * kN * 4 <= 64);
  uint64_t bits = 0;

  PYATTN_DEVICE void set(int m, int n, int i, bool hidden) {
    bits |= static_cast<uint64_t>(hidden) << ((m * kN + n) * 4 + i);
  }
  PYATTN_DEVICE bool get(int m, int n, int i) const { return bits >> ((m * kN + n) * 4 + i) & 1; }
};

// The lane's sums that key ranges and filters hide. Loops stay rolled: the code of a filter is too long
// to repeat for every sum. A filter finds its row anew for every key, to save registers.
template <class S, Layout kLayout, int kM, int kN>
PYATTN_DEVICE HiddenSums<kM, kN> hidden_sums(const TileMask& mask, int first) {
  constexpr bool kQueries = kLayout == Layout::kQueriesByKeys;
  constexpr int kRowsOfLane = kQueries ? 2 * kM : 2 * kN, kKeysOfLane = kQueries ? 2 * kN : 2 * kM;
  HiddenSums<kM, kN> hidden;
  const auto row_at = [&](int at) {
    return kQueries ? first + 8 * at + lane() / 4 : at / 2 * 8 + lane() % 4 * 2 + at % 2;
  };
  const auto hide = [&](int at, auto hides) {
#pragma unroll 1
    for (int j = 0; j < kKeysOfLane; ++j) {
      const int key = kQueries ? 8 * (j / 2) + lane() % 4 * 2 + j % 2 : first + 8 * j + lane() / 4;
      if constexpr (kQueries)
        hidden.set(at / 2, j / 2, at % 2 * 2 + j % 2, hides(key));
      else
        hidden.set(j / 2, at / 2, j % 2 * 2 + at % 2, hides(key));
    }
  };
#pragma unroll 1
  for (int at = 0; at < kRowsOfLane; ++at) {
    const auto seen = mask.keys_of(row_at(at));
    const int64_t r = mask.row_of(row_at(at));
    const bool holes = mask.mask.has_holes(r), gaps = mask.mask.intervals() > 1;
    hide(at, [&](int key) {
      bool sees = seen.contains(key) && (!gaps || mask.mask.in_interval(r, mask.n0 + key));
      if (sees && holes) mask.mask.template each_filter<S>(r, [&](auto shown) { sees = sees && shown(mask.n0 + key); });
      return !sees;
    });
  }
  return hidden;
}

// Calls hide(m, n, i) for each of the lane's sums that the mask hides;
// the warp's sums begin at row, or key, `first` of the tile.
template <class S, Layout kLayout, int kM, int kN, class F>
PYATTN_DEVICE void each_hidden(const TileMask& mask, int first, F hide) {
  if (mask.mask.p.mask.blocks) {
    const auto hidden = hidden_sums<S, kLayout, kM, kN>(mask, first);
    each_sum<kM, kN>([&](int m, int n, int i, int, int) {
      if (hidden.get(m, n, i)) hide(m, n, i);
    });
  } else {
    each_query<kLayout, kM, kN>(first, [&](int, int row, auto each_key) {
      const auto seen = mask.keys_by_formula(row);
      each_key([&](int m, int n, int i, int key) {
        if (!seen.contains(key)) hide(m, n, i);
      });
    });
  }
}

// Flags of up to 32 keys.
struct KeyBits {
  unsigned bits;

  PYATTN_DEVICE bool operator[](int key) const { return bits >> key & 1; }
};

// After C[queries][columns] += W[queries][keys] tile, or C[keys][columns] += W[keys][queries]
// tile: the rows that clear_nonfinite cleared in the tile come back as NaN, in the rows of C
// that see a flagged key, or that a flagged query sees.
template <class S, Layout kLayout, int kM, int kN, class Flags>
PYATTN_DEVICE void poison(Sums<kM, kN>& C, Flags flags, int count, const TileMask& mask, int first) {
  constexpr bool kQueries = kLayout == Layout::kQueriesByKeys;
  unsigned poisoned = 0;  // a bit for each of the lane's rows of C
#pragma unroll 1
  for (int at = 0; at < 2 * kM; ++at) {
    const int place = first + 8 * at + lane() / 4;
#pragma unroll 1
    for (int f = 0; f < count; ++f)
      if (flags[f] && mask.template sees<S>(kQueries ? place : f, kQueries ? f : place)) poisoned |= 1u << at;
  }
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float more = poisoned >> (2 * m + half) & 1 ? __builtin_nanf("") : 0;
#pragma unroll
      for (int n = 0; n < kN; ++n) C[m][n][2 * half] += more, C[m][n][2 * half + 1] += more;
    }
}

}  // namespace
}  // namespace pyattn::cuda
