// The mask of blocks of query rows and of keys, beside that of single rows (row_mask.h): which
// part of a tile is visible. Every backend shares this file; everything is constexpr, so device
// code may call it.
//
//   causal, q_offset 1    key  0 1 2 3 4
//   window_left 1       row 0  1 1 0 0 0    rows 0 to 2: keys_of_any [0, 4), keys_of_all [2, 2)
//                       row 1  0 1 1 0 0    keys 2 and 3: rows_of_any [1, 3), rows_of_all [2, 3)
//                       row 2  0 0 1 1 0    rows 1 and 2: sees_all key 2 alone
#pragma once

#include "shared/row_mask.h"

namespace pyattn::PYATTN_ISA {
namespace {

// Rows of a BlockKeys: divides every backend's blocks of rows, and a warp's, evenly.
inline constexpr int64_t kBlockRows = 16;

// Whether formulas can't tell which keys a block of rows sees.
constexpr bool needs_blocks(const ForwardParams& p) {
  return p.mask.key_ranges || p.mask.shown.data || has_bias(p.score);
}

// How many summaries a block of rows has: on a GPU one for all intervals,
// because kernels that follow several would spill up to 2 KB of registers.
#ifdef PYATTN_PACKED
constexpr int64_t summaries_of(const ForwardParams&) { return 1; }
#else
constexpr int64_t summaries_of(const ForwardParams& p) { return p.mask.num_ranges; }
#endif

// The mask of one head. Neither end of a formula's interval decreases from one row to the
// next, so the first and the last row answer for a block of rows. Without a formula,
// summaries in params, one for each block and interval, answer for blocks that begin at a
// multiple of kBlockRows; the pass that writes them asks about single rows only. A block
// has at least one row, or one key.
struct Mask : RowMask {
  using RowMask::RowMask;

  // How many summaries a block of rows has.
  constexpr int64_t summaries() const { return summaries_of(p); }

  // Whether the summary of a row holds several intervals, some key between which the row does not see.
  constexpr bool has_gaps(int64_t r) const {
    if (intervals() == summaries()) return false;
    int64_t count = 0;
    for (int64_t n = 0; n < intervals(); ++n) count += keys_of(r, n).count();
    return count < keys_of(r).count();
  }

  // The keys from the first to the last one that some row of [r0, r0 + rows) sees in its interval n.
  constexpr Range keys_of_any(int64_t r0, int64_t rows, int64_t n) const {
    if (!p.mask.blocks) return {by_formula(head.query(r0)).begin, by_formula(head.query(r0 + rows - 1)).end};
    Range any{head.seqlen_k, 0};
    each_block({r0, r0 + rows}, n, [&](int64_t, const BlockKeys& block) {
      any = {min(any.begin, block.first_begin), max(any.end, block.last_end)};
    });
    return any;
  }

  // The same in all intervals.
  constexpr Range keys_of_any(int64_t r0, int64_t rows) const {
    return hull(summaries(), [&](int64_t n) { return keys_of_any(r0, rows, n); });
  }

  // The keys that every row of [r0, r0 + rows) sees in its interval n, apart from holes.
  constexpr Range keys_of_all(int64_t r0, int64_t rows, int64_t n) const {
    if (!p.mask.blocks) return {by_formula(head.query(r0 + rows - 1)).begin, by_formula(head.query(r0)).end};
    Range all{0, head.seqlen_k};
    each_block({r0, r0 + rows}, n, [&](int64_t, const BlockKeys& block) {
      all = {max(all.begin, block.last_begin), min(all.end, block.first_end)};
    });
    return all;
  }

  // The first key after n0 at which the keys that every row sees in an interval begin; seqlen_k if there is none.
  constexpr int64_t next_of_all(int64_t r0, int64_t rows, int64_t n0) const {
    int64_t next = head.seqlen_k;
    for (int64_t n = 0; n < summaries(); ++n) {
      const Range all = keys_of_all(r0, rows, n);
      if (n0 < all.begin) next = min(next, all.begin);
    }
    return next;
  }

  // Whether every row sees all these keys, apart from holes, in one of its intervals.
  constexpr bool in_all(int64_t r0, int64_t rows, int64_t n0, int64_t keys) const {
    bool in = false;
    for (int64_t n = 0; n < summaries(); ++n) {
      const Range all = keys_of_all(r0, rows, n);
      in = in || (all.begin <= n0 && n0 + keys <= all.end);
    }
    return in;
  }

  // Whether some row may see one of these keys; rows that see none may lie between intervals.
  constexpr bool in_any(int64_t r0, int64_t rows, int64_t n0, int64_t keys) const {
    return !rows_of_any(n0, keys, {r0, r0 + rows}).empty();
  }

  // Whether some row of [r0, r0 + rows) has holes.
  constexpr bool any_holes(int64_t r0, int64_t rows) const {
    bool any = false;
    if (p.mask.blocks)
      each_summary({r0, r0 + rows}, [&](int64_t, const BlockKeys& block) { any = any || block.holes; });
    return any;
  }

  // The rows in `within`, from the first to the last one that sees some
  // key of [n0, n0 + keys); summaries answer in whole blocks of rows.
  constexpr Range rows_of_any(int64_t n0, int64_t keys, Range within) const {
    if (!p.mask.blocks) return within.in({rows_of(n0).begin, rows_of(min(n0 + keys, head.seqlen_k) - 1).end});
    Range rows{within.end, within.begin};
    each_summary(within, [&](int64_t r0, const BlockKeys& block) {
      if (block.first_begin < n0 + keys && n0 < block.last_end)
        rows = {min(rows.begin, r0), max(rows.end, min(r0 + kBlockRows, within.end))};
    });
    return rows;
  }

  constexpr Range rows_of_any(int64_t n0, int64_t keys) const { return rows_of_any(n0, keys, {0, head.count}); }

  // The rows that see a key by formula, as if there were queries without end in
  // both directions: the rows of the next key begin and end one group later.
  constexpr Range rows_of(int64_t key) const {
    return {(key + 1 - diagonals.end) * head.group, (key + 1 - diagonals.begin) * head.group};
  }

  // The rows that see every key of [n0, n0 + keys) by formula; with summaries, an empty range.
  constexpr Range rows_of_all(int64_t n0, int64_t keys) const {
    if (p.mask.blocks || n0 + keys > head.seqlen_k) return {head.count, head.count};
    return Range{0, head.count}.in({rows_of(n0 + keys - 1).begin, rows_of(n0).end});
  }

  // Whether every row of [r0, r0 + rows) sees every key of [n0, n0 + keys). Summaries may answer false where it does.
  constexpr bool sees_all(int64_t r0, int64_t rows, int64_t n0, int64_t keys) const {
    return in_all(r0, rows, n0, keys) && !any_holes(r0, rows);
  }

  // Writes the summaries of rows [r0, r0 + rows), at most kBlockRows, one for each interval.
  template <class S>
  constexpr void summarize(int64_t r0, int64_t rows) const {
    BlockKeys* blocks = p.mask.blocks + (first_block() + r0 / kBlockRows) * summaries();
    for (int64_t n = 0; n < summaries(); ++n) blocks[n] = summary_of<S>(r0, rows, n);
  }

  // The summary of interval n. A row that sees no key of it adds nothing to
  // the keys that any row sees, and leaves no key that all rows see.
  template <class S>
  constexpr BlockKeys summary_of(int64_t r0, int64_t rows, int64_t n) const {
    BlockKeys block{head.seqlen_k, 0, head.seqlen_k, 0, false};
    for (int64_t r = r0; r < r0 + rows; ++r) {
      const Range keys = summaries() == 1 ? exact_keys_of<S>(r) : exact_keys_of<S>(r, n);
      block.holes = block.holes || ((has_holes(r) || has_gaps(r)) && !keys_of(r).empty());
      block.last_begin = max(block.last_begin, keys.empty() ? head.seqlen_k : keys.begin);
      block.first_end = min(block.first_end, keys.empty() ? 0 : keys.end);
      if (keys.empty()) continue;
      block.first_begin = min(block.first_begin, keys.begin);
      block.last_end = max(block.last_end, keys.end);
    }
    return block;
  }

  // By summaries: how many pairs have a key before the given one, counting for each
  // block all its rows and, of each interval, the keys from the first to the last that one of them sees.
  constexpr int64_t pairs_before(int64_t key) const {
    int64_t pairs = 0;
    each_summary({0, head.count}, [&](int64_t r0, const BlockKeys& block) {
      pairs += max(0, min(block.last_end, key) - block.first_begin) * min(kBlockRows, head.count - r0);
    });
    return pairs;
  }

  static constexpr int64_t blocks_of(const Head& head) { return ceil_div(head.count, kBlockRows); }

  // The index of the head's first block. Packed sequences leave
  // room for one partial block in every sequence before.
  constexpr int64_t first_block() const {
    if (!is_packed(p)) return head.number(p) * blocks_of(head);
    return head.h_kv * packed_blocks(p) + first_block_of(head.first_q, head.group, head.b);
  }
  static constexpr int64_t first_block_of(int64_t first_q, int64_t group, int64_t b) {
    return first_q * group / kBlockRows + b;
  }

  // The number of blocks of a KV head of packed sequences, and of all heads.
  static constexpr int64_t packed_blocks(const ForwardParams& p) {
    return first_block_of(p.packed.total_q, group_size(p), p.batch);
  }
  static constexpr int64_t count_blocks(const ForwardParams& p) {
    return is_packed(p) ? p.num_heads_kv * packed_blocks(p) : count_heads(p) * ceil_div(most_rows(p), kBlockRows);
  }
  static constexpr int64_t count_summaries(const ForwardParams& p) { return count_blocks(p) * summaries_of(p); }

 private:
  // Calls f(first row, summary of interval n) for each block that has some of these rows.
  template <class F>
  constexpr void each_block(Range rows, int64_t n, F f) const {
    const BlockKeys* blocks = p.mask.blocks + first_block() * summaries() + n;
    for (int64_t r0 = round_down(rows.begin, kBlockRows); r0 < rows.end; r0 += kBlockRows)
      f(r0, blocks[r0 / kBlockRows * summaries()]);
  }

  // The same for every interval.
  template <class F>
  constexpr void each_summary(Range rows, F f) const {
    for (int64_t n = 0; n < summaries(); ++n) each_block(rows, n, f);
  }
};

}  // namespace
}  // namespace pyattn::PYATTN_ISA
