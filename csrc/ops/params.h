// Params: turns tensors and options into the addresses, sizes and strides that kernels read.
#pragma once

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "attention.h"
#include "ops/checks.h"
#include "ops/options.h"
#include "shared/defaults.h"

namespace pyattn {

// Kernels take any strides, as long as columns are contiguous.
inline Tensor with_contiguous_columns(const Tensor& t) {
  return t.size(-1) <= 1 || t.stride(-1) == 1 ? t : t.contiguous();
}

// Packed sequences have dimensions (tokens, num_heads, head_dim).
inline bool is_packed(const Tensor& t) { return t.dim() == 3; }

// Keeps alive the tensors that params point into: the options' where kernels can read them, else copies.
class Kept {
 public:
  const Tensor& keep(Tensor t) { return tensors_.emplace_back(std::move(t)); }
  // Calls no ATen operator if there is nothing to copy: that takes as long as the kernel of a small call.
  const void* dense(const Tensor& t, at::ScalarType type) {
    return keep((t.scalar_type() == type ? t : t.to(type)).contiguous()).const_data_ptr();
  }
  const int64_t* indices(const Tensor& t) { return static_cast<const int64_t*>(dense(t, at::kLong)); }

 private:
  c10::SmallVector<Tensor, 8> tensors_;
};

inline optional<Tensor> contiguous(const optional<Tensor>& t) { return t ? optional(t->contiguous()) : std::nullopt; }

// Params hold inputs and results alike, so const is cast away here; no kernel writes to an input.
inline void* input_data(const Tensor& t) { return const_cast<void*>(t.const_data_ptr()); }
inline View view(const Tensor& t, void* data) {
  if (is_packed(t)) return {data, 0, t.stride(1), t.stride(0)};
  return {data, t.stride(0), t.stride(1), t.stride(2)};
}
inline View input(const Tensor& t) { return view(t, input_data(t)); }
inline View result(const Tensor& t) { return view(t, t.mutable_data_ptr()); }

// A tensor that broadcasts to four dimensions; they align at the last one, and broadcast dimensions have stride 0.
inline BroadcastView broadcast_view(const Tensor& t, void* data) {
  const auto stride = [&](int64_t d) { return t.dim() >= d && t.size(-d) > 1 ? t.stride(-d) : 0; };
  return {data, stride(4), stride(3), stride(2), stride(1)};
}
inline BiasView bias_view(const Tensor& t, at::ScalarType type, void* data) {
  return {broadcast_view(t, data), t.scalar_type() == type ? BiasType::kLikeQ : BiasType::kFloat32};
}

// Checks the key ranges of one sequence's queries; on a GPU only with PYATTN_CHECK=1, because its kernels clamp them.
// `ranges` are those of its first query, num_ranges of each.
inline void check_ranges(const int64_t* ranges, int64_t num_ranges, int64_t seqlen_q, int64_t seqlen_k,
                         int64_t sequence) {
  const at::IntArrayRef all(ranges, 2 * num_ranges * seqlen_q);
  for (int64_t i = 0; i < seqlen_q; ++i) {
    const auto row = all.slice(2 * num_ranges * i, 2 * num_ranges);
    const bool sorted = std::is_sorted(row.begin(), row.end());
    TORCH_CHECK_VALUE(sorted && 0 <= row.front() && row.back() <= seqlen_k, "pyattn: key_ranges must hold ",
                      num_ranges == 1 ? "0 <= begin <= end" : "sorted, disjoint intervals 0 <= begin <= end",
                      " <= seqlen_k = ", seqlen_k, ", got ", row, " for query ", i, " of sequence ", sequence);
  }
}

// Key ranges with the rows of every query: kernels read no broadcast row.
inline Tensor ranges_of_queries(const Tensor& ranges, int64_t seqlen_q, bool packed) {
  if (packed || ranges.size(1) == seqlen_q) return ranges;
  auto sizes = ranges.sizes().vec();
  sizes[1] = seqlen_q;
  return ranges.expand(sizes);
}

inline void fill_mask(MaskParams& mask, int64_t seqlen_q, bool packed, const Options& options, Kept& kept) {
  mask.causal = options.causal;
  if (options.q_offset) mask.q_offset = options.q_offset->expect_int();
  mask.q_offsets = options.q_offsets ? kept.indices(*options.q_offsets) : nullptr;
  mask.window_left = options.window[0].expect_int(), mask.window_right = options.window[1].expect_int();
  if (options.mask) mask.shown = broadcast_view(*options.mask, input_data(*options.mask));
  if (!options.key_ranges) return;
  const Tensor ranges = ranges_of_queries(*options.key_ranges, seqlen_q, packed);
  mask.key_ranges = kept.indices(ranges);
  mask.num_ranges = ranges.dim() == (packed ? 3 : 4) ? ranges.size(-2) : 1;
  mask.key_ranges_stride_b = packed || ranges.size(0) == 1 ? 0 : 2 * mask.num_ranges * ranges.size(1);
}

inline void fill_score(ScoreParams& score, at::ScalarType type, const Options& options, Kept& kept) {
  score.softcap = options.softcap;
  if (options.bias) score.bias = bias_view(*options.bias, type, input_data(*options.bias));
  const auto rows = [&](const optional<Tensor>& t) { return t ? kept.dense(*t, row_dtype(type)) : nullptr; };
  score.alibi_slopes = rows(options.alibi_slopes), score.sinks = rows(options.sinks);
  if (options.alibi_slopes && options.alibi_slopes->dim() == 2) score.slopes_stride_b = options.alibi_slopes->size(1);
  score.relative_bias = rows(options.relative_bias);
  if (!options.relative_bias) return;
  const Tensor& relative = *options.relative_bias;
  const int64_t heads = relative.size(-2), count = relative.size(-1);
  score.reach = count / 2, score.relative_stride_h = heads > 1 ? count : 0;
  score.relative_stride_b = relative.dim() == 3 ? heads * count : 0;
}

// Checks origins; on a GPU only with PYATTN_CHECK=1, because its kernels take any.
inline void check_origins(const Tensor& origins, Kept& kept) {
  const int64_t* values = kept.indices(origins.cpu());
  for (int64_t i = 0; i < origins.numel(); ++i)
    TORCH_CHECK_VALUE(values[i] >= 0, "pyattn: dropout_origins must be at least 0, got ", values[i], " in row ", i / 5);
}

inline void fill_dropout(DropoutParams& dropout, const Options& options, Kept& kept) {
  dropout.threshold = static_cast<uint32_t>(std::min(std::nearbyint(65536 * options.dropout_p), 65535.0));
  dropout.seed = options.dropout_seed ? options.dropout_seed->const_data_ptr<int64_t>() : nullptr;
  if (!options.dropout_origins) return;
  const Tensor& origins = *options.dropout_origins;
  if (origins.is_cpu() || checks_gpu()) check_origins(origins, kept);
  static_assert(sizeof(DropoutOrigin) == 5 * sizeof(int64_t));
  dropout.origins = static_cast<const DropoutOrigin*>(kept.dense(origins, at::kLong));
  dropout.origins_stride_b = origins.size(0) > 1;
}

// Fills the params that do not depend on how sequences lie in memory; the default of q_offset does.
inline void fill_options(ForwardParams& p, at::ScalarType type, const Options& options, Kept& kept) {
  p.softmax_scale = options.softmax_scale.value_or(default_softmax_scale(p.head_dim));
  fill_mask(p.mask, p.seqlen_q, p.packed.sequences, options, kept);
  fill_score(p.score, type, options, kept);
  fill_dropout(p.dropout, options, kept);
}

inline void fill_inputs(ForwardParams& p, const Tensor& q, const Tensor& k, const Tensor& v, int64_t seqlen_k,
                        const Options& options, Kept& kept) {
  p.batch = q.size(0), p.num_heads_q = q.size(1), p.num_heads_kv = k.size(1);
  p.seqlen_q = q.size(2), p.seqlen_k = seqlen_k, p.head_dim = q.size(3), p.head_dim_v = v.size(3);
  p.cpu.pairs = static_cast<double>(p.batch) * static_cast<double>(p.seqlen_q) * static_cast<double>(p.seqlen_k);
  fill_options(p, q.scalar_type(), options, kept);
  if (!options.q_offset) p.mask.q_offset = default_q_offset(p.seqlen_q, p.seqlen_k);
  if (!options.key_ranges || !(q.is_cpu() || checks_gpu())) return;
  const int64_t* ranges =
      q.is_cpu() ? p.mask.key_ranges : kept.indices(ranges_of_queries(*options.key_ranges, p.seqlen_q, false).cpu());
  for (int64_t b = 0; b < options.key_ranges->size(0); ++b)
    check_ranges(ranges + b * p.mask.key_ranges_stride_b, p.mask.num_ranges, p.seqlen_q, p.seqlen_k, b);
}

}  // namespace pyattn
