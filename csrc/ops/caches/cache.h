// Caches: the checks of operators that change one in place, and the values that these read on the host.
#pragma once

#include <ATen/MemoryOverlap.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <limits>
#include <utility>

#include "ops/checks.h"

namespace pyattn {

// Where an operator's tensors are: on a GPU their contents are read only with PYATTN_CHECK=1.
enum class Where { kCPU, kGPU };
inline bool reads(Where where) { return where == Where::kCPU || checks_gpu(); }

// The value of n, for which torch.compile specializes.
inline int64_t number(const SymInt& n) { return n.guard_int(__FILE__, __LINE__); }

// check_place: errors unless t has these sizes and is on the device of `storage`, a tensor of the cache.
// check_beside: also errors unless t has the dtype of `storage`.
inline void check_place(const char* name, const Tensor& t, const Tensor& storage, c10::SymIntArrayRef sizes) {
  TORCH_CHECK_VALUE(t.device() == storage.device(), "pyattn: ", name, " must be on the cache's device, got ",
                    t.device(), " and ", storage.device());
  TORCH_CHECK_VALUE(t.sym_sizes() == sizes, "pyattn: ", name, " must have shape ", sizes, ", got ", t.sym_sizes());
}
inline void check_beside(const char* name, const Tensor& t, const Tensor& storage, c10::SymIntArrayRef sizes) {
  TORCH_CHECK_TYPE(t.scalar_type() == storage.scalar_type(), "pyattn: ", name, " must have the cache's dtype ",
                   name_of(storage.scalar_type()), ", got ", name_of(t.scalar_type()));
  check_place(name, t, storage, sizes);
}

// Errors unless t holds an int64 for each sequence.
inline void check_indices(const char* name, const Tensor& t, const Tensor& lengths) {
  check_type(name, t, {at::kLong});
  check_beside(name, t, lengths, lengths.sym_sizes());
}

// Checks only the state, an int64 for each sequence; starts is a ring buffer's.
inline void check_state(const Tensor& lengths, const optional<Tensor>& starts) {
  check_type("lengths", lengths, {at::kLong});
  TORCH_CHECK_VALUE(lengths.dim() == 1, "pyattn: lengths must have shape (batch), got ", lengths.sym_sizes());
  if (starts) check_indices("starts", *starts, lengths);
}

inline void check_cache_lengths(const Tensor& lengths, const Tensor& keys, const SymInt& sequences) {
  check_type("lengths", lengths, {at::kLong});
  check_place("lengths", lengths, keys, sequences);
}

// Checks the keys and values that a cache holds; `dimensions` names their sizes.
inline void check_stored(const Tensor& keys, const Tensor& values, const char* dimensions) {
  TORCH_CHECK_VALUE(keys.dim() == 4 && values.dim() == 4, "pyattn: keys and values must have 4 dimensions ", dimensions,
                    ", got ", keys.sym_sizes(), " and ", values.sym_sizes());
  check_beside("values", values, keys, with_columns(keys, values.sym_size(3)));
}

// Checks the keys and values that are appended; `heads` is the head dimension of the cache.
inline void check_new(const Tensor& keys, const Tensor& values, const Tensor& lengths, const Tensor& k, const Tensor& v,
                      const optional<Tensor>& new_lengths, int64_t heads) {
  TORCH_CHECK_VALUE(k.dim() == 4, "pyattn: k must have 4 dimensions (batch, num_heads, new, head_dim), got ",
                    k.sym_sizes());
  const auto check = [&](const char* name, const Tensor& t, const Tensor& storage) {
    const std::array<SymInt, 4> sizes{lengths.sym_size(0), storage.sym_size(heads), k.sym_size(2), storage.sym_size(3)};
    check_beside(name, t, storage, sizes);
  };
  check("k", k, keys), check("v", v, values);
  if (new_lengths) check_indices("lengths", *new_lengths, lengths);
}

// Checks a cache without pages.
inline void check_storage(const Tensor& keys, const Tensor& values, const Tensor& lengths, const Tensor& starts) {
  check_stored(keys, values, "(batch, num_heads, slots, head_dim)");
  check_cache_lengths(lengths, keys, keys.sym_size(0));
  check_indices("starts", starts, lengths);
}

inline void check_append(const Tensor& keys, const Tensor& values, const Tensor& lengths, const Tensor& starts,
                         const Tensor& k, const Tensor& v, const optional<Tensor>& new_lengths) {
  check_storage(keys, values, lengths, starts);
  check_new(keys, values, lengths, k, v, new_lengths, 1);
}

// Checks `added`, the number of the `fresh` new positions that sequence b gets, and that the cache has room for them.
inline void check_added(int64_t length, int64_t added, int64_t fresh, int64_t most, int64_t b) {
  TORCH_CHECK_VALUE(0 <= added && added <= fresh, "pyattn: each of lengths must be between 0 and ", fresh, ", got ",
                    added, " at ", b);
  TORCH_CHECK_VALUE(length <= most - added, "pyattn: a sequence must not outgrow the cache's max_seqlen of ", most,
                    ", got ", length, " + ", added, " positions of sequence ", b);
}

// The address range [first, second) that the elements of t lie in.
inline std::pair<const char*, const char*> memory_of(const Tensor& t) {
  int64_t last = 0;
  for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  const char* begin = static_cast<const char*>(t.const_data_ptr());
  return {begin, begin + (last + 1) * t.element_size()};
}

// t, or a copy if it may share memory with one of `changed`, which an operator is about to write.
inline Tensor apart_from(std::initializer_list<Tensor> changed, const Tensor& t) {
  if (t.storage().device_type() == at::kMeta || t.numel() == 0) return t;  // also fake tensors
  const auto [begin, end] = memory_of(t);
  for (const Tensor& other : changed) {
    if (other.numel() == 0) continue;
    const auto [first, last] = memory_of(other);
    if (begin < last && first < end) return t.clone();
  }
  return t;
}

inline optional<Tensor> apart_from(std::initializer_list<Tensor> changed, const optional<Tensor>& t) {
  return t ? optional<Tensor>(apart_from(changed, *t)) : t;
}

// Errors if elements share memory, as in an expanded tensor: sequences are written one by one.
inline void check_apart(const char* name, const Tensor& t) {
  TORCH_CHECK_VALUE(at::has_internal_overlap(t) != at::MemOverlap::Yes, "pyattn: the cache's ", name,
                    " must have memory for each element, got shape ", t.sizes(), " with strides ", t.strides());
}

// Checks the tensors that an operator writes to.
inline void check_written(const Tensor& keys, const Tensor& values,
                          std::initializer_list<std::pair<const char*, Tensor>> state) {
  check_apart("k", keys), check_apart("v", values);
  for (const auto& [name, t] : state) check_apart(name, t);
}

// Adds new_lengths to the lengths, or `fresh` if there are none.
inline void add_to(const Tensor& lengths, const optional<Tensor>& new_lengths, int64_t fresh) {
  if (new_lengths)
    lengths.add_(*new_lengths);
  else
    lengths.add_(fresh);
}

// An int64 for each sequence, on the host.
struct Values {
  Tensor t;
  explicit Values(const Tensor& values) : t((values.is_cpu() ? values : values.cpu()).contiguous()) {}
  int64_t operator[](int64_t b) const { return t.const_data_ptr<int64_t>()[b]; }
};

// Checks the length of sequence b, whose first slot holds position `start`.
inline void check_length(int64_t length, int64_t start, int64_t slots, int64_t b) {
  TORCH_CHECK_VALUE(start != 0 || (0 <= length && length <= slots),
                    "pyattn: each of the cache's lengths must be between 0 and ", slots, ", got ", length, " at ", b);
  TORCH_CHECK_VALUE(0 <= start && start <= length && length - start <= slots,
                    "pyattn: each of the cache's lengths must be between its start and ", slots, " more, got ", length,
                    " and ", start, " at ", b);
}

// Checks the state that attention over a cache reads; starts is a ring buffer's. The first of the seqlen_q newest
// queries sees `left` keys before its own, all of which the ring must still hold.
inline void check_newest(const Tensor& lengths, const optional<Tensor>& starts, int64_t seqlen_q, int64_t left,
                         int64_t slots) {
  const Values length(lengths), start(starts ? *starts : lengths);
  for (int64_t b = 0; b < lengths.size(0); ++b) {
    check_length(length[b], starts ? start[b] : 0, slots, b);
    TORCH_CHECK_VALUE(!starts || start[b] <= std::max<int64_t>(length[b] - seqlen_q - left, 0),
                      "pyattn: over the cache's window, seqlen_q must not exceed ", length[b] - start[b] - left,
                      ", where the first query sees the oldest key that is left, got ", seqlen_q, " for sequence ", b);
  }
}

// Checks a truncation. The newest query that stays sees `window` keys, all of which a ring must still hold.
inline void check_truncation(const Tensor& lengths, const optional<Tensor>& starts, const Tensor& kept,
                             int64_t window) {
  const Values length(lengths), start(starts ? *starts : lengths), keep(kept);
  for (int64_t b = 0; b < lengths.size(0); ++b) {
    TORCH_CHECK_VALUE(0 <= keep[b] && keep[b] <= length[b], "pyattn: each of lengths must be between 0 and ", length[b],
                      ", the sequence's length, got ", keep[b], " at ", b);
    TORCH_CHECK_VALUE(!starts || start[b] <= std::max<int64_t>(keep[b] - window, 0),
                      "pyattn: each of lengths must be at least ", start[b] + window, ", where a window of ", window,
                      " keys begins with the oldest one that the cache keeps, got ", keep[b], " at ", b);
  }
}

// Checks what an append reads: each sequence's length, and how many of the `fresh` positions it gets.
inline void check_room(const Tensor& lengths, const Tensor& starts, const optional<Tensor>& new_lengths, int64_t fresh,
                       int64_t slots, int64_t kept_positions) {
  const Values length(lengths), start(starts), added(new_lengths ? *new_lengths : lengths);
  const bool ring = slots > kept_positions;
  const int64_t most = ring ? std::numeric_limits<int64_t>::max() : kept_positions;
  for (int64_t b = 0; b < lengths.size(0); ++b) {
    check_length(length[b], start[b], slots, b);
    check_added(length[b], new_lengths ? added[b] : fresh, fresh, most, b);
  }
}

// Checks what a reorder reads: the sequence that each one becomes.
inline void check_order(const Tensor& idx) {
  const Values index(idx);
  const int64_t batch = idx.size(0);
  for (int64_t b = 0; b < batch; ++b)
    TORCH_CHECK_VALUE(0 <= index[b] && index[b] < batch, "pyattn: each of idx must be between 0 and ", batch - 1,
                      ", got ", index[b], " at ", b);
}

// Errors unless query 0 sees only keys that the ring is sure to keep: the last kept_positions, or, where a
// truncation left fewer, those from its start on.
inline void check_kept(const Tensor& lengths, const Tensor& starts, const Tensor& q_offset, int64_t window,
                       int64_t kept_positions) {
  const Values length(lengths), start(starts), offset(q_offset);
  for (int64_t b = 0; b < lengths.size(0); ++b) {
    const int64_t oldest = std::max(length[b] - kept_positions, start[b]), least = oldest + window - 1;
    TORCH_CHECK_VALUE(oldest <= 0 || offset[b] >= least, "pyattn: q_offset must be at least ", least,
                      ", where a window of ", window, " keys begins with the oldest one that the cache keeps, got ",
                      offset[b], " for sequence ", b);
  }
}

}  // namespace pyattn
