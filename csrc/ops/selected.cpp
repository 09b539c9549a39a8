#include "ops/selected.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <vector>

#define PYATTN_ISA border
#include "shared/row_mask.h"

namespace pyattn {
namespace {

// Unused entries come after all others.
constexpr int32_t kUnused = std::numeric_limits<int32_t>::max();

constexpr std::array<int64_t, 4> kPlace = {0, 1, 2, 3};

// Sorts the lists of a call and leaves out repeated entries.
class Sorter {
 public:
  // blocks: entries are below it.
  Sorter(int64_t blocks, int64_t count) : blocks_(blocks), marks_(count * kWord >= blocks / kFewMarks ? words() : 0) {}

  // from[count], `stride` apart -> to[count], ascending, then kUnused. Returns the place of an entry out of range, or -1.
  template <class Index>
  int64_t sort(const Index* from, int64_t stride, int64_t count, int32_t* to) {
    int32_t* end = to;
    for (int64_t n = 0; n < count; ++n) {
      const int64_t entry = from[n * stride];
      if (entry == -1) continue;
      if (entry < 0 || entry >= blocks_) return n;
      *end++ = static_cast<int32_t>(entry);
    }
    if (!std::is_sorted(to, end)) end = order(to, end);
    std::fill(std::unique(to, end), to + count, kUnused);
    return -1;
  }

 private:
  static constexpr int64_t kWord = 64;
  // Marking entries in a bit map and reading it in order is faster than sorting while there are at most so many words
  // for an entry.
  static constexpr int64_t kFewMarks = 8;

  int64_t blocks_;
  std::vector<uint64_t> marks_;

  size_t words() const { return static_cast<size_t>((blocks_ + kWord - 1) / kWord); }

  int32_t* order(int32_t* begin, int32_t* end) {
    if (marks_.empty()) {
      std::sort(begin, end);
      return end;
    }
    for (const int32_t* entry = begin; entry < end; ++entry) marks_[*entry / kWord] |= uint64_t{1} << *entry % kWord;
    for (size_t word = 0; word < marks_.size(); ++word)
      for (uint64_t& left = marks_[word]; left; left &= left - 1)
        *begin++ = static_cast<int32_t>(word * kWord + std::countr_zero(left));
    return begin;
  }
};

// int32 or int64 lists (batch or 1, lists, seqlen_q, count) -> sorted ones.
Tensor sorted(const Tensor& selected, int64_t block, int64_t seqlen_k) {
  const auto sizes = selected.sizes(), strides = selected.strides();
  Tensor entries = at::empty(sizes, selected.options().dtype(at::kInt));
  int32_t* to = entries.mutable_data_ptr<int32_t>();
  const int64_t blocks = (seqlen_k + block - 1) / block, count = sizes[3];
  Sorter sorter(blocks, count);
  const auto sort = [&](const auto* from) {
    for (int64_t b = 0; b < sizes[0]; ++b)
      for (int64_t h = 0; h < sizes[1]; ++h)
        for (int64_t i = 0; i < sizes[2]; ++i, to += count) {
          const auto* row = from + b * strides[0] + h * strides[1] + i * strides[2];
          const int64_t wrong = sorter.sort(row, strides[3], count, to);
          TORCH_CHECK_VALUE(wrong < 0, "pyattn: selected must hold ", block == 1 ? "keys" : "blocks of keys",
                            " from 0 to ", blocks - 1, ", or -1 for none, got ", row[wrong * strides[3]], " in entry ",
                            wrong, " of query ", i, ", sequence ", b, ", list ", h);
        }
  };
  if (selected.scalar_type() == at::kInt)
    sort(selected.const_data_ptr<int32_t>());
  else
    sort(selected.const_data_ptr<int64_t>());
  return entries;
}

// t with four dimensions, the first of which may be new.
Tensor four_dims(Tensor t) {
  while (t.dim() < 4) t = t.unsqueeze(0);
  return t;
}

// (batch or 1, lists, ...) -> (batch or 1, heads, ...), each list for the heads that share it.
Tensor of_heads(const Tensor& lists, int64_t heads) {
  auto sizes = lists.sizes().vec();
  if (sizes[1] == heads) return lists;
  sizes.insert(sizes.begin() + 2, heads / sizes[1]);
  return lists.unsqueeze(2).expand(sizes).flatten(1, 2);
}

// Elements of t, which broadcasts to (batch, heads, seqlen_q, n), at indices (batch or 1, heads or 1, seqlen_q, listed).
Tensor listed_elements(const Tensor& given, const Tensor& indices) {
  const Tensor t = four_dims(given);
  if (t.size(3) == 1) return t;
  std::array<int64_t, 4> sizes;
  for (size_t d = 0; d < 3; ++d) sizes[d] = std::max(t.size(d), indices.size(d));
  sizes[3] = t.size(3);
  const Tensor elements = t.expand(sizes);
  sizes[3] = indices.size(3);
  return at::gather(elements, 3, indices.expand(sizes));
}

// The transpose of listed_elements: sums values (batch, heads, seqlen_q, listed) for each element of a tensor of these
// sizes. Dimensions that the tensor does not have are added up in order, so sums don't depend on threads.
Tensor sum_elements(const Tensor& values, const Tensor& indices, at::IntArrayRef given) {
  std::vector<int64_t> sizes(4 - given.size(), 1);
  sizes.insert(sizes.end(), given.begin(), given.end());
  std::vector<int64_t> kept, summed, at_once;
  for (const int64_t d : kPlace) {
    if (d < 3 && sizes[d] > 1)
      kept.push_back(d);
    else if (values.size(d) > 1 && (sizes[3] == 1 || (d < 3 && indices.size(d) == 1)))
      at_once.push_back(d);
    else
      summed.push_back(d);
  }
  Tensor sums = values, places = indices;
  if (!at_once.empty()) sums = sums.sum(at_once, true);
  if (sizes[3] == 1) return sums.sum_to_size(sizes).reshape(given);
  places = places.expand(sums.sizes());
  std::vector<int64_t> order = kept, shape;
  order.insert(order.end(), at_once.begin(), at_once.end());
  order.insert(order.end(), summed.begin(), summed.end());
  for (const int64_t d : kept) shape.push_back(sizes[d]);
  const auto flat = [&](const Tensor& t) {
    auto flattened = shape;
    flattened.push_back(-1);
    return t.permute(order).reshape(flattened);
  };
  shape.push_back(sizes[3]);
  Tensor result = at::zeros(shape, values.options());
  shape.pop_back();
  return result.scatter_add_(-1, flat(places), flat(sums)).reshape(given);
}

}  // namespace

SelectedCall::SelectedCall(const Tensor& q, const Tensor& k, const Options& options)
    : whole_(options),
      options_(options),
      entries_(sorted(*options.selected, options.selected_block, k.size(2))),
      listed_(entries_.size(3) * options.selected_block) {
  static const std::array<SymInt, 2> kNoWindow = {-1, -1};
  options_.causal = false, options_.window = kNoWindow, options_.q_offset = 0;
  options_.q_offsets = options_.key_ranges = std::nullopt;
  find_ranges(q, k);
  take_options(q, k);
}

// The places in each list at which the intervals of the query's row begin and end.
void SelectedCall::find_ranges(const Tensor& q, const Tensor& k) {
  using border::Head, border::Range, border::RowMask;
  Kept kept;
  ForwardParams p{};
  fill_inputs(p, q, k, k, k.size(2), whole_, kept);
  const int64_t lists = entries_.size(1), count = entries_.size(3), block = whole_.selected_block;
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
    const Tensor offsets = whole_.q_offsets->view({-1, 1, 1, 1});
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
  options_.alibi_slopes = options_.relative_bias = std::nullopt;
  if (!(mask || bias || slopes || relative) || entries_.numel() == 0) return;
  const int64_t block = whole_.selected_block, heads = q.size(1);
  Tensor keys = entries_.to(at::kLong).unsqueeze(-1);
  if (block > 1) keys = keys * block + at::arange(block, keys.options());
  keys_ = keys.flatten(3).clamp(0, std::max<int64_t>(k.size(2) - 1, 0));
  if (keys_.size(1) > 1) keys_ = of_heads(keys_, heads);
  if (mask) options_.mask = listed_elements(*mask, keys_);
  if (bias) options_.bias = listed_elements(*bias, keys_);
  if (!slopes && !relative) return;
  const at::ScalarType type = row_dtype(q.scalar_type());
  Tensor scores;
  if (bias) scores = options_.bias->to(type);
  const auto add = [&](const Tensor& term) { scores = scores.defined() ? scores + term : term; };
  if (relative) {
    if (bias) {
      const Tensor shown = options_.bias->ne(-std::numeric_limits<double>::infinity());
      options_.mask = options_.mask ? options_.mask->logical_and(shown) : shown;
    }
    shows_all_ = true;
    const int64_t reach = relative->size(-1) / 2;
    const Tensor table = relative->dim() == 3 ? relative->unsqueeze(2) : relative->unsqueeze(1).unsqueeze(0);
    add(listed_elements(table.to(type), distances(q, k, at::kLong).clamp(-reach, reach) + reach));
  }
  if (slopes) add(-distances(q, k, type).abs() * slopes->to(type).view({-1, heads, 1, 1}));
  options_.bias = scores;
}

void SelectedCall::fill(const Options& options, ForwardParams& p, const Tensor& q, const Tensor& k, const Tensor& v,
                        Kept& kept) const {
  fill_inputs(p, q, k, v, listed_, options, kept);
  if (entries_.numel() == 0) return;  // then no list has a key
  const int64_t lists = entries_.size(1), count = entries_.size(3), num_heads_kv = p.num_heads_kv;
  p.num_heads_kv = std::max(lists, num_heads_kv);
  p.cpu.selected.bias_masks_none = shows_all_;
  p.mask.key_ranges = ranges_.const_data_ptr<int64_t>();
  p.mask.num_ranges = ranges_.size(3);
  p.mask.key_ranges_stride_b = ranges_.stride(0);
  SelectedParams& selected = p.cpu.selected;
  selected.entries = entries_.const_data_ptr<int32_t>();
  selected.stride_b = entries_.size(0) > 1 ? entries_.stride(0) : 0;
  selected.stride_h = lists > 1 ? entries_.stride(1) : 0;
  selected.ranges_stride_h = lists > 1 ? ranges_.stride(1) : 0;
  selected.count = count, selected.block = whole_.selected_block, selected.keys = k.size(2);
  selected.sharing = num_heads_kv ? p.num_heads_kv / num_heads_kv : 1;
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
  if (entries_.numel() == 0) dk.zero_(), dv.zero_();
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
      const Tensor terms = (dscores * distances(q, k, type).abs()).sum({2, 3}, false, at::kDouble).neg();
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
