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
// Query rows of a work item: their Q and sums stay in L2 and L3, and K and V of a block are read once for them.
inline constexpr int64_t kBlockItemRows = 4096;
// The rows of an item that list a key on average are at least so many: the vector of a tile, and then few of its lanes
// are empty.
inline constexpr int64_t kRowsListing = 32;

// Queries of a work item.
inline int64_t block_item_queries(const ForwardParams& p) {
  return clamp(kBlockItemRows / max(1, group_size(p)), 1, max(1, p.seqlen_q));
}

// Whether work items go from block to block. Forward and backward agree, or few rows would have other scores in backward.
template <class S, class P>
bool uses_listed_blocks(const P& p) {
  if (!uses_segments<S>(p) || p.cpu.selected.block < kListedBlock || kTileRegisters<Operand<S>>) return false;
  const double each = p.cpu.pairs / static_cast<double>(p.batch * p.seqlen_q);  // keys that a query lists
  return each * static_cast<double>(block_item_queries(p) * group_size(p)) >=
         static_cast<double>(kRowsListing * p.cpu.selected.keys);
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
