// Pages: keys and values in blocks of page_size positions anywhere in a tensor (pages, page_size, num_heads,
// head_dim), and the block table that lists those of each sequence. Their checks and params.
#pragma once

#include "attention.h"
#include "ops/caches/cache.h"
#include "ops/checks.h"
#include "ops/packing.h"
#include "ops/params.h"

namespace pyattn {

// Looking up a smaller page costs as much as reading what it holds.
inline constexpr int64_t kLeastPageSize = 16;

inline void check_page_size(const SymInt& page_size) {
  TORCH_CHECK_VALUE(page_size >= kLeastPageSize, "pyattn: page_size must be at least ", kLeastPageSize, ", got ",
                    page_size);
}

inline void check_block_table(const Tensor& block_table, at::Device device, const SymInt& batch) {
  check_given("block_table", block_table, device, {at::kInt, at::kLong});
  TORCH_CHECK_VALUE(block_table.dim() == 2 && block_table.sym_size(0) == batch, "pyattn: block_table must have shape (",
                    batch, ", pages of a sequence), got ", block_table.sym_sizes());
}

// Checks q (batch, num_heads, seqlen, head_dim) or packed (tokens, num_heads, head_dim), and paged k and v.
inline void check_paged(const Tensor& q, const Tensor& k, const Tensor& v, int64_t dims) {
  check_defined(q, k, v);
  TORCH_CHECK_VALUE(q.dim() == dims && k.dim() == 4 && v.dim() == 4, "pyattn: q must have ", dims,
                    " dimensions and k and v in pages 4 (pages, page_size, num_heads, head_dim), got q ", q.sym_sizes(),
                    ", k ", k.sym_sizes(), " and v ", v.sym_sizes());
  dtype_of(q.scalar_type());
  check_fit(q, k, v, 2);
  check_page_size(k.sym_size(1));
}

// Checks the pages that hold the keys of sequence b, and returns their number; what is listed after them is ignored.
inline int64_t check_pages(const int64_t* listed, int64_t count, int64_t seqlen_k, int64_t b, int64_t pages,
                           int64_t page_size) {
  const int64_t used = seqlen_k / page_size + (seqlen_k % page_size > 0);
  TORCH_CHECK_VALUE(used <= count, "pyattn: block_table must list pages for every key, got ", count, " of size ",
                    page_size, " for the ", seqlen_k, " keys of sequence ", b);
  for (int64_t i = 0; i < used; ++i)
    TORCH_CHECK_VALUE(0 <= listed[i] && listed[i] < pages, "pyattn: block_table must hold pages from 0 to ", pages - 1,
                      ", got ", listed[i], " at [", b, ", ", i, "]");
  return used;
}

// Checks the arguments of pyattn::pages_in_use.
inline void check_pages_in_use(const Tensor& block_table, const Tensor& cu_seqlens_k, const optional<Tensor>& seqused_k,
                               const SymInt& page_size) {
  check_page_size(page_size);
  check_given("cu_seqlens_k", cu_seqlens_k, cu_seqlens_k.device(), {at::kInt, at::kLong});
  TORCH_CHECK_VALUE(cu_seqlens_k.dim() == 1 && cu_seqlens_k.sym_size(0) >= 1,
                    "pyattn: cu_seqlens_k must have shape (sequences + 1), got ", cu_seqlens_k.sym_sizes());
  const SymInt batch = cu_seqlens_k.sym_size(0) - 1;
  check_block_table(block_table, cu_seqlens_k.device(), batch);
  if (seqused_k) check_seqused(*seqused_k, batch, cu_seqlens_k.device());
}

// Checks a paged cache.
inline void check_stored_pages(const Tensor& keys, const Tensor& values, const Tensor& lengths,
                               const Tensor& block_table) {
  check_stored(keys, values, "(pages, page_size, num_heads, head_dim)");
  check_page_size(keys.sym_size(1));
  check_type("block_table", block_table, {at::kLong});
  TORCH_CHECK_VALUE(block_table.dim() == 2, "pyattn: block_table must have shape (batch, pages of a sequence), got ",
                    block_table.sym_sizes());
  TORCH_CHECK_VALUE(block_table.sym_numel() <= keys.sym_size(0), "pyattn: the cache must have ",
                    block_table.sym_numel(), " pages, one for each place of block_table, got ", keys.sym_size(0));
  for (const Tensor& t : {keys, values})
    TORCH_CHECK_VALUE(t.sym_size(3) <= 1 || t.sym_stride(3) == 1,
                      "pyattn: columns of keys and values must be contiguous, got strides ", t.sym_strides());
  check_cache_lengths(lengths, keys, block_table.sym_size(0));
}

// Checks a paged cache, and what is appended to it.
inline void check_append_pages(const Tensor& keys, const Tensor& values, const Tensor& lengths,
                               const Tensor& block_table, const Tensor& k, const Tensor& v,
                               const optional<Tensor>& new_lengths) {
  check_stored_pages(keys, values, lengths, block_table);
  check_new(keys, values, lengths, k, v, new_lengths, 2);
}

// Checks what an append reads, as check_room of cache.h does.
inline void check_page_room(const Tensor& lengths, const Tensor& block_table, const optional<Tensor>& new_lengths,
                            int64_t fresh, int64_t most, int64_t pages, int64_t page_size) {
  const Values length(lengths), added(new_lengths ? *new_lengths : lengths);
  const Tensor table = block_table.cpu().contiguous();
  const int64_t each = table.size(1);
  for (int64_t b = 0; b < lengths.size(0); ++b) {
    check_length(length[b], 0, each * page_size, b);
    check_pages(table.const_data_ptr<int64_t>() + b * each, each, length[b], b, pages, page_size);
  }
  for (int64_t b = 0; b < lengths.size(0); ++b) check_added(length[b], new_lengths ? added[b] : fresh, fresh, most, b);
}

// Fills the params of pages, once the sequences of p are known.
inline void fill_pages(ForwardParams& p, const Tensor& k, const Tensor& v, const Tensor& block_table, Kept& kept) {
  p.k = input(k.transpose(1, 2)), p.v = input(v.transpose(1, 2));
  p.cpu.pages = {kept.indices(block_table), block_table.size(1), k.size(1)};
  for (int64_t b = 0; b < p.batch; ++b)
    check_pages(p.cpu.pages.table + b * p.cpu.pages.stride, p.cpu.pages.stride,
                p.packed.sequences ? p.packed.sequences[b].seqlen_k : p.seqlen_k, b, k.size(0), k.size(1));
}

}  // namespace pyattn
