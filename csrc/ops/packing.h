// Packing: sequences one after the other in one tensor, and the arguments that tell them apart.
#pragma once

#include <ATen/ops/empty.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "attention.h"
#include "ops/checks.h"
#include "ops/operators.h"
#include "ops/options.h"
#include "ops/params.h"
#include "shared/defaults.h"

namespace pyattn {

// One line per argument, in the form of PYATTN_OPTIONS.
#define PYATTN_PACKING(X)                                                                                              \
  X(Tensor, cu_seqlens_q, "Tensor", "") /* (sequences + 1), int32 or int64: where each begins and the last one ends */ \
  X(Tensor, cu_seqlens_k, "Tensor", "") /* the same for keys */                                                        \
  X(SymInt, max_seqlen_q, "SymInt", "") /* no sequence is longer */                                                    \
  X(SymInt, max_seqlen_k, "SymInt", "")                                                                                \
  X(optional<Tensor>, seqused_k, "Tensor?", "=None") /* (sequences), int32 or int64: how many keys of each are used */

struct Packing {
  PYATTN_FIELDS(Packing, PYATTN_PACKING)
};
#define PYATTN_PACKING_SCHEMA PYATTN_SCHEMA(PYATTN_PACKING)

// The number of sequences.
inline SymInt sequences(const Packing& packing) { return packing.cu_seqlens_q.sym_size(0) - 1; }

inline void check_seqused(const Tensor& seqused_k, const SymInt& batch, at::Device device) {
  check_given("seqused_k", seqused_k, device, {at::kInt, at::kLong});
  const auto sizes = seqused_k.sym_sizes();
  TORCH_CHECK_VALUE(sizes.size() == 1 && sizes[0] == batch, "pyattn: seqused_k must have shape (", batch, "), got ",
                    sizes);
}

// Checks all that does not depend on where keys lie.
inline void check_packing(const Tensor& q, const Packing& packing, const Options& options) {
  check_given("cu_seqlens_q", packing.cu_seqlens_q, q.device(), {at::kInt, at::kLong});
  check_given("cu_seqlens_k", packing.cu_seqlens_k, q.device(), {at::kInt, at::kLong});
  const auto cu_q = packing.cu_seqlens_q.sym_sizes(), cu_k = packing.cu_seqlens_k.sym_sizes();
  TORCH_CHECK_VALUE(cu_q.size() == 1 && cu_q == cu_k && cu_q[0] >= 1,
                    "pyattn: cu_seqlens_q and cu_seqlens_k must have shape (sequences + 1), got ", cu_q, " and ", cu_k);
  TORCH_CHECK_VALUE(packing.max_seqlen_q >= 0 && packing.max_seqlen_k >= 0,
                    "pyattn: max_seqlen_q and max_seqlen_k must be at least 0, got ", packing.max_seqlen_q, " and ",
                    packing.max_seqlen_k);
  if (packing.seqused_k) check_seqused(*packing.seqused_k, sequences(packing), q.device());
  TORCH_CHECK_NOT_IMPLEMENTED(!options.mask, "pyattn: packed sequences take no mask, got one of shape ",
                              options.mask->sym_sizes());
  TORCH_CHECK_NOT_IMPLEMENTED(!options.bias, "pyattn: packed sequences take no bias, got one of shape ",
                              options.bias->sym_sizes());
  TORCH_CHECK_NOT_IMPLEMENTED(!options.selected, "pyattn: packed sequences take no selected, got one of shape ",
                              options.selected->sym_sizes());
  check_options(q, sequences(packing), q.sym_size(1), options);
  if (!options.key_ranges) return;
  check_given("key_ranges", *options.key_ranges, q.device(), {at::kInt, at::kLong});
  const SymInt tokens = q.sym_size(0);
  TORCH_CHECK_VALUE(hold_ranges(*options.key_ranges, 1) && options.key_ranges->sym_size(0) == tokens,
                    "pyattn: key_ranges must have shape (", tokens, ", 2) or (", tokens, ", 1 to ", kMostRanges,
                    ", 2), got ", options.key_ranges->sym_sizes());
}

inline void check_packed(const Tensor& q, const Tensor& k, const Tensor& v, const Packing& packing,
                         const Options& options) {
  check_defined(q, k, v);
  TORCH_CHECK_VALUE(q.dim() == 3 && k.dim() == 3 && v.dim() == 3,
                    "pyattn: packed q, k and v must have 3 dimensions (tokens, num_heads, head_dim), got q ",
                    q.sym_sizes(), ", k ", k.sym_sizes(), " and v ", v.sym_sizes());
  dtype_of(q.scalar_type());
  check_fit(q, k, v, 1);
  check_packing(q, packing, options);
}

// total_k of paged keys, which their block table bounds instead.
inline constexpr int64_t kAnyTokens = std::numeric_limits<int64_t>::max();

// Checks that cu_seqlens starts at 0, never decreases and ends within the tokens. Returns the largest length.
inline int64_t check_starts(const char* name, const int64_t* starts, int64_t batch, int64_t tokens) {
  TORCH_CHECK_VALUE(starts[0] == 0, "pyattn: ", name, " must start at 0, got ", starts[0]);
  int64_t longest = 0;
  for (int64_t b = 1; b <= batch; ++b) {
    TORCH_CHECK_VALUE(starts[b - 1] <= starts[b], "pyattn: ", name, " must never decrease, got ", starts[b], " after ",
                      starts[b - 1], " at ", b);
    TORCH_CHECK_VALUE(starts[b] <= tokens, "pyattn: ", name, " must end within the ", tokens, " tokens, got ",
                      starts[b], " at ", b);
    longest = std::max(longest, starts[b] - starts[b - 1]);
  }
  return longest;
}

inline void check_longest(const char* name, int64_t longest, const SymInt& bound) {
  TORCH_CHECK_VALUE(longest <= bound, "pyattn: ", name, " must be at least the longest sequence, got ", bound, " and ",
                    longest);
}

// Checks and returns the number of keys of sequence b that are used.
inline int64_t check_used(const int64_t* cu_seqlens_k, const int64_t* seqused_k, int64_t b) {
  const int64_t length = cu_seqlens_k[b + 1] - cu_seqlens_k[b];
  if (!seqused_k) return length;
  TORCH_CHECK_VALUE(0 <= seqused_k[b] && seqused_k[b] <= length, "pyattn: seqused_k must be between 0 and the ", length,
                    " keys of sequence ", b, ", got ", seqused_k[b]);
  return seqused_k[b];
}

// Checks the indices of p, and computes its sequences, largest lengths and pairs from them.
inline void place_sequences(ForwardParams& p, const Packing& packing) {
  const PackedParams& packed = p.packed;
  p.seqlen_q = check_starts("cu_seqlens_q", packed.cu_seqlens_q, p.batch, packed.total_q);
  p.seqlen_k = check_starts("cu_seqlens_k", packed.cu_seqlens_k, p.batch, packed.total_k);
  check_longest("max_seqlen_q", p.seqlen_q, packing.max_seqlen_q);
  check_longest("max_seqlen_k", p.seqlen_k, packing.max_seqlen_k);
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t first_q = packed.cu_seqlens_q[b], first_k = packed.cu_seqlens_k[b],
                  seqlen_q = packed.cu_seqlens_q[b + 1] - first_q,
                  seqlen_k = check_used(packed.cu_seqlens_k, packed.seqused_k, b);
    const int64_t num_ranges = p.mask.num_ranges;
    if (p.mask.key_ranges)
      check_ranges(p.mask.key_ranges + 2 * num_ranges * first_q, num_ranges, seqlen_q, seqlen_k, b);
    packed.sequences[b] = {first_q, first_k, seqlen_q, seqlen_k};
    if (packed.default_offsets) packed.default_offsets[b] = default_q_offset(seqlen_q, seqlen_k);
    p.cpu.pairs += static_cast<double>(seqlen_q) * static_cast<double>(seqlen_k);
  }
  packed.sequences[p.batch] = {packed.cu_seqlens_q[p.batch], packed.cu_seqlens_k[p.batch], 0, 0};
}

// Checks indices on a GPU as those on a CPU, by copying them to the host.
inline void check_sequences(ForwardParams p, const Packing& packing, const Options& options) {
  Kept kept;
  const auto on_host = [&](const Tensor& t) { return kept.indices(t.cpu()); };
  std::vector<Sequence> sequences(p.batch + 1);
  p.packed.cu_seqlens_q = on_host(packing.cu_seqlens_q), p.packed.cu_seqlens_k = on_host(packing.cu_seqlens_k);
  p.packed.seqused_k = packing.seqused_k ? on_host(*packing.seqused_k) : nullptr;
  p.mask.key_ranges = options.key_ranges ? on_host(*options.key_ranges) : nullptr;
  p.packed.sequences = sequences.data();
  p.packed.default_offsets = nullptr;
  place_sequences(p, packing);
}

// Indices on a GPU are read here only with PYATTN_CHECK=1: its kernels place the sequences, and those longer than
// max_seqlen_q or max_seqlen_k are invalid. Keys with four dimensions are paged; pages.h fills in where they are.
inline void fill_packed(ForwardParams& p, const Tensor& q, const Tensor& k, const Tensor& v, const Packing& packing,
                        const Options& options, Kept& kept) {
  p.batch = packing.cu_seqlens_q.size(0) - 1, p.num_heads_q = q.size(1), p.num_heads_kv = k.size(-2);
  p.head_dim = q.size(2), p.head_dim_v = v.size(-1);
  p.packed.cu_seqlens_q = kept.indices(packing.cu_seqlens_q);
  p.packed.cu_seqlens_k = kept.indices(packing.cu_seqlens_k);
  p.packed.seqused_k = packing.seqused_k ? kept.indices(*packing.seqused_k) : nullptr;
  p.packed.total_q = q.size(0), p.packed.total_k = k.dim() == 3 ? k.size(0) : kAnyTokens;
  const auto indices = packing.cu_seqlens_q.options().dtype(at::kLong);
  constexpr int64_t each = sizeof(Sequence) / sizeof(int64_t);
  p.packed.sequences = static_cast<Sequence*>(kept.keep(at::empty({(p.batch + 1) * each}, indices)).mutable_data_ptr());
  fill_options(p, q.scalar_type(), options, kept);
  if (!options.q_offset && !options.q_offsets) {
    p.packed.default_offsets = kept.keep(at::empty({p.batch}, indices)).mutable_data_ptr<int64_t>();
    p.mask.q_offsets = p.packed.default_offsets;
  }
  if (q.is_cpu()) return place_sequences(p, packing);
  if (checks_gpu()) check_sequences(p, packing, options);
  p.seqlen_q = packing.max_seqlen_q.min(p.packed.total_q).expect_int();
  p.seqlen_k = packing.max_seqlen_k.min(p.packed.total_k).expect_int();
}

}  // namespace pyattn
