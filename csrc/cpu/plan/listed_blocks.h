// Listed blocks: with selected blocks of keys, many queries list the same block. A work item turns the lists of some queries
// of a KV head around and goes from block to block, so the rows of all queries that list one share tiles, as in a dense
// call. A query's sums are added to tile by tile.
#pragma once

#include "cpu/plan/forward_splits.h"
#include "cpu/simd/simd.h"
#include "cpu/tiles/strips.h"
#include "shared/heads.h"

namespace pyattn::PYATTN_ISA {
namespace {

// Keys of a block at least: products of fewer keys spend their time on loading and storing sums.
inline constexpr int64_t kListedBlock = 32;
// Query rows whose lists an item turns around at once: their Q and sums stay in L2 and L3, and K and V of a block are read
// once for them.
inline constexpr int64_t kBlockListRows = 4096;
// Forward has this many items, if each of them then has at least this many rows.
inline constexpr int64_t kBlockItems = 16, kBlockItemRows = 1024;
// At least this many rows of an item list a key on average, a vector: fewer leave lanes of a tile empty.
inline constexpr int64_t kRowsListing = 16;

// Queries whose lists are turned at once, in an item of forward, or of backward, whose items SelectedSums numbers.
inline int64_t forward_block_queries(const ForwardParams& p) {
  const int64_t group = max(1, group_size(p)), all = p.batch * p.num_heads_kv * p.seqlen_q;
  const int64_t queries = clamp(ceil_div(all, kBlockItems), kBlockItemRows / group, kBlockListRows / group);
  return clamp(queries, 1, max(1, p.seqlen_q));
}
inline int64_t backward_block_queries(const ForwardParams& p) {
  return clamp(kBlockListRows / max(1, group_size(p)), 1, max(1, p.seqlen_q));
}

// Whether work items go from block to block. Forward and backward agree, or few rows would have other scores in backward.
template <class S, class P>
bool uses_listed_blocks(const P& p) {
  const bool shared = 2 * group_size(p) <= kBlockQ<Compute<S>>;  // a tile holds several queries
  if (!uses_segments<S>(p) || !shared || p.cpu.selected.block < kListedBlock || kTileRegisters<Operand<S>>)
    return false;
  const double each = p.cpu.pairs / static_cast<double>(p.batch * p.seqlen_q);  // keys that a query lists
  return each * static_cast<double>(forward_block_queries(p) * group_size(p)) >=
         static_cast<double>(kRowsListing * p.cpu.selected.keys);
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
