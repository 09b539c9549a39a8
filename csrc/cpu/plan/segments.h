// Segments: with selected keys, each row of K and V is read by many queries, and each query has few rows. A work item
// takes some queries of a KV head through its keys segment by segment, so that the rows of a segment stay in L2 meanwhile.
// Lists are sorted, so a query reads its list in order.
#pragma once

#include "cpu/simd/simd.h"
#include "shared/heads.h"

namespace pyattn::PYATTN_ISA {
namespace {

// Rows of K and V in a segment, in backward of dK and dV too: half of an L2 of 1 MB.
inline constexpr int64_t kSegmentBytes = 512 * 1024;
// A query has at least this many listed keys in a segment on average: with 32, visits took a fifth of forward.
// In backward, whose pairs cost more, a smaller segment gains more than visits cost.
inline constexpr int64_t kForwardVisit = 64, kBackwardVisit = 32;
// Queries whose rows lie on the lanes are packed again for each visit.
inline constexpr int64_t kLaneVisit = 128;
// Query rows of a work item: their sums stay in L2 beside a segment. Those of rows on the lanes may wait in L3, because a
// visit reads and writes few of them for its many keys; but a segment is read from there once for each item.
inline constexpr int64_t kListedRows = 256, kLaneRows = 2048;
// Items have more than kListedRows only where there are at least this many of them.
inline constexpr int64_t kListedItems = 32;

// The segments of a head's keys, and the work items of forward.
struct Segments {
  int64_t count, entries;  // entries of a list name blocks of keys; a segment is `entries` of them
  int64_t queries, items;  // of an item, of a KV head

  // element: bytes of an element of K, or of K and dK. visit: the least number of keys of a query in a segment. rows: the
  // query rows of an item, if there are items enough.
  static Segments of(const ForwardParams& p, int64_t element, int64_t visit, int64_t rows) {
    const SelectedParams& s = p.cpu.selected;
    const int64_t row = (p.head_dim + p.head_dim_v) * element;
    const auto listed = static_cast<int64_t>(p.cpu.pairs / static_cast<double>(p.batch * p.seqlen_q));
    const int64_t fitting = ceil_div(s.keys * row, kSegmentBytes), most = max(1, listed / visit);
    const int64_t entries = max(1, ceil_div(ceil_div(s.keys, s.block), min(fitting, most)));
    const int64_t group = max(1, group_size(p)), all = p.batch * p.num_heads_kv * p.seqlen_q;
    const int64_t queries = max(1, clamp(ceil_div(all, kListedItems), kListedRows / group, rows / group));
    return {ceil_div(ceil_div(s.keys, s.block), entries), entries, queries, ceil_div(p.seqlen_q, queries)};
  }
};

}  // namespace
}  // namespace pyattn::PYATTN_ISA
