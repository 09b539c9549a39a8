// The mask of single query rows: every row of a KV head sees one interval of keys, or with key
// ranges up to kMostRanges, apart from holes. Filters make the holes: a bool mask, and a bias
// where it is -inf. Only this file and mask.h compare a key's index with a query's. Of the kernels, only
// these two and the passes that scan the filters (mask_rows.h) read their elements. Every backend shares
// this file; everything is constexpr, so device code may call it.
#pragma once

#include "shared/bias.h"

namespace pyattn::PYATTN_ISA {
namespace {

// Sums that saturate at the ends of int64; b is not negative.
constexpr int64_t add_saturated(int64_t a, int64_t b) { return a > INT64_MAX - b ? INT64_MAX : a + b; }
constexpr int64_t subtract_saturated(int64_t a, int64_t b) { return a < INT64_MIN + b ? INT64_MIN : a - b; }

// Calls f(view, rows) for each filter; rows holds the keys that the filter leaves each row of its shape.
template <class P, class F>
constexpr void each_mask_tensor(P& p, F f) {
  if (p.mask.shown.data) f(p.mask.shown, p.mask.mask_rows);
  if (has_bias(p.score)) f(p.score.bias, p.mask.bias_rows);
}

// The mask of the rows of one head, one at a time.
struct RowMask {
  const ForwardParams& p;
  Head head;
  Range diagonals;  // by formula, query i sees keys [i + begin, i + end), clipped to [0, seqlen_k)

  // Both ends are clamped to [-seqlen_q, seqlen_k]: beyond these they change nothing.
  // An end without a bound lies before the first key, or after the last one.
  constexpr RowMask(const ForwardParams& p, const Head& head) : p(p), head(head), diagonals{} {
    const int64_t offset = p.mask.q_offsets ? p.mask.q_offsets[head.b] : p.mask.q_offset;
    const int64_t left = p.mask.window_left, right = p.mask.causal ? 0 : p.mask.window_right;
    const auto bound = [&](int64_t end) { return clamp(end, -head.seqlen_q, head.seqlen_k); };
    diagonals.begin = left < 0 ? -head.seqlen_q : bound(subtract_saturated(offset, left));
    diagonals.end = 1 + (right < 0 ? head.seqlen_k : bound(add_saturated(offset, right)));
  }

  // The keys that query i sees if there are neither key ranges nor filters.
  constexpr Range by_formula(int64_t i) const {
    return {clamp(i + diagonals.begin, 0, head.seqlen_k), clamp(i + diagonals.end, 0, head.seqlen_k)};
  }

  // How many intervals a row has.
  constexpr int64_t intervals() const { return p.mask.num_ranges; }

  // The keys that a row sees in its interval n; with holes, from the first to the last one that it may see.
  constexpr Range keys_of(int64_t r, int64_t n) const {
    Range keys = unfiltered(head.query(r), n);
    each_row(r, [&](const auto&, const RowKeys& row) { keys = keys.in({row.begin, row.end}); });
    return keys;
  }

  // The same in all its intervals, from the first to the last key.
  constexpr Range keys_of(int64_t r) const {
    return hull(intervals(), [&](int64_t n) { return keys_of(r, n); });
  }

  // The keys that query i sees in its intervals if there are no filters, from the first to the last.
  constexpr Range unfiltered(int64_t i) const {
    return hull(intervals(), [&](int64_t n) { return unfiltered(i, n); });
  }

  // keys_of without masked keys at its ends: another mask may cut a row at one of its holes.
  template <class S>
  constexpr Range exact_keys_of(int64_t r, int64_t n) const {
    Range keys = keys_of(r, n);
    if (cut_among_holes(r, keys)) {
      while (!keys.empty() && !passes<S>(r, keys.begin)) ++keys.begin;
      while (!keys.empty() && !passes<S>(r, keys.end - 1)) --keys.end;
    }
    return keys;
  }

  template <class S>
  constexpr Range exact_keys_of(int64_t r) const {
    return hull(intervals(), [&](int64_t n) { return exact_keys_of<S>(r, n); });
  }

  // Whether a key that the formulas and the ends of the row's filters show lies in one of its intervals.
  constexpr bool in_interval(int64_t r, int64_t key) const {
    const int64_t* range = ranges_of(head.query(r));
    bool in = false;
    PYATTN_ROLLED
    for (int64_t n = 0; n < intervals(); ++n, range += 2) in = in || (range[0] <= key && key < range[1]);
    return in;
  }

  template <class S>
  constexpr bool sees_any(int64_t r) const {
    const int64_t i = head.query(r);
    if (i + diagonals.end <= 0 || max(0, i + diagonals.begin) >= head.seqlen_k) return false;
    return !p.mask.blocks || !exact_keys_of<S>(r).empty();
  }

  // Whether some key in an interval of the row may be masked.
  constexpr bool has_holes(int64_t r) const {
    bool any = false;
    each_row(r, [&](const auto&, const RowKeys& row) { any = any || row.holes; });
    return any;
  }

  // Calls f(shown) for each filter that makes holes in a row;
  // shown(j) says whether it leaves key j of keys_of visible.
  template <class S, class F>
  constexpr void each_filter(int64_t r, F f) const {
    each_row(r, [&](const auto& view, const RowKeys& row) {
      if (row.holes) with_keys_of_row<S>(view, head, r, f);
    });
  }

  template <class S>
  constexpr bool sees(int64_t r, int64_t key) const {
    return keys_of(r).contains(key) && (intervals() == 1 || in_interval(r, key)) && passes<S>(r, key);
  }

 protected:
  // The smallest range that holds of(n) for every n below count.
  template <class F>
  static constexpr Range hull(int64_t count, F of) {
    Range all = of(0);
    PYATTN_ROLLED
    for (int64_t n = 1; n < count; ++n) {
      const Range keys = of(n);
      if (keys.empty()) continue;
      all = all.empty() ? keys : Range{min(all.begin, keys.begin), max(all.end, keys.end)};
    }
    return all;
  }

 private:
  // The keys that query i sees in its interval n if there are no filters.
  constexpr Range unfiltered(int64_t i, int64_t n) const {
    const Range keys = by_formula(i);
    if (!p.mask.key_ranges) return keys;
    const int64_t* range = ranges_of(i) + 2 * n;
    return keys.in({range[0], range[1]});
  }

  // Whether these ends of keys_of may be holes of a filter: the first and the last key that it leaves a row are not.
  constexpr bool cut_among_holes(int64_t r, Range keys) const {
    bool cut = false;
    each_row(r, [&](const auto&, const RowKeys& row) {
      cut = cut || (row.holes && (row.begin != keys.begin || row.end != keys.end));
    });
    return cut;
  }

  // The key ranges of query i, one after the other.
  constexpr const int64_t* ranges_of(int64_t i) const {
    const int64_t of_head = is_selected(p) ? head.h_kv * p.cpu.selected.ranges_stride_h : 0;
    return p.mask.key_ranges + head.b * p.mask.key_ranges_stride_b + of_head + 2 * (head.first_q + i) * intervals();
  }

  // Whether all filters leave the key visible.
  template <class S>
  constexpr bool passes(int64_t r, int64_t key) const {
    bool all = true;
    each_filter<S>(r, [&](auto shown) { all = all && shown(key); });
    return all;
  }

  // Calls f(view, keys) for each filter, with the keys that it leaves row r.
  template <class F>
  constexpr void each_row(int64_t r, F f) const {
    each_mask_tensor(p, [&](const auto& view, const RowKeys* rows) {
      if (rows) f(view, rows[OwnRows(p, view).index(head, r)]);
    });
  }
};

// The keys at which a filter's own row is scanned: from the first to the last one that a query of
// this row sees without filters. A mask beside a window is then scanned in linear time.
constexpr Range keys_to_scan(const ForwardParams& p, const OwnRows& own, int64_t row) {
  if (own.queries < p.seqlen_q || (is_selected(p) && p.cpu.selected.ranges_stride_h)) return {0, p.seqlen_k};
  const int64_t b = row / own.queries / own.heads, i = row % own.queries;
  Range keys{0, 0};
  for (int64_t other = own.batch > 1 ? b : 0; other < (own.batch > 1 ? b + 1 : p.batch); ++other) {
    const int64_t first = other * p.num_heads_kv * sequences_each(p);
    const Range seen =
        is_selected(p) ? RowMask(p, Head(p, first + i)).unfiltered(0) : RowMask(p, Head(p, first)).unfiltered(i);
    if (seen.empty()) continue;
    keys = keys.empty() ? seen : Range{min(keys.begin, seen.begin), max(keys.end, seen.end)};
  }
  return keys;
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
