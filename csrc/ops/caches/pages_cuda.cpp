// The operators of pages on a GPU, like that of cache_cuda.cpp in ATen operations without a host read: positions
// without room are left out, and indices are clamped. With PYATTN_CHECK=1 the host reads and checks them first.
#include <ATen/ops/arange.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "ops/caches/cache.h"
#include "ops/caches/keep.h"
#include "ops/pages.h"

namespace pyattn {
namespace {

Tensor column(const Tensor& t) { return t.unsqueeze(1); }
Tensor numbers(int64_t count, const Tensor& like) { return at::arange(count, like.options().dtype(at::kLong)); }

// As in paged.cpp, but a sequence with invalid indices has -1 keys, and so has every one if cu_seqlens_k is invalid.
std::tuple<Tensor, Tensor> cuda_pages_in_use(const Tensor& block_table, const Tensor& cu_seqlens_k, SymInt max_seqlen_k,
                                             const optional<Tensor>& seqused_k, SymInt pages, SymInt page_size) {
  check_pages_in_use(block_table, cu_seqlens_k, seqused_k, page_size);
  const int64_t size = page_size.expect_int(), count = block_table.size(1), all = cu_seqlens_k.size(0) - 1;
  const Tensor table = block_table.to(at::kLong), starts = cu_seqlens_k.to(at::kLong);
  const Tensor most = starts.narrow(0, 1, all).sub(starts.narrow(0, 0, all));
  const Tensor length = seqused_k ? seqused_k->to(at::kLong) : most;
  const Tensor right =
      most.ge(0).logical_and(most.le(max_seqlen_k.expect_int())).all().logical_and(starts.select(0, 0).eq(0));
  const Tensor used = numbers(count, table).mul(size).lt(column(length));
  const Tensor there = table.ge(0).logical_and(table.lt(pages.expect_int())).logical_or(used.logical_not());
  const Tensor valid = right.logical_and(length.ge(0))
                           .logical_and(length.le(most))
                           .logical_and(length.le(count * size))
                           .logical_and(there.all(1));
  return {at::where(used.logical_and(column(valid)), table, 0), at::where(valid, length, -1)};
}

// How many of the marked entries of the table (batch, places) name each page, (pages).
Tensor count_pages(const Tensor& table, const Tensor& marked, int64_t pages) {
  return at::zeros({pages}, table.options()).scatter_add_(0, table.flatten(), marked.flatten().to(at::kLong));
}

// The entries whose sequence may write to their page: no other sequence holds it, or all that hold it write to it, and
// this is the last one.
Tensor may_write(const Tensor& table, const Tensor& held, const Tensor& written, int64_t pages) {
  const Tensor own = numbers(table.numel(), table).view_as(table);
  const auto of_page = [&](const Tensor& t) { return t.index_select(0, table.flatten()).view_as(table); };
  const Tensor holders = count_pages(table, held, pages),
               writers = count_pages(table, held.logical_and(written), pages);
  const Tensor last = at::zeros({pages}, table.options())
                          .scatter_reduce_(0, table.flatten(), at::where(held, own, 0).flatten(), "amax");
  return held.logical_and(of_page(writers).eq(of_page(holders))).logical_and(of_page(last).eq(own));
}

// Free pages for entries of the table, and one more; where no page is free, none is needed.
struct FreePages {
  Tensor taken;  // (batch, places): the pages of the wanted entries
  Tensor spare;  // (1,)
};

// An entry takes the page with its place's number, so a sequence that shares nothing is contiguous, else the next free one.
FreePages take_pages(const Tensor& wanted, const Tensor& free) {
  const int64_t pages = free.size(0), entries = wanted.numel();
  const Tensor own = numbers(entries, free).view_as(wanted);
  const Tensor own_free = wanted.logical_and(free.narrow(0, 0, entries).view_as(own));
  Tensor left = free.clone();
  left.narrow(0, 0, entries).logical_and_(own_free.flatten().logical_not());
  const Tensor next = left.logical_not().to(at::kLong).argsort(true, 0, false);
  const Tensor others = wanted.logical_and(own_free.logical_not()).flatten().to(at::kLong);
  const auto nth = [&](const Tensor& n) { return next.index_select(0, n.clamp(0, pages - 1)); };
  return {at::where(own_free, own, nth(others.cumsum(0).sub(1)).view_as(own)), nth(others.sum().view({1}))};
}

// The effect of an append on the table (batch, places): the new positions [begin, end) of each sequence,
// unshared pages for them, and a page that no sequence uses.
struct Extension {
  Tensor begin, end;
  Tensor before, after;  // the table
  Tensor spare;          // (1,)
};

Extension extend(const Tensor& lengths, const Tensor& block_table, const Tensor& added, int64_t page_size,
                 int64_t pages, int64_t max_seqlen) {
  const Tensor begin = lengths.clamp(0, max_seqlen), end = begin.add(at::minimum(added, begin.neg().add(max_seqlen)));
  const Tensor before = block_table.clamp(0, pages - 1);
  const Tensor first = numbers(before.size(1), before).mul(page_size);
  const Tensor held = first.lt(column(begin));
  const Tensor written =
      first.lt(column(end)).logical_and(first.add(page_size).gt(column(begin))).logical_and(column(end.gt(begin)));
  const Tensor wanted = written.logical_and(may_write(before, held, written, pages).logical_not());
  const auto [taken, spare] = take_pages(wanted, count_pages(before, held, pages).eq(0));
  return {begin, end, before, at::where(wanted, taken, before), spare};
}

// Writes every position from the start of the first page that is written to, with the rows that it has already; past
// the end, the last position again, so all writes to a row are the same.
void cuda_append_pages(const Tensor& keys, const Tensor& values, const Tensor& lengths, const Tensor& block_table,
                       const Tensor& new_k, const Tensor& new_v, const optional<Tensor>& new_counts,
                       SymInt max_seqlen) {
  check_append_pages(keys, values, lengths, block_table, new_k, new_v, new_counts);
  check_written(keys, values, {{"lengths", lengths}, {"block_table", block_table}});
  const Tensor k = apart_from({keys, values}, new_k), v = apart_from({keys, values}, new_v);
  const optional<Tensor> new_lengths = apart_from({lengths, block_table}, new_counts);
  const int64_t page_size = keys.size(1), fresh = k.size(2);
  if (fresh == 0 || block_table.numel() == 0) return;
  const int64_t most = std::min(number(max_seqlen), block_table.size(1) * page_size);
  if (checks_gpu()) check_page_room(lengths, block_table, new_lengths, fresh, most, keys.size(0), page_size);
  const Tensor added = new_lengths ? new_lengths->clamp(0, fresh) : at::full_like(lengths, fresh);
  const Extension extension = extend(lengths, block_table, added, page_size, keys.size(0), most);
  const Tensor begin = column(extension.begin), end = column(extension.end);
  const Tensor first = at::where(end.gt(begin), begin.div(page_size, "floor").mul(page_size), 0);
  const Tensor position = at::minimum(first.add(numbers(page_size + fresh, lengths)), end.sub(1)).clamp_min(0);
  const Tensor place = position.div(page_size, "floor"), slot = position.remainder(page_size);
  const auto page = [&](const Tensor& table) { return at::where(end.gt(0), table.gather(1, place), extension.spare); };
  const Tensor from = page(extension.before), to = page(extension.after);
  const Tensor fresh_ones = position.ge(begin).logical_and(position.lt(end));
  const auto rows = [](const Tensor& t) { return t.unsqueeze(2).unsqueeze(3); };
  for (const auto& [storage, t] : {std::pair(keys, k), std::pair(values, v)}) {
    const Tensor index = position.sub(begin).clamp(0, fresh - 1).unsqueeze(1).unsqueeze(3);
    const Tensor added_rows =
        t.gather(2, index.expand({t.size(0), t.size(1), index.size(2), t.size(3)})).transpose(1, 2);
    const Tensor old_rows = storage.index(c10::List<optional<Tensor>>({from, slot}));
    storage.index_put_({to, slot}, at::where(rows(fresh_ones), added_rows, old_rows));
  }
  block_table.copy_(extension.after);
  lengths.add_(extension.end.sub(extension.begin));
}

TORCH_LIBRARY_IMPL(pyattn, CUDA, m) {
  m.impl("pages_in_use", cuda_pages_in_use);
  m.impl("cache_append_pages", cuda_append_pages);
  m.impl("cache_keep_pages", cache_keep_pages<Where::kGPU, cuda_append_pages>);
}

}  // namespace
}  // namespace pyattn
