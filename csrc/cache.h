// Caches: what the operators that change one in place check, and how they read lengths.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <limits>

#include "checks.h"

namespace pyattn {

// Errors unless t can stand beside `storage`, which lies in the cache.
inline void check_beside(const char* name, const Tensor& t, const Tensor& storage, c10::SymIntArrayRef sizes) {
  TORCH_CHECK_TYPE(t.scalar_type() == storage.scalar_type(), "pyattn: ", name, " must have the cache's dtype ",
                   c10::getDtypeNames(storage.scalar_type()).first, ", got ",
                   c10::getDtypeNames(t.scalar_type()).first);
  TORCH_CHECK_VALUE(t.device() == storage.device(), "pyattn: ", name, " must be on the cache's device, got ",
                    t.device(), " and ", storage.device());
  TORCH_CHECK_VALUE(t.sym_sizes() == sizes, "pyattn: ", name, " must have shape ", sizes, ", got ", t.sym_sizes());
}

// Likewise an int64 for each sequence.
inline void check_indices(const char* name, const Tensor& t, const Tensor& lengths) {
  check_type(name, t, {at::kLong});
  check_beside(name, t, lengths, lengths.sym_sizes());
}

inline void check_cache_lengths(const Tensor& lengths, const Tensor& keys, const SymInt& sequences) {
  check_type("lengths", lengths, {at::kLong});
  TORCH_CHECK_VALUE(lengths.device() == keys.device(), "pyattn: lengths must be on the cache's device, got ",
                    lengths.device(), " and ", keys.device());
  const std::array<SymInt, 1> batch{sequences};
  const c10::SymIntArrayRef wanted(batch);
  TORCH_CHECK_VALUE(lengths.sym_sizes() == wanted, "pyattn: lengths must have shape ", wanted, ", got ",
                    lengths.sym_sizes());
}

inline void check_new(const char* name, const Tensor& t, const Tensor& storage, const SymInt& count) {
  const std::array<SymInt, 4> sizes{storage.sym_size(0), storage.sym_size(1), count, storage.sym_size(3)};
  check_beside(name, t, storage, sizes);
}

// A cache without pages.
inline void check_storage(const Tensor& keys, const Tensor& values, const Tensor& lengths, const Tensor& starts) {
  TORCH_CHECK_VALUE(keys.dim() == 4 && values.dim() == 4,
                    "pyattn: keys and values must have 4 dimensions (batch, num_heads, slots, head_dim), got ",
                    keys.sym_sizes(), " and ", values.sym_sizes());
  const std::array<SymInt, 4> sizes{keys.sym_size(0), keys.sym_size(1), keys.sym_size(2), values.sym_size(3)};
  check_beside("values", values, keys, sizes);
  check_cache_lengths(lengths, keys, keys.sym_size(0));
  check_indices("starts", starts, lengths);
}

inline void check_append(const Tensor& keys, const Tensor& values, const Tensor& lengths, const Tensor& starts,
                         const Tensor& k, const Tensor& v, const optional<Tensor>& new_lengths) {
  check_storage(keys, values, lengths, starts);
  TORCH_CHECK_VALUE(k.dim() == 4, "pyattn: k must have 4 dimensions (batch, num_heads, new, head_dim), got ",
                    k.sym_sizes());
  check_new("k", k, keys, k.sym_size(2));
  check_new("v", v, values, k.sym_size(2));
  if (new_lengths) check_indices("lengths", *new_lengths, lengths);
}

// How many of the new positions count for sequence b, and whether they fit.
inline void check_added(int64_t length, int64_t added, int64_t fresh, int64_t most, int64_t b) {
  TORCH_CHECK_VALUE(0 <= added && added <= fresh, "pyattn: each of lengths must be between 0 and ", fresh, ", got ",
                    added, " at ", b);
  TORCH_CHECK_VALUE(length <= most - added, "pyattn: a sequence must not outgrow the cache's max_seqlen of ", most,
                    ", got ", length, " + ", added, " positions of sequence ", b);
}

// Values of each sequence, on the host.
struct Values {
  Tensor t;
  explicit Values(const Tensor& values) : t(values.cpu().contiguous()) {}
  int64_t operator[](int64_t b) const { return t.const_data_ptr<int64_t>()[b]; }
};

// What an append reads: how far each sequence has come, and how many of the `fresh` positions it gets.
inline void check_room(const Tensor& lengths, const Tensor& starts, const optional<Tensor>& new_lengths, int64_t fresh,
                       int64_t slots, int64_t kept_positions) {
  const Values length(lengths), start(starts), added(new_lengths ? *new_lengths : lengths);
  const bool ring = slots > kept_positions;
  const int64_t most = ring ? std::numeric_limits<int64_t>::max() : kept_positions;
  for (int64_t b = 0; b < lengths.size(0); ++b) {
    TORCH_CHECK_VALUE(0 <= start[b] && start[b] <= length[b] && length[b] - start[b] <= slots,
                      "pyattn: each of the cache's lengths must be between its start and ", slots, " more, got ",
                      length[b], " and ", start[b], " at ", b);
    check_added(length[b], new_lengths ? added[b] : fresh, fresh, most, b);
  }
}

// What a reorder reads: a sequence for each.
inline void check_order(const Tensor& idx) {
  const Values index(idx);
  const int64_t batch = idx.size(0);
  for (int64_t b = 0; b < batch; ++b)
    TORCH_CHECK_VALUE(0 <= index[b] && index[b] < batch, "pyattn: each of idx must be between 0 and ", batch - 1,
                      ", got ", index[b], " at ", b);
}

// Whether query 0 sees only keys that the ring keeps.
inline void check_kept(const Tensor& lengths, const Tensor& q_offset, int64_t window, int64_t kept_positions) {
  const Values length(lengths), offset(q_offset);
  for (int64_t b = 0; b < lengths.size(0); ++b) {
    const int64_t oldest = length[b] - kept_positions, least = oldest + window - 1;
    TORCH_CHECK_VALUE(oldest <= 0 || offset[b] >= least, "pyattn: q_offset must be at least ", least,
                      ", where a window of ", window, " begins with the oldest key that the cache keeps, got ",
                      offset[b], " for sequence ", b);
  }
}

}  // namespace pyattn
