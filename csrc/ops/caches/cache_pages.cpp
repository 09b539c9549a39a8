// The operators that change a paged KV cache in place, on the CPU. Their schemas declare what they mutate.
//
// keys [pages][page_size][heads][head_dim] and values [pages][page_size][heads][head_dim_v] hold position p of
// sequence b at p % page_size of page block_table[b][p / page_size], up to position lengths[b]. There are
// as many pages as all sequences together can have. A page is free unless it holds positions of some sequence, so
// lengths and table are the whole state. Sequences may share pages; a shared page is copied before it is written.
#include <algorithm>
#include <cstring>
#include <vector>

#include "ops/caches/cache.h"
#include "ops/caches/keep.h"
#include "ops/operators.h"
#include "ops/pages.h"

namespace pyattn {
namespace {

// The block table of a cache on the host, with the number of sequences that use each page.
class PageTable {
 public:
  PageTable(const Tensor& block_table, const Values& lengths, int64_t pages, int64_t page_size)
      : table_(block_table.mutable_data_ptr<int64_t>()),
        stride_b_(block_table.stride(0)),
        stride_i_(block_table.stride(1)),
        each_(block_table.size(1)),
        size_(page_size),
        uses_(pages) {
    for (int64_t b = 0; b < block_table.size(0); ++b)
      for (int64_t i = 0; i * size_ < lengths[b]; ++i) ++uses_[at(b, i)];
  }

  int64_t& at(int64_t b, int64_t i) { return table_[b * stride_b_ + i * stride_i_]; }
  int64_t page_of(int64_t b, int64_t position) { return at(b, position / size_); }

  // Gives sequence b unshared pages for the positions [begin, end). copy(from, to, n) copies the first n positions
  // of a page that other sequences share.
  template <class Copy>
  void extend(int64_t b, int64_t begin, int64_t end, Copy copy) {
    if (begin == end) return;
    if (const int64_t held = begin % size_; held && uses_[page_of(b, begin)] > 1) {
      const int64_t i = begin / size_, shared = at(b, i);
      take(b, i);
      --uses_[shared];
      copy(shared, at(b, i), held);
    }
    for (int64_t i = (begin + size_ - 1) / size_; i * size_ < end; ++i) take(b, i);
  }

 private:
  int64_t* table_;
  int64_t stride_b_, stride_i_, each_, size_, next_ = 0;
  std::vector<int64_t> uses_;  // how many sequences use each page

  // Takes a free page for place i of sequence b: page b * each_ + i, so a sequence that shares nothing is
  // contiguous, else the first free one. There are as many pages as places, so there is one.
  void take(int64_t b, int64_t i) {
    int64_t page = b * each_ + i;
    if (uses_[page] > 0) {
      while (uses_[next_] > 0) ++next_;
      page = next_;
    }
    uses_[page] = 1;
    at(b, i) = page;
  }
};

// Rows t[b][heads][first..first + n] -> storage[page][place..place + n][heads].
void write(const Tensor& storage, int64_t page, int64_t place, const Tensor& t, int64_t b, int64_t first, int64_t n) {
  const int64_t size = storage.element_size(), bytes = storage.size(3) * size;
  if (bytes == 0) return;  // memcpy takes no null pointer: shared values are written with the keys
  char* to =
      static_cast<char*>(storage.mutable_data_ptr()) + size * (page * storage.stride(0) + place * storage.stride(1));
  const char* from = static_cast<const char*>(t.const_data_ptr()) + size * (b * t.stride(0) + first * t.stride(2));
  for (int64_t h = 0; h < storage.size(2); ++h)
    for (int64_t i = 0; i < n; ++i)
      std::memcpy(to + size * (h * storage.stride(2) + i * storage.stride(1)),
                  from + size * (h * t.stride(1) + i * t.stride(2)), bytes);
}

// Appends the first new_lengths[b] of the new positions to sequence b, or all of them without new_lengths.
// Everything is checked before anything is written.
void cache_append_pages(const Tensor& keys, const Tensor& values, const Tensor& lengths, const Tensor& block_table,
                        const Tensor& new_k, const Tensor& new_v, const optional<Tensor>& new_counts,
                        SymInt max_seqlen) {
  check_append_pages(keys, values, lengths, block_table, new_k, new_v, new_counts);
  if (keys.is_meta()) return;
  check_written(keys, values, {{"lengths", lengths}, {"block_table", block_table}});
  const Tensor k = with_contiguous_columns(apart_from({keys, values}, new_k)),
               v = with_contiguous_columns(apart_from({keys, values}, new_v));
  const optional<Tensor> new_lengths = apart_from({lengths, block_table}, new_counts);

  const int64_t batch = lengths.size(0), fresh = k.size(2), page_size = keys.size(1);
  const int64_t most = std::min(number(max_seqlen), block_table.size(1) * page_size);
  const Values length(lengths), added(new_lengths ? *new_lengths : lengths);
  const auto added_to = [&](int64_t b) { return new_lengths ? added[b] : fresh; };
  check_page_room(lengths, block_table, new_lengths, fresh, most, keys.size(0), page_size);
  PageTable table(block_table, length, keys.size(0), page_size);
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t begin = length[b], end = begin + added_to(b);
    table.extend(b, begin, end, [&](int64_t from, int64_t to, int64_t n) {
      for (const Tensor& storage : {keys, values})
        storage.select(0, to).narrow(0, 0, n).copy_(storage.select(0, from).narrow(0, 0, n));
    });
    for (int64_t position = begin, n; position < end; position += n) {
      const int64_t page = table.page_of(b, position), place = position % page_size;
      n = std::min(page_size - place, end - position);
      write(keys, page, place, k, b, position - begin, n), write(values, page, place, v, b, position - begin, n);
    }
  }
  for (const Tensor& t : {keys, values, block_table}) t.unsafeGetTensorImpl()->bump_version();
  add_to(lengths, new_lengths, fresh);
}

// Sequence b continues with the pages of sequence idx[b].
template <Where where>
void cache_reorder_pages(const Tensor& lengths, const Tensor& block_table, const Tensor& idx) {
  check_indices("idx", idx, lengths);
  check_block_table(block_table, lengths.device(), lengths.sym_size(0));
  if (lengths.is_meta() || idx.size(0) == 0) return;
  check_apart("lengths", lengths), check_apart("block_table", block_table);
  if (reads(where)) check_order(idx);
  const Tensor order = idx.clamp(0, idx.size(0) - 1);
  for (const Tensor& t : {lengths, block_table}) t.copy_(t.index_select(0, order));
}

TORCH_LIBRARY_FRAGMENT(pyattn, m) {
  define<cache_append_pages>(
      m, kOnCPU,
      "cache_append_pages(Tensor(a!) keys, Tensor(b!) values, Tensor(c!) lengths, Tensor(d!) block_table, Tensor k, "
      "Tensor v, Tensor? new_lengths, SymInt max_seqlen) -> ()");
  define<cache_keep_pages<Where::kCPU, cache_append_pages>>(
      m, kOnCPU,
      "cache_keep_pages(Tensor(a!) keys, Tensor(b!) values, Tensor(c!) lengths, Tensor(d!) block_table, "
      "Tensor indices, Tensor? base, SymInt max_seqlen) -> ()");
  define_cache<cache_reorder_pages<Where::kCPU>, cache_reorder_pages<Where::kGPU>>(
      m, "cache_reorder_pages(Tensor(a!) lengths, Tensor(b!) block_table, Tensor idx) -> ()");
}

}  // namespace
}  // namespace pyattn
