// Splits of forward (split-K): where a KV head has few query rows, its keys are divided among work items. Where
// there are several, each stores a partial result in the workspace, and merge.h combines these.
#pragma once

#include "cpu/products/register_product.h"
#include "cpu/simd/simd.h"
#include "cpu/tiles/strips.h"
#include "shared/heads.h"

namespace pyattn::PYATTN_ISA {
namespace {

// Above 4 rows (bf16 on AVX2) to 11 rows (fp16 on AVX-512) the kernel with queries on the lanes is faster.
inline constexpr int64_t kDecodeRows = 8;

// The most rows of a head that decodes. A tile register holds 16, so with AMX a group of that many heads, which see the same
// keys, takes 0.6 to 0.8 of the time; rows of several queries would see different ones.
template <class S>
int64_t most_decode_rows(const ForwardParams& p) {
  return kTileRegisters<Operand<S>> && p.seqlen_q == 1 ? kRegisterTerms : kDecodeRows;
}

// Whether forward decodes a KV head with this many rows. Invariant rows have the same bits in blocks, which take over
// where tile registers multiply, in another order, and where keys are stored in 8 bits.
template <class S>
bool few_rows(const ForwardParams& p, int64_t rows) {
  const int64_t lanes = kLanes<Compute<S>>;
  const bool in_blocks = p.cpu.row_invariant && (kTileRegisters<Operand<S>> || p.cpu.bytes.type != ByteType::kNone);
  const bool int8 = p.cpu.bytes.type == ByteType::kInt8;  // loaded as pairs of columns, and of keys
  const int64_t least = lanes * (int8 ? kColumns<i8> : kColumns<S>), least_v = lanes * (int8 ? kColumns<i8> : 1);
  return rows > 0 && rows <= most_decode_rows<S>(p) && !in_blocks && !p.dropout.threshold && p.head_dim >= least &&
         p.head_dim_v >= least_v;
}

// Whether decoding multiplies that many rows by tile registers: 4 or more take 0.6 to 0.75 of the time over keys in a cache. Fewer
// rows wait for memory, and the hardware foresees the loads of vectors, not those of registers.
template <class S>
bool register_rows(int64_t rows) {
  return kTileRegisters<Operand<S>> && rows >= 4;
}

// Whether scores are sums over lanes of columns (dots.h), so backward repeats them by the same products.
template <class S>
bool dotted_rows(const ForwardParams& p, int64_t rows) {
  return few_rows<S>(p, rows) && !p.cpu.row_invariant && !register_rows<S>(rows);
}

// Whether one task decodes all KV heads of a range of keys together: the heads of a position are neighbours in memory,
// as in (batch, seqlen, heads, head_dim), where one head's rows alone are read at half the speed.
template <class S>
bool decodes_together(const ForwardParams& p) {
  return p.num_heads_kv > 1 && p.k.stride_h < p.k.stride_s && p.v.stride_h < p.v.stride_s && !is_selected(p) &&
         few_rows<S>(p, most_rows(p));
}

// Keys of a work item in decoding: merging costs a thousandth of
// reading them, and 16k keys of one head still feed 16 threads.
inline constexpr int64_t kDecodeSplit = 1024;

// Invariant rows: blocks of keys lie at multiples of kInvariantBlockK, those of forward_item.h, and the keys of a work item
// at multiples of kInvariantSplit. A block of rows that takes more keys joins the same ranges in the same order.
inline constexpr int64_t kInvariantBlockK = 96, kInvariantSplit = 10 * kInvariantBlockK;
static_assert(kInvariantSplit <= kDecodeSplit && kInvariantBlockK <= kTileKeys);

// Their keys in a turn of decoding (decode.h), two vectors of AVX-512. 96 took up to a fifth longer.
inline constexpr int64_t kInvariantTurn = 32;

inline int64_t split_size(const ForwardParams& p) { return p.cpu.row_invariant ? kInvariantSplit : kDecodeSplit; }

// With selected keys, from this many queries on there are items enough, and partial results would take more memory than
// out: then no keys are divided but those of few rows.
inline constexpr int64_t kManyQueries = 64;

// Whether forward divides the keys of a KV head with this many rows among work items: a head that decodes, and one whose
// rows fill at most one block, which would be a single item however many keys it has.
template <class S>
bool splits_keys(const ForwardParams& p, int64_t rows, int64_t seqlen_k) {
  const bool one_block = rows > 0 && rows <= kBlockQ<Compute<S>> && p.head_dim_v >= kLanes<Compute<S>>;
  return few_rows<S>(p, rows) || (one_block && seqlen_k > split_size(p) && sequences_each(p) < kManyQueries);
}

// Queries list each key this many times on average, or its row is not in L2 when the next query reads it. Decoding, which
// prefetches, is faster then.
inline constexpr int64_t kListedTimes = 4;

// Whether the rows of a query lie on the lanes: one block of them at most, each of which fills a vector of columns.
template <class S>
bool lane_rows(const ForwardParams& p, int64_t rows) {
  constexpr int64_t kLeast = kLanes<Compute<S>>;
  return !few_rows<S>(p, rows) && rows > 0 && rows <= kBlockQ<Compute<S>> && !kTileRegisters<Operand<S>> &&
         !p.dropout.threshold && p.head_dim >= kLeast && p.head_dim_v >= kLeast;
}

// Whether queries run through segments: many queries of few rows or of a block, each of which sees one range of its list,
// without a mask tensor or a bias.
template <class S, class P>
bool uses_segments(const P& p) {
  const SelectedParams& s = p.cpu.selected;
  const int64_t rows = most_rows(p);
  return is_selected(p) && p.seqlen_q >= kManyQueries && !p.cpu.row_invariant &&
         (few_rows<S>(p, rows) || lane_rows<S>(p, rows)) && is_plain(p) && p.mask.num_ranges == 1 &&
         !p.mask.shown.data && s.keys <= INT32_MAX &&
         p.cpu.pairs >= static_cast<double>(kListedTimes * p.batch * s.keys);
}

// How many ranges the keys of a KV head are divided into.
inline int64_t decode_splits(const ForwardParams& p, int64_t seqlen_k) {
  return max(1, ceil_div(seqlen_k, split_size(p)));
}

// The keys of a work item, one of a head's ranges.
inline Range split_keys(const ForwardParams& p, const Head& head, int64_t split) {
  return {split * split_size(p), min((split + 1) * split_size(p), head.seqlen_k)};
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
