// The passes that find the visible keys of rows and of blocks of rows
// where no formula gives them. They run before forward and again before
// backward, so nothing is saved. library/passes.cpp keeps their results.
#pragma once

#include <type_traits>

#include "cpu/plan/units.h"
#include "cpu/plan/work.h"
#include "shared/mask.h"

namespace pyattn::PYATTN_ISA {
namespace {

// Rows, and blocks of rows, of a work item: scanning a row takes about as long as starting an item.
inline constexpr int64_t kScannedRows = 16, kSummaries = 64;

// Whether shown(i) is `value` for every key of the run that begins at j; the loop vectorises.
template <class Run, class Shown>
bool all_are(bool value, int64_t j, Run run, Shown shown) {
  uint8_t other = 0;
  for (int64_t i = j; i < j + run; ++i) other |= shown(i) != value;
  return !other;
}

// Reduces shown(j) over a range of keys to a RowKeys: searches from both ends for a
// visible key, then from the first one for a hole, in runs that get shorter.
template <class Shown>
RowKeys scan_row(Range keys, Shown shown) {
  const auto in_runs = [](auto search) {
    search(std::integral_constant<int64_t, 512>{});
    search(std::integral_constant<int64_t, 64>{});
    search(std::integral_constant<int64_t, 8>{});
    search(std::integral_constant<int64_t, 1>{});
  };
  int64_t begin = keys.begin, end = keys.end;
  in_runs([&](auto run) {
    while (end - begin >= run && all_are(false, begin, run, shown)) begin += run;
  });
  if (begin == end) return {0, 0, false};
  in_runs([&](auto run) {
    while (end - begin >= run && all_are(false, end - run, run, shown)) end -= run;
  });
  int64_t seen = begin;  // every key from the first one to here is visible
  in_runs([&](auto run) {
    while (end - seen >= run && all_are(true, seen, run, shown)) seen += run;
  });
  return {begin, end, seen < end};
}

inline Plan plan_rows(const ForwardParams& p, const BroadcastView& view) {
  const int64_t rows = OwnRows(p, view).count();
  return {ceil_div(rows, kScannedRows), 0, rows * static_cast<int64_t>(sizeof(RowKeys))};
}

// Writes the first and the last visible key of each row of a view's own shape, among keys_to_scan; all
// keys if it masks none of these. A work item is kScannedRows rows.
template <class S, class V>
void scan_rows(const ForwardParams& p, const V& view, RowKeys* rows, int64_t begin, int64_t end) {
  const OwnRows own(p, view);
  for (int64_t row = begin * kScannedRows; row < min(end * kScannedRows, own.count()); ++row)
    with_elements<S>(view, [&](const auto* elements) {
      with_keys(view, elements + own.offset(view, row), [&](auto shown) {
        const Range scanned = keys_to_scan(p, own, row);
        const RowKeys left = scan_row(scanned, shown);
        const bool whole = !left.holes && Range{left.begin, left.end}.count() == scanned.count();
        rows[row] = whole ? RowKeys{0, p.seqlen_k, false} : left;
      });
    });
}

inline Plan plan_mask_rows(const ForwardParams& p) { return p.mask.shown.data ? plan_rows(p, p.mask.shown) : Plan{}; }

// Writes params.mask.mask_rows.
template <class S>
void mask_rows(const ForwardParams& p, int64_t begin, int64_t end, void*) {
  scan_rows<S>(p, p.mask.shown, p.mask.mask_rows, begin, end);
}

inline Plan plan_bias_rows(const ForwardParams& p) {
  return has_bias(p.score) && !p.cpu.selected.bias_masks_none ? plan_rows(p, p.score.bias) : Plan{};
}

// Writes params.mask.bias_rows.
template <class S>
void bias_rows(const ForwardParams& p, int64_t begin, int64_t end, void*) {
  scan_rows<S>(p, p.score.bias, p.mask.bias_rows, begin, end);
}

template <class S>
Plan plan_mask_blocks(const ForwardParams& p) {
  if (!p.mask.key_ranges && !p.mask.mask_rows && !p.mask.bias_rows) return {};  // formulas tell all
  const int64_t blocks = work_of<S>(p, Unit::kSummaries).count();
  return {ceil_div(blocks, kSummaries), 0, Mask::count_summaries(p) * static_cast<int64_t>(sizeof(BlockKeys))};
}

// Writes params.mask.blocks. A work item is kSummaries blocks of rows.
template <class S>
void mask_blocks(const ForwardParams& p, int64_t begin, int64_t end, void*) {
  const Work work = work_of<S>(p, Unit::kSummaries);
  for (int64_t i = begin * kSummaries; i < min(end * kSummaries, work.count()); ++i) {
    const Place place = work.at(i);
    const Mask mask(p, Head(p, place.head));
    const int64_t r0 = place.n * kBlockRows;
    mask.summarize<S>(r0, min(kBlockRows, mask.head.count - r0));
  }
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
