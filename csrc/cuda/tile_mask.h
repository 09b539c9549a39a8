// The mask on tiles: which tiles a block of threads runs
// over, and which sums of a tile the mask hides.
#pragma once

#include "attention.h"
#include "block.h"
#include "dropout.h"
#include "heads.h"
#include "mask.h"
#include "primitives.h"
#include "product.h"

namespace pyattn::cuda {
namespace {

// What a block of threads runs over, tile by tile: the keys
// of a block of rows, or the rows of a block of keys.
struct Run {
  int begin, end;
  int all_begin, all_end;  // seen by every row, or seeing every key, of the block

  PYATTN_DEVICE Run(Range any, Range all)
      : begin(static_cast<int>(any.begin)),
        end(static_cast<int>(any.end)),
        all_begin(static_cast<int>(all.begin)),
        all_end(static_cast<int>(all.end)) {}

  PYATTN_DEVICE bool empty() const { return begin >= end; }
  PYATTN_DEVICE Cover cover(int at, int count) const {
    return all_begin <= at && at + count <= all_end ? Cover::kFull : Cover::kPart;
  }
};

// The keys of the rows [r0, r0 + rows), from a multiple of what dropout draws for at once.
PYATTN_DEVICE Run keys_of_rows(const Mask& mask, int r0, int rows) {
  const Range any = mask.keys_of_any(r0, rows);
  return {{round_down(any.begin, kDrawKeys), any.end}, mask.keys_of_all(r0, rows)};
}

// The rows of the keys [n0, n0 + keys).
PYATTN_DEVICE Run rows_of_keys(const Mask& mask, int n0, int keys) {
  return {mask.rows_of_any(n0, keys), mask.rows_of_all(n0, keys)};
}

// The mask on one tile, whose query rows begin at r0 and
// whose keys at n0: places are counted from there.
template <Layout kLayout>
struct TileMask {
  Mask mask;
  int r0, n0;
  int rows;  // of the head

  PYATTN_DEVICE TileMask(const Mask& mask, int r0, int n0, int rows) : mask(mask), r0(r0), n0(n0), rows(rows) {}

  struct Keys {
    int begin, end;

    PYATTN_DEVICE bool contains(int key) const { return begin <= key && key < end; }
  };

  // Rows past the head's last see nothing, if something is
  // summed over rows; else their results are not stored.
  PYATTN_DEVICE Keys keys_of(int row) const {
    if (kLayout == Layout::kKeysByQueries && r0 + row >= rows) return {0, 0};
    const Range keys = mask.keys_of(r0 + row);
    return {static_cast<int>(keys.begin) - n0, static_cast<int>(keys.end) - n0};
  }
};

// The mask of this block's rows on the keys from n0 on,
// computed again where it is needed: see RowBlock.
template <int kRows>
PYATTN_DEVICE TileMask<Layout::kQueriesByKeys> mask_of_rows(const ForwardParams& p, int n0) {
  const RowBlock<kRows> same(p);
  return {Mask(p, same.head), same.first(), n0, static_cast<int>(same.head.count)};
}

// The mask of the rows from r0 on, of so many of the head, on this block's keys, which begin at n0.
template <int kKeys>
PYATTN_DEVICE TileMask<Layout::kKeysByQueries> mask_of_keys(const ForwardParams& p, int r0, int n0, int rows) {
  return {Mask(p, KeyBlock<kKeys>(p).head), r0, n0, rows};
}

// hide(m, n, i) for each of the lane's sums that the mask hides;
// the warp's sums begin at row, or key, `first` of the tile.
template <int kM, int kN, Layout kLayout, class F>
PYATTN_DEVICE void each_hidden(const TileMask<kLayout>& mask, int first, F hide) {
  each_query<kLayout, kM, kN>(first, [&](int, int row, auto each_key) {
    const auto seen = mask.keys_of(row);
    each_key([&](int m, int n, int i, int key) {
      if (!seen.contains(key)) hide(m, n, i);
    });
  });
}

// C[queries][columns] += W[queries][keys] tile, or C[keys][columns] += W[keys][queries]
// tile: what clear_nonfinite took out of the tile is given back as NaN to those rows of C
// that see a flagged key, or that a flagged query sees.
template <Layout kLayout, int kM, int kN>
PYATTN_DEVICE void poison(Sums<kM, kN>& C, const char* flags, int count, const TileMask<kLayout>& mask, int first) {
  constexpr bool kQueries = kLayout == Layout::kQueriesByKeys;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int place = first + 16 * m + 8 * half + lane() / 4;
      float more = 0;
#pragma unroll 1
      for (int f = 0; f < count; ++f)
        if (flags[f] && mask.keys_of(kQueries ? place : f).contains(kQueries ? f : place)) more = __builtin_nanf("");
#pragma unroll
      for (int n = 0; n < kN; ++n) C[m][n][2 * half] += more, C[m][n][2 * half + 1] += more;
    }
}

}  // namespace
}  // namespace pyattn::cuda
