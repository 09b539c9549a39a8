#include "ops/selected/call.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>
#include <tuple>

#include "ops/pages.h"
#include "ops/selected/elements.h"
#include "ops/selected/lists.h"
#define PYATTN_ISA border
#include "shared/row_mask.h"

namespace pyattn {

SelectedCall::SelectedCall(const Tensor& q, const Tensor& k, const Options& options)
    : whole_(options),
      options_(options),
      block_(std::min(options.selected_block, std::max<int64_t>(k.size(2), 1))),
      entries_(sorted(*options.selected, block_, k.size(2))),
      seqlen_k_(k.size(2)),
      listed_(entries_.size(3) * block_),
      empty_(entries_.numel() == 0 || q.size(0) == 0 || q.size(1) == 0 || k.size(2) == 0) {
  static const std::array<SymInt, 2> kNoWindow = {-1, -1};
  options_.causal = false, options_.window = kNoWindow, options_.q_offset = 0;
  options_.q_offsets = options_.key_ranges = std::nullopt;
  if (!empty_) find_ranges(q, k);
  take_options(q, k);
}

// The places in each list at which the intervals of the query's row begin and end.
void SelectedCall::find_ranges(const Tensor& q, const Tensor& k) {
  using border::Head, border::Range, border::RowMask;
  Kept kept;
  ForwardParams p{};
  fill_inputs(p, q, k, k, k.size(2), whole_, kept);
  const int64_t lists = entries_.size(1), count = entries_.size(3), block = block_;
  ranges_ = at::empty({p.batch, lists, p.seqlen_q, p.mask.num_ranges, 2}, q.options().dtype(at::kLong));
  int64_t* to = ranges_.mutable_data_ptr<int64_t>();
  const int32_t* const entries = entries_.const_data_ptr<int32_t>();
  for (int64_t b = 0; b < p.batch; ++b) {
    const RowMask mask(p, Head(p, b * p.num_heads_kv));
    for (int64_t h = 0; h < lists; ++h)
      for (int64_t i = 0; i < p.seqlen_q; ++i) {
        const int32_t* const list = entries + (((entries_.size(0) > 1 ? b : 0) * lists + h) * p.seqlen_q + i) * count;
        const auto place = [&](int64_t key) {  // of the first listed key from this one on
          const int64_t entry = key / block;
          const int32_t* const found = std::lower_bound(list, list + count, entry);
          return (found - list) * block + (found < list + count && *found == entry ? key % block : 0);
        };
        for (int64_t n = 0; n < p.mask.num_ranges; ++n, to += 2) {
          const Range keys = mask.keys_of(i * border::group_size(p), n);
          to[0] = place(keys.begin), to[1] = std::max(to[0], place(std::max(keys.begin, keys.end)));
        }
      }
  }
}

// Distances of the listed keys from their queries, key - (i + q_offset); in a float type as kernels compute them.
Tensor SelectedCall::distances(const Tensor& q, const Tensor& k, at::ScalarType type) const {
  const int64_t seqlen_q = q.size(2), far = int64_t{1} << 40;  // no reach exceeds it
  const Tensor queries = at::arange(seqlen_q, q.options().dtype(at::kLong)).unsqueeze(-1);
  const bool exact = type == at::kLong;
  const Tensor wide = exact ? keys_ : keys_.to(at::kDouble);
  if (whole_.q_offsets) {
    const Tensor offsets = whole_.q_offsets->reshape({-1, 1, 1, 1});
    return (wide - (queries + (exact ? offsets.clamp(-far, far) : offsets.to(at::kDouble)))).to(type);
  }
  const int64_t offset = whole_.q_offset ? whole_.q_offset->expect_int() : default_q_offset(seqlen_q, k.size(2));
  if (exact) return wide - (queries + std::clamp(offset, -far, far));
  return (wide - (queries.to(at::kDouble) + static_cast<double>(offset))).to(type);
}

// Mask and bias of the listed keys. Terms by distance become part of the bias.
void SelectedCall::take_options(const Tensor& q, const Tensor& k) {
  const auto& [mask, bias, slopes, relative] =
      std::tie(whole_.mask, whole_.bias, whole_.alibi_slopes, whole_.relative_bias);
  options_.mask = options_.bias = options_.alibi_slopes = options_.relative_bias = std::nullopt;
  if (!(mask || bias || slopes || relative) || empty_) return;
  const int64_t block = block_, heads = q.size(1);
  Tensor keys = entries_.to(at::kLong).unsqueeze(-1);
  if (block > 1) keys = keys * block + at::arange(block, keys.options());
  keys_ = keys.flatten(3).clamp(0, std::max<int64_t>(k.size(2) - 1, 0));
  if (keys_.size(1) > 1) keys_ = of_heads(keys_, heads);
  if (mask) options_.mask = listed_elements(*mask, keys_);
  if (bias) options_.bias = listed_elements(*bias, keys_);
  if (!slopes && !relative) return;
  const at::ScalarType type = row_dtype(q.scalar_type());
  Tensor scores;
  if (bias) {
    scores = options_.bias->to(type);
    const Tensor shown = options_.bias->ne(-std::numeric_limits<double>::infinity());
    options_.mask = options_.mask ? options_.mask->logical_and(shown) : shown;
  }
  shows_all_ = true;
  const auto add = [&](const Tensor& term) { scores = scores.defined() ? scores + term : term; };
  if (relative) {
    const int64_t reach = relative->size(-1) / 2;
    const Tensor table = relative->dim() == 3 ? relative->unsqueeze(2) : relative->unsqueeze(1).unsqueeze(0);
    add(listed_elements(table.to(type), distances(q, k, at::kLong).clamp(-reach, reach) + reach));
  }
  if (slopes) add(-distances(q, k, type).abs() * slopes->to(type).reshape({-1, heads, 1, 1}));
  options_.bias = scores;
}

// Turns lists of blocks into lists of their keys.
void SelectedCall::list_keys() {
  if (block_ == 1) return;
  const Tensor first = entries_.to(at::kLong).unsqueeze(-1), unused = first.eq(kUnused);
  const Tensor keys = first * block_ + at::arange(block_, first.options());
  entries_ = keys.masked_fill(unused, kUnused).clamp_max(kUnused).to(at::kInt).flatten(3);
  block_ = 1;
}

void SelectedCall::list_pages(const Tensor& block_table, int64_t pages, int64_t page_size) {
  if (empty_) return;
  TORCH_CHECK_NOT_IMPLEMENTED(pages <= kUnused / page_size, "pyattn: selected keys take at most ", kUnused,
                              " positions in pages, got ", pages, " pages of ", page_size);
  Kept kept;
  const int64_t *const table = kept.indices(block_table), listed = block_table.size(1), batch = block_table.size(0);
  for (int64_t b = 0; b < batch; ++b) check_pages(table + b * listed, listed, seqlen_k_, b, pages, page_size);
  if (page_size % block_ != 0) list_keys();
  auto sizes = entries_.sizes().vec();
  sizes[0] = batch;
  entries_ = entries_.expand(sizes).contiguous();
  const int64_t each = page_size / block_, count = entries_.numel() / batch,
                entries = (seqlen_k_ + block_ - 1) / block_;
  int32_t* entry = entries_.mutable_data_ptr<int32_t>();
  for (int64_t b = 0; b < batch; ++b)
    for (const int32_t* const end = entry + count; entry < end; ++entry)
      if (*entry < entries)  // the keys of a last block may lie past those of the sequence, where no range reaches
        *entry = static_cast<int32_t>(table[b * listed + *entry / each] * each + *entry % each);
      else if (*entry != kUnused)
        *entry = 0;
  in_pages_ = true;
}

namespace {

// Rows of one head that lie a multiple of this many bytes apart share a quarter of a cache's sets, or fewer.
constexpr int64_t kConflictBytes = 1024;

// k or v as kernels read it: heads one after another if the rows of others lie between a head's in the way of the cache
// and the lists name each key several times.
View listed_view(const Tensor& t, int64_t listed, Kept& kept) {
  const int64_t apart = t.stride(2) * t.element_size();
  const bool dense = t.stride(2) == t.size(3);
  if (dense || apart % kConflictBytes != 0 || listed < 4 * t.size(2)) return input(t);
  return input(kept.keep(t.contiguous()));
}

}  // namespace

void SelectedCall::fill(const Options& options, ForwardParams& p, const Tensor& q, const Tensor& k, const Tensor& v,
                        Kept& kept) const {
  fill_inputs(p, q, k, v, empty_ ? 0 : listed_, options, kept);
  if (empty_) return;  // a call without keys then
  const int64_t lists = entries_.size(1);
  const int32_t* const entries = entries_.const_data_ptr<int32_t>();
  const int64_t used = entries_.numel() - std::count(entries, entries + entries_.numel(), kUnused);
  p.cpu.pairs = static_cast<double>(p.batch * used * block_) / static_cast<double>(entries_.size(0) * lists);
  p.k = in_pages_ ? input(k) : listed_view(k, p.seqlen_q * listed_, kept);
  p.v = in_pages_ ? input(v) : listed_view(v, p.seqlen_q * listed_, kept);
  const int64_t count = entries_.size(3), num_heads_kv = p.num_heads_kv;
  p.num_heads_kv = std::max(lists, num_heads_kv);
  p.cpu.selected.bias_masks_none = shows_all_;
  p.mask.key_ranges = ranges_.const_data_ptr<int64_t>();
  p.mask.num_ranges = ranges_.size(3);
  p.mask.key_ranges_stride_b = ranges_.stride(0);
  SelectedParams& selected = p.cpu.selected;
  selected.entries = entries;
  selected.stride_b = entries_.size(0) > 1 ? entries_.stride(0) : 0;
  selected.stride_h = lists > 1 ? entries_.stride(1) : 0;
  selected.ranges_stride_h = lists > 1 ? ranges_.stride(1) : 0;
  selected.count = count, selected.block = block_, selected.keys = k.size(2);
  selected.sharing = p.num_heads_kv / num_heads_kv;
}

ForwardTensors SelectedCall::forward(const Tensor& q, const Tensor& k, const Tensor& v) const {
  return call_forward(q, k, v, [this](auto&... all) { fill(options_, all...); });
}

BackwardTensors SelectedCall::backward(const Tensor& dout, const Saved& saved, const Flags& flags) const {
  const auto [wants_bias, wants_slopes, wants_sinks, wants_relative] = flags.output_mask;
  const Tensor &q = saved.q, &k = saved.k;
  const at::ScalarType type = row_dtype(q.scalar_type());
  const bool wants_scores = wants_bias || wants_slopes || wants_relative;
  Options options = options_;
  Flags own = flags;
  own.output_mask = {wants_scores && options.bias, false, wants_sinks, false};
  if (own.output_mask[0])  // one element for each score, which kernels then write once
    options.bias = options.bias->to(type).expand({q.size(0), q.size(1), q.size(2), listed_});
  auto [dq, dk, dv, dscores, dslopes, dsinks, drelative] =
      call_backward(dout, saved, options, own, [&](auto&... all) { fill(options, all...); });
  if (empty_) dk.zero_(), dv.zero_();
  Tensor dbias;
  const auto zeros_like = [](const Tensor& t) { return at::zeros(t.sizes(), t.options()); };
  if (!dscores.defined()) {
    if (wants_bias) dbias = zeros_like(*whole_.bias);
    if (wants_slopes) dslopes = zeros_like(*whole_.alibi_slopes);
    if (wants_relative) drelative = zeros_like(*whole_.relative_bias);
  } else {
    if (wants_bias) dbias = sum_elements(dscores, keys_, whole_.bias->sizes()).to(whole_.bias->scalar_type());
    if (wants_slopes) {
      const Tensor& slopes = *whole_.alibi_slopes;
      const Tensor terms = sum_in_order(dscores * distances(q, k, type).abs(), {2, 3}, false, at::kDouble).neg();
      dslopes = (slopes.dim() == 1 ? terms.sum(0) : terms).to(slopes.scalar_type());
    }
    if (wants_relative) {
      const Tensor& relative = *whole_.relative_bias;
      const int64_t reach = relative.size(-1) / 2;
      auto sizes = relative.sizes().vec();
      sizes.insert(sizes.end() - 1, 1);
      const Tensor places = distances(q, k, at::kLong).clamp(-reach, reach) + reach;
      drelative =
          sum_elements(dscores.to(at::kDouble), places, sizes).reshape(relative.sizes()).to(relative.scalar_type());
    }
  }
  return {dq, dk, dv, dbias, dslopes, dsinks, drelative};
}

}  // namespace pyattn
