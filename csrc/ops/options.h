// Options: the arguments that every attention operator takes beside its tensors, and their checks.
#pragma once

#include <array>
#include <cmath>
#include <utility>

#include "ops/checks.h"
#include "ops/operators.h"

namespace pyattn {

// One line per option, in the form of operators.h and in the order of every operator's arguments.
#define PYATTN_OPTIONS(X)                                                                                             \
  X(optional<double>, softmax_scale, "float?", "=None")                                                               \
  X(bool, causal, "bool", "=True")                                                                                    \
  X(optional<SymInt>, q_offset, "SymInt?", "=None")                                                                   \
  X(optional<Tensor>, q_offsets, "Tensor?", "=None")       /* (batch), int64, instead of q_offset */                  \
  X(c10::SymIntArrayRef, window, "SymInt[2]", "=[-1, -1]") /* left, right; -1: no bound */                            \
  X(optional<Tensor>, key_ranges, "Tensor?", "=None")      /* (batch or 1, seqlen_q or 1[, up to 4], 2), integers */  \
  X(optional<Tensor>, mask, "Tensor?", "=None")            /* bool, true = visible; shape as for bias */              \
  X(double, softcap, "float", "=0.0")                                                                                 \
  X(optional<Tensor>, bias, "Tensor?", "=None")          /* broadcasts to (batch, num_heads_q, seqlen_q, seqlen_k) */ \
  X(optional<Tensor>, alibi_slopes, "Tensor?", "=None")  /* (num_heads_q) or (batch, num_heads_q) */                  \
  X(optional<Tensor>, sinks, "Tensor?", "=None")         /* (num_heads_q) */                                          \
  X(optional<Tensor>, relative_bias, "Tensor?", "=None") /* (batch or none, num_heads_q or 1, 2 * reach + 1) */       \
  X(double, dropout_p, "float", "=0.0")                                                                               \
  X(optional<Tensor>, dropout_seed, "Tensor?", "=None")    /* (), int64 */                                            \
  X(optional<Tensor>, dropout_origins, "Tensor?", "=None") /* (batch or 1, 5), int64: DropoutOrigin */                \
  X(optional<Tensor>, selected, "Tensor?",                                                                            \
    "=None") /* (batch or 1, 1 or num_heads_kv or num_heads_q, seqlen_q, count), integers */                          \
  X(int64_t, selected_block, "int", "=1") /* keys of each entry of selected */

struct Options {
  PYATTN_FIELDS(Options, PYATTN_OPTIONS)
};
#define PYATTN_OPTIONS_SCHEMA PYATTN_SCHEMA(PYATTN_OPTIONS)

// The first options, and the defaults of all others.
inline Options few_options(optional<double> softmax_scale, bool causal, optional<SymInt> q_offset) {
  static const std::array<SymInt, 2> unbounded{-1, -1};
  Options options{};
  options.softmax_scale = softmax_scale, options.causal = causal, options.q_offset = std::move(q_offset);
  options.window = unbounded, options.selected_block = 1;
  return options;
}

// Whether key ranges have this many dimensions before their pairs: one pair, or a dimension of 1 to kMostRanges pairs.
inline bool hold_ranges(const Tensor& t, int64_t dims) {
  const bool several = t.dim() == dims + 2;
  return (several || t.dim() == dims + 1) && t.sym_size(-1) == 2 &&
         (!several || (t.sym_size(-2) >= 1 && t.sym_size(-2) <= kMostRanges));
}

inline void check_key_ranges(const Tensor& q, const Options& options) {
  if (!options.key_ranges) return;
  const Tensor& t = *options.key_ranges;
  check_given("key_ranges", t, q.device(), {at::kInt, at::kLong});
  const SymInt batch = q.sym_size(0), seqlen_q = q.sym_size(2);
  const auto fits = [&](int64_t d, const SymInt& full) { return t.sym_size(d) == full || t.sym_size(d) == 1; };
  TORCH_CHECK_VALUE(hold_ranges(t, 2) && fits(0, batch) && fits(1, seqlen_q), "pyattn: key_ranges must have shape (",
                    batch, " or 1, ", seqlen_q, " or 1, 2) or (", batch, " or 1, ", seqlen_q, " or 1, 1 to ",
                    kMostRanges, ", 2), got ", t.sym_sizes());
}

// Checks a tensor that broadcasts to the scores, (batch, num_heads_q, seqlen_q, seqlen_k).
inline void check_scores(const char* name, const Tensor& t, const Tensor& q, const SymInt& seqlen_k) {
  check_device(name, t, q.device());
  const std::array<SymInt, 4> full{q.sym_size(0), q.sym_size(1), q.sym_size(2), seqlen_k};
  bool fits = 1 <= t.dim() && t.dim() <= 4;
  for (int64_t d = 1; fits && d <= t.dim(); ++d) fits = t.sym_size(-d) == 1 || t.sym_size(-d) == full[4 - d];
  TORCH_CHECK_VALUE(fits, "pyattn: ", name, " must have 1 to 4 dimensions, each 1 or that of ",
                    c10::SymIntArrayRef(full), ", got ", t.sym_sizes());
}

inline void check_mask(const Tensor& q, const SymInt& seqlen_k, const Options& options) {
  if (!options.mask) return;
  check_type("mask", *options.mask, {at::kBool});
  check_scores("mask", *options.mask, q, seqlen_k);
}

inline void check_bias(const Tensor& q, const SymInt& seqlen_k, const Options& options) {
  if (!options.bias) return;
  TORCH_CHECK_TYPE(options.bias->scalar_type() != at::kBool,
                   "pyattn: bias must be float, added to the scores (use mask for a bool mask, True = takes part), "
                   "got bool");
  check_type("bias", *options.bias, {q.scalar_type(), at::kFloat});
  check_scores("bias", *options.bias, q, seqlen_k);
}

// Lists may be shared by all heads or by those of a KV head; num_heads_kv: heads of k.
inline void check_selected(const Tensor& q, const SymInt& num_heads_kv, const SymInt& seqlen_k,
                           const Options& options) {
  TORCH_CHECK_VALUE(options.selected_block >= 1, "pyattn: selected_block must be at least 1, got ",
                    options.selected_block);
  if (!options.selected) return;
  const Tensor& t = *options.selected;
  check_given("selected", t, q.device(), {at::kInt, at::kLong});
  const SymInt batch = q.sym_size(0), heads = q.sym_size(1), seqlen_q = q.sym_size(2);
  const auto sizes = t.sym_sizes();
  TORCH_CHECK_VALUE(t.dim() == 4 && (sizes[0] == batch || sizes[0] == 1) &&
                        (sizes[1] == 1 || sizes[1] == num_heads_kv || sizes[1] == heads) && sizes[2] == seqlen_q,
                    "pyattn: selected must have shape (", batch, " or 1, 1 or ", num_heads_kv, " or ", heads, ", ",
                    seqlen_q, ", count), got ", sizes);
  constexpr int64_t kMostKeys = INT32_MAX;
  TORCH_CHECK_NOT_IMPLEMENTED(seqlen_k <= kMostKeys && sizes[3] <= kMostKeys && options.selected_block <= kMostKeys,
                              "pyattn: selected keys take at most ", kMostKeys,
                              " keys, entries and keys of a block, got ", seqlen_k, ", ", sizes[3], " and ",
                              options.selected_block);
  TORCH_CHECK_NOT_IMPLEMENTED(!q.is_cuda(), "pyattn: selected keys are computed on the CPU, got q on ", q.device(),
                              "; on a GPU pass a mask");
}

// Checks the options that packed sequences take in another shape, or not at all.
inline void check_options_of_batch(const Tensor& q, const SymInt& seqlen_k, const Options& options) {
  check_key_ranges(q, options);
  check_mask(q, seqlen_k, options);
  check_bias(q, seqlen_k, options);
}

// Kernels hold the scale in the type that they compute in: a smaller one would round to 0 there and give every key the
// same weight, a larger one would overflow when multiplied by log2(e).
inline void check_softmax_scale(double scale, at::ScalarType type) {
  TORCH_CHECK_VALUE(std::isfinite(scale), "pyattn: softmax_scale must be finite, got ", scale);
  const bool wide = type == at::kDouble;
  const double least = std::ldexp(1, wide ? -1074 : -149), most = std::ldexp(1, wide ? 1022 : 126);
  TORCH_CHECK_VALUE(scale == 0 || (least <= std::abs(scale) && std::abs(scale) <= most),
                    "pyattn: softmax_scale must be 0 or between ", least, " and ", most, " in magnitude for ",
                    name_of(type), ", got ", scale);
}

// Checks the options whose shapes have no seqlen in them; batch: the number of sequences.
inline void check_options(const Tensor& q, const SymInt& batch, const SymInt& heads, const Options& options) {
  check_softmax_scale(options.softmax_scale.value_or(1), q.scalar_type());
  if (options.q_offsets) check_tensor("q_offset", *options.q_offsets, q.device(), at::kLong, {batch});
  TORCH_CHECK_VALUE(options.window.size() == 2 && options.window[0] >= -1 && options.window[1] >= -1,
                    "pyattn: window must be (left, right), each at least -1, got ", options.window);
  TORCH_CHECK_VALUE(std::isfinite(options.softcap) && options.softcap >= 0,
                    "pyattn: softcap must be finite and at least 0, got ", options.softcap);
  const at::ScalarType type = q.scalar_type();
  if (options.alibi_slopes) {
    const Tensor& t = *options.alibi_slopes;
    check_given("alibi_slopes", t, q.device(), {type, at::kFloat});
    const auto sizes = t.sym_sizes();
    TORCH_CHECK_VALUE((t.dim() == 1 && sizes[0] == heads) || (t.dim() == 2 && sizes[0] == batch && sizes[1] == heads),
                      "pyattn: alibi_slopes must have shape (", heads, ") or (", batch, ", ", heads, "), got ", sizes);
  }
  if (options.sinks) {
    check_given("sinks", *options.sinks, q.device(), {type, at::kFloat});
    TORCH_CHECK_VALUE(options.sinks->dim() == 1 && options.sinks->sym_size(0) == heads,
                      "pyattn: sinks must have shape (", heads, "), got ", options.sinks->sym_sizes());
  }
  if (options.relative_bias) {
    const Tensor& t = *options.relative_bias;
    check_given("relative_bias", t, q.device(), {type, at::kFloat});
    const auto sizes = t.sym_sizes();
    const bool dims = t.dim() == 2 || (t.dim() == 3 && sizes[0] == batch);
    TORCH_CHECK_VALUE(dims && (sizes.end()[-2] == heads || sizes.end()[-2] == 1) && sizes.end()[-1] % 2 == 1,
                      "pyattn: relative_bias must have shape (", heads, " or 1, 2 * reach + 1) or (", batch, ", ",
                      heads, " or 1, 2 * reach + 1), got ", sizes);
  }
  const double p = options.dropout_p;
  TORCH_CHECK_VALUE(0 <= p && p < 1, "pyattn: dropout_p must be at least 0 and below 1, got ", p);
  TORCH_CHECK_VALUE(p == 0 || options.dropout_seed, "pyattn: dropout_p ", p, " needs a dropout_seed, got None");
  if (options.dropout_seed) check_tensor("dropout_seed", *options.dropout_seed, q.device(), at::kLong, {});
  if (options.dropout_origins) {
    const Tensor& t = *options.dropout_origins;
    check_given("dropout_origins", t, q.device(), {at::kLong});
    const auto sizes = t.sym_sizes();
    TORCH_CHECK_VALUE(t.dim() == 2 && (sizes[0] == batch || sizes[0] == 1) && sizes[1] == 5,
                      "pyattn: dropout_origins must have shape (", batch, " or 1, 5), got ", sizes);
  }
}

// The results of forward and backward in the operators' schemas.
#define PYATTN_FORWARD_RESULTS "(Tensor out, Tensor lse, Tensor row_max, Tensor row_sum)"
#define PYATTN_BACKWARD_RESULTS \
  "(Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dalibi_slopes, Tensor dsinks, Tensor drelative_bias)"

// output_mask: whether dbias, dalibi_slopes, dsinks and drelative_bias are wanted, each only if its tensor is given.
using Wanted = std::array<bool, 4>;
inline void check_wanted(const Options& options, const Wanted& output_mask) {
  TORCH_CHECK_VALUE(
      (!output_mask[0] || options.bias) && (!output_mask[1] || options.alibi_slopes) &&
          (!output_mask[2] || options.sinks) && (!output_mask[3] || options.relative_bias),
      "pyattn: output_mask must ask for gradients of a bias, alibi_slopes, sinks and a relative_bias that "
      "are given, got ",
      at::ArrayRef<bool>(output_mask.data(), output_mask.size()));
}

inline void check_defined(const Tensor& q, const Tensor& k, const Tensor& v) {
  TORCH_CHECK_TYPE(q.defined() && k.defined() && v.defined(), "pyattn: q, k and v must be Tensors, got None");
}

// Checks the columns and the number of heads of k, whose dimension `heads` they are, against q's.
inline void check_heads(const Tensor& q, const Tensor& k, int64_t heads) {
  const SymInt num_heads_q = q.sym_size(1), num_heads_kv = k.sym_size(heads);
  TORCH_CHECK_VALUE(k.sym_size(-1) == q.sym_size(-1), "pyattn: q and k must have the same head_dim, got ",
                    q.sym_size(-1), " and ", k.sym_size(-1));
  TORCH_CHECK_VALUE(num_heads_kv == 0 ? num_heads_q == 0 : num_heads_q % num_heads_kv == 0,
                    "pyattn: num_heads_q must be a multiple of num_heads_kv, got ", num_heads_q, " and ", num_heads_kv);
}

// Checks k and v against q, once each has the right number of dimensions; `heads` is the head dimension of k and v.
inline void check_fit(const Tensor& q, const Tensor& k, const Tensor& v, int64_t heads) {
  check_heads(q, k, heads);
  check_tensor("k", k, q.device(), q.scalar_type(), k.sym_sizes());
  check_tensor("v", v, q.device(), q.scalar_type(), with_columns(k, v.sym_size(-1)));
}

inline void check_inputs(const Tensor& q, const Tensor& k, const Tensor& v, const Options& options) {
  check_defined(q, k, v);
  TORCH_CHECK_VALUE(q.dim() == 4 && k.dim() == 4 && v.dim() == 4,
                    "pyattn: q, k and v must have 4 dimensions (batch, num_heads, seqlen, head_dim), got q ",
                    q.sym_sizes(), ", k ", k.sym_sizes(), " and v ", v.sym_sizes());
  dtype_of(q.scalar_type());
  const SymInt batch = q.sym_size(0);
  TORCH_CHECK_VALUE(k.sym_size(0) == batch, "pyattn: q and k must have the same batch, got ", batch, " and ",
                    k.sym_size(0));
  check_fit(q, k, v, 1);
  check_options(q, batch, q.sym_size(1), options);
  check_options_of_batch(q, k.sym_size(2), options);
  check_selected(q, k.sym_size(1), k.sym_size(2), options);
}

}  // namespace pyattn
