// The mask: every query row of a KV head sees an interval of keys. No other file compares
// a key's index with a query's. The same file serves every backend; everything is
// constexpr, so that device code may call it.
//
//   causal, q_offset 1    key  0 1 2 3 4
//                       row 0  1 1 0 0 0    of rows 0 to 2: keys_of_any [0, 4), keys_of_all [0, 2)
//                       row 1  1 1 1 0 0    of keys 2 and 3: rows_of_any [1, 3), rows_of_all [2, 3)
//                       row 2  1 1 1 1 0    cover of rows 0 to 2: keys 0 and 1 kFull, 2 and 3 kPart, 4 kNone
#pragma once

#include <cstdint>

#include "attention.h"
#include "heads.h"

namespace pyattn::PYATTN_ISA {
namespace {

// The indices [begin, end); none where end <= begin.
struct Range {
  int64_t begin, end;

  constexpr bool empty() const { return end <= begin; }
  constexpr int64_t count() const { return max(0, end - begin); }
  constexpr bool contains(int64_t i) const { return begin <= i && i < end; }

  // The part that lies in [first, first + n), counted from first.
  constexpr Range within(int64_t first, int64_t n) const {
    const int64_t from = clamp(begin - first, 0, n);
    return {from, clamp(end - first, from, n)};
  }
};

// How much of a tile is seen: nothing, some pairs, or every pair.
enum class Cover { kNone, kPart, kFull };

// The mask of one head. From one row to the next neither end of its interval decreases, so that
// first and last row answer for a block of rows; a block has at least one row, or key.
struct Mask {
  // Whether an interval may begin after key 0. No mask does yet; where
  // this is false, kernels ask for ends alone.
  static constexpr bool kBegins = false;

  Head head;
  int64_t diagonal;  // row r sees the keys [0, query(r) + diagonal), as far as there are any

  // The end is saturated and not q_offset: beyond [-seqlen_q, seqlen_k] it does not change. Without
  // a causal mask, the diagonal lies behind the last key.
  constexpr Mask(const ForwardParams& p, const Head& head)
      : head(head),
        diagonal(1 + (p.mask.causal ? clamp(p.mask.q_offsets ? p.mask.q_offsets[head.b] : p.mask.q_offset,
                                            -head.seqlen_q, head.seqlen_k)
                                    : head.seqlen_k)) {}

  constexpr Range keys_of(int64_t r) const { return {0, clamp(head.query(r) + diagonal, 0, head.seqlen_k)}; }

  // The keys from the first to the last one that some row of [r0, r0 + rows) sees.
  constexpr Range keys_of_any(int64_t r0, int64_t rows) const {
    return {keys_of(r0).begin, keys_of(r0 + rows - 1).end};
  }

  // The keys that every row of [r0, r0 + rows) sees.
  constexpr Range keys_of_all(int64_t r0, int64_t rows) const {
    return {keys_of(r0 + rows - 1).begin, keys_of(r0).end};
  }

  // The rows from the first to the last one that sees some key of [n0, n0 + keys).
  constexpr Range rows_of_any(int64_t n0, int64_t /*keys*/) const { return {first_row(n0), head.count}; }

  // The rows that see every key of [n0, n0 + keys).
  constexpr Range rows_of_all(int64_t n0, int64_t keys) const {
    return {n0 + keys <= head.seqlen_k ? first_row(n0 + keys - 1) : head.count, head.count};
  }

  constexpr Cover cover(int64_t r0, int64_t rows, int64_t n0, int64_t keys) const {
    const Range all = keys_of_all(r0, rows), any = keys_of_any(r0, rows);
    if (all.begin <= n0 && n0 + keys <= all.end) return Cover::kFull;
    return any.begin < n0 + keys && n0 < any.end ? Cover::kPart : Cover::kNone;
  }

  constexpr bool sees(int64_t r, int64_t key) const { return keys_of(r).contains(key); }

 private:
  // The first row that sees the key; count if none does.
  constexpr int64_t first_row(int64_t key) const { return clamp(key + 1 - diagonal, 0, head.seqlen_q) * head.group; }
};

}  // namespace
}  // namespace pyattn::PYATTN_ISA
