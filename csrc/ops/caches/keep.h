// keep: of the newest positions of a cache, only some stay, such as the accepted branch of a drafted tree.
//
//     indices (B, n)    the positions that stay, increasing; -1 after the last one of a sequence with fewer
//     base (B)          positions below base[b] stay as well; by default, all below the sequence's first index
//
// The rows at these positions are copied, each sequence is truncated to its base, and the copies are appended. So
// shared pages are copied before they change, and the result has the bits of a cache that got nothing else.
#pragma once

#include <ATen/ops/cat.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include "ops/caches/cache.h"
#include "ops/pages.h"

namespace pyattn {

// The lengths after the truncation, the positions to append, clamped to those that exist, and the number of them.
struct Chosen {
  Tensor base, positions, counts;

  // starts is a ring buffer's. A sequence's list ends before its first index that is out of order or out of range.
  Chosen(const Tensor& lengths, const optional<Tensor>& starts, const Tensor& indices, const optional<Tensor>& given)
      : counts(at::zeros_like(lengths)) {
    const Tensor least = starts ? at::minimum(*starts, lengths) : at::zeros_like(lengths);
    base = given ? at::minimum(at::maximum(*given, least), lengths) : lengths.clone();
    if (indices.size(1) == 0) return;
    const Tensor before = (given ? base : least).sub(1).unsqueeze(1);
    const Tensor previous = at::cat({before, indices.narrow(1, 0, indices.size(1) - 1)}, 1);
    const Tensor fits = indices.gt(previous).logical_and(indices.lt(lengths.unsqueeze(1)));
    counts = fits.to(at::kLong).cumprod(1).sum(1);
    if (!given) base = at::where(counts.gt(0), indices.select(1, 0), lengths);
    positions = at::minimum(at::maximum(indices, least.unsqueeze(1)), lengths.sub(1).unsqueeze(1));
  }
};

inline void check_keep(const Tensor& lengths, const Tensor& indices, const optional<Tensor>& base) {
  check_type("indices", indices, {at::kLong});
  TORCH_CHECK_VALUE(indices.dim() == 2, "pyattn: indices must have 2 dimensions (batch, positions), got ",
                    indices.sym_sizes());
  check_place("indices", indices, lengths, std::array<SymInt, 2>{lengths.sym_size(0), indices.sym_size(1)});
  if (base) check_indices("lengths", *base, lengths);
}

// Checks the values. The query at the base sees `left` keys before it, all of which a ring must still hold.
inline void check_kept_values(const Tensor& lengths, const optional<Tensor>& starts, const Tensor& indices,
                              const optional<Tensor>& base, int64_t left, int64_t slots) {
  const Values length(lengths), start(starts ? *starts : lengths), given(base ? *base : lengths);
  const Tensor rows = indices.cpu().contiguous();
  const int64_t count = rows.size(1);
  for (int64_t b = 0; b < lengths.size(0); ++b) {
    check_length(length[b], starts ? start[b] : 0, slots, b);
    int64_t least = starts && start[b] > 0 ? start[b] + left : 0;
    if (base) {
      TORCH_CHECK_VALUE(least <= given[b] && given[b] <= length[b], "pyattn: each of lengths must be between ", least,
                        " and ", length[b], ", got ", given[b], " at ", b);
      least = given[b];
    }
    const int64_t* index = rows.const_data_ptr<int64_t>() + b * count;
    for (int64_t i = 0; i < count; ++i) {
      const bool ended = i > 0 && index[i - 1] == -1;
      TORCH_CHECK_VALUE(index[i] == -1 || (!ended && least <= index[i] && index[i] < length[b]),
                        "pyattn: the indices of a sequence must increase, here from ", least, " to at most ",
                        length[b] - 1, ", with -1 only after them, got ", index[i], " at [", b, ", ", i, "]");
      least = index[i] + 1;
    }
  }
}

// keep of a cache without pages. `append` is the device's.
template <Where where, auto append>
void cache_keep(const Tensor& keys, const Tensor& values, const Tensor& lengths, const Tensor& starts,
                const Tensor& indices, const optional<Tensor>& base, SymInt left, SymInt max_seqlen) {
  check_storage(keys, values, lengths, starts);
  check_keep(lengths, indices, base);
  if (keys.is_meta()) return;
  check_written(keys, values, {{"lengths", lengths}, {"starts", starts}});
  const int64_t slots = keys.size(2);
  const optional<Tensor> ring = slots > number(max_seqlen) ? optional<Tensor>(starts) : std::nullopt;
  if (reads(where)) check_kept_values(lengths, ring, indices, base, number(left), slots);
  const Chosen chosen(lengths, ring, indices, base);
  const bool rows = chosen.positions.defined() && slots > 0;
  const auto copied = [&](const Tensor& t) {
    const Tensor slot = chosen.positions.sub(starts.unsqueeze(1)).clamp(0, slots - 1).unsqueeze(1).unsqueeze(3);
    return t.gather(2, slot.expand({t.size(0), t.size(1), slot.size(2), t.size(3)}));
  };
  const Tensor k = rows ? copied(keys) : Tensor(), v = rows ? copied(values) : Tensor();
  lengths.copy_(chosen.base);
  if (rows) append(keys, values, lengths, starts, k, v, chosen.counts, max_seqlen);
}

// keep of a paged cache.
template <Where where, auto append>
void cache_keep_pages(const Tensor& keys, const Tensor& values, const Tensor& lengths, const Tensor& block_table,
                      const Tensor& indices, const optional<Tensor>& base, SymInt max_seqlen) {
  check_stored_pages(keys, values, lengths, block_table);
  check_keep(lengths, indices, base);
  if (keys.is_meta()) return;
  check_written(keys, values, {{"lengths", lengths}, {"block_table", block_table}});
  const int64_t pages = keys.size(0), page_size = keys.size(1), room = block_table.size(1) * page_size;
  if (reads(where)) {
    check_page_room(lengths, block_table, std::nullopt, 0, room, pages, page_size);
    check_kept_values(lengths, std::nullopt, indices, base, 0, room);
  }
  const Chosen chosen(lengths, std::nullopt, indices, base);
  const bool rows = chosen.positions.defined() && room > 0;
  const auto copied = [&](const Tensor& t) {
    const Tensor position = chosen.positions.clamp(0, room - 1);
    const Tensor page = block_table.gather(1, position.div(page_size, "floor")).clamp(0, pages - 1);
    const Tensor place = position.remainder(page_size);
    return t.index(c10::List<optional<Tensor>>({page, place})).transpose(1, 2);
  };
  const Tensor k = rows ? copied(keys) : Tensor(), v = rows ? copied(values) : Tensor();
  lengths.copy_(chosen.base);
  if (rows) append(keys, values, lengths, block_table, k, v, chosen.counts, max_seqlen);
}

}  // namespace pyattn
