// The operators that change a KV cache in place. Their schemas declare what they mutate, and they read the lengths of
// sequences themselves, where torch.compile does not look, so a decoding loop stays in one graph.
//
// keys [batch][heads][slots][head_dim] and values [batch][heads][slots][head_dim_v] hold position p of
// sequence b in slot p - starts[b], up to position lengths[b]. A ring buffer has more than max_seqlen slots and
// keeps at least the last max_seqlen positions; any other cache has max_seqlen slots, and its starts stay 0.
// On a GPU, whose append is in cache_cuda.cpp, lengths are read only with PYATTN_CHECK=1; what a check would
// refuse is clamped.
#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>

#include <algorithm>
#include <cstring>

#include "ops/caches/cache.h"
#include "ops/devices/huge_pages.h"
#include "ops/caches/keep.h"
#include "ops/operators.h"

namespace pyattn {
namespace {

// Fills new, dense storage with zeros. A query reads all of a cache, up to a fifth faster from huge pages.
void cache_clear(const Tensor& storage) {
  if (storage.is_meta()) return;
  TORCH_CHECK_VALUE(storage.is_non_overlapping_and_dense(), "pyattn: storage must be dense, got strides ",
                    storage.strides());
  prefer_huge_pages(storage);
  storage.zero_();
}

// A copy that a compiled backward keeps: see lengths_before in pyattn/cache/call_gradients.py.
Tensor cache_copy(const Tensor& storage) { return storage.clone(); }

// A sequence's length, the position in its first slot, and the number of new positions that it gets.
struct State {
  int64_t length, start, added;
  bool operator==(const State&) const = default;
};

// Copies storage[b][h][slot + i] = t[b][h][token + i] for the sequences [first, first + count) and i below `rows`.
// A few rows are copied without torch's operators, each of which takes longer than the copy, unless autograd has to
// know or refuse what is written.
void write_rows(const Tensor& storage, const Tensor& t, int64_t first, int64_t count, int64_t slot, int64_t token,
                int64_t rows) {
  constexpr int64_t kFewBytes = 1 << 15;  // torch copies more than that by several threads
  if (t.numel() == 0) return;
  const int64_t row_bytes = t.size(3) * t.element_size();
  const auto plain = [](const Tensor& x) { return x.stride(3) == 1 && !x.requires_grad() && !x._fw_grad(0).defined(); };
  if (storage.is_inference() || !plain(storage) || !plain(t) || count * t.size(1) * rows * row_bytes > kFewBytes) {
    storage.narrow(0, first, count).narrow(2, slot, rows).copy_(t.narrow(0, first, count).narrow(2, token, rows));
    return;
  }
  storage.unsafeGetTensorImpl()->bump_version();  // as copy_ does
  char* const to = static_cast<char*>(storage.mutable_data_ptr());
  const char* const from = static_cast<const char*>(t.const_data_ptr());
  const auto at = [&](const Tensor& of, int64_t b, int64_t h, int64_t s) {
    return (b * of.stride(0) + h * of.stride(1) + s * of.stride(2)) * of.element_size();
  };
  for (int64_t b = first; b < first + count; ++b)
    for (int64_t h = 0; h < t.size(1); ++h)
      for (int64_t i = 0; i < rows; ++i)
        std::memcpy(to + at(storage, b, h, slot + i), from + at(t, b, h, token + i), row_bytes);
}

// Appends the first new_lengths[b] of the new positions to sequence b, or all of them without new_lengths.
// Everything is checked before anything is written.
void cache_append(const Tensor& keys, const Tensor& values, const Tensor& lengths, const Tensor& starts,
                  const Tensor& new_k, const Tensor& new_v, const optional<Tensor>& new_counts, SymInt max_seqlen) {
  check_append(keys, values, lengths, starts, new_k, new_v, new_counts);
  if (keys.is_meta()) return;
  check_written(keys, values, {{"lengths", lengths}, {"starts", starts}});
  const Tensor k = apart_from({keys, values}, new_k), v = apart_from({keys, values}, new_v);
  const optional<Tensor> new_lengths = apart_from({lengths, starts}, new_counts);

  const int64_t batch = keys.size(0), slots = keys.size(2), fresh = k.size(2), kept_positions = number(max_seqlen);
  const Values length(lengths), start(starts), added(new_lengths ? *new_lengths : lengths);
  const auto state = [&](int64_t b) { return State{length[b], start[b], new_lengths ? added[b] : fresh}; };
  check_room(lengths, starts, new_lengths, fresh, slots, kept_positions);
  for (int64_t first = 0, count; first < batch; first += count) {  // adjacent sequences in the same state together
    const State s = state(first);
    for (count = 1; first + count < batch && state(first + count) == s;) ++count;
    int64_t end = s.length - s.start, skipped = 0;
    if (end + s.added > slots) {  // what the ring buffer keeps moves to its first slots
      skipped = std::max<int64_t>(s.added - kept_positions, 0);
      const int64_t kept = std::min(end, kept_positions - s.added + skipped);
      for (const Tensor& storage : {keys, values}) {
        const Tensor rows = storage.narrow(0, first, count);
        rows.narrow(2, 0, kept).copy_(rows.narrow(2, end - kept, kept).clone());  // the two may overlap
      }
      starts.narrow(0, first, count).fill_(s.length - kept + skipped);
      end = kept;
    }
    const int64_t written = s.added - skipped;
    write_rows(keys, k, first, count, end, skipped, written);
    write_rows(values, v, first, count, end, skipped, written);
  }
  add_to(lengths, new_lengths, fresh);
}

// Sequence b becomes a copy of sequence idx[b]; slots that no sequence uses stay as they are.
template <Where where>
void cache_reorder(const Tensor& keys, const Tensor& values, const Tensor& lengths, const Tensor& starts,
                   const Tensor& idx) {
  check_storage(keys, values, lengths, starts);
  check_indices("idx", idx, lengths);
  if (keys.is_meta() || idx.size(0) == 0) return;
  check_written(keys, values, {{"lengths", lengths}, {"starts", starts}});
  if (reads(where)) check_order(idx);
  int64_t used = keys.size(2);
  if (where == Where::kCPU) {
    const Values length(lengths), start(starts);
    int64_t longest = 0;
    for (int64_t b = 0; b < keys.size(0); ++b) longest = std::max(longest, length[b] - start[b]);
    used = std::min(used, longest);
  }
  const Tensor order = idx.clamp(0, keys.size(0) - 1);
  for (const Tensor& t : {keys.narrow(2, 0, used), values.narrow(2, 0, used), lengths, starts})
    t.copy_(t.index_select(0, order));
}

// Returns q_offset in slots of a ring buffer. Errors if query 0 would see keys that may have been dropped;
// on a GPU it sees those that remain.
template <Where where>
Tensor cache_slots(const Tensor& lengths, const Tensor& starts, const Tensor& q_offset, SymInt window,
                   SymInt max_seqlen) {
  check_indices("starts", starts, lengths);
  check_indices("q_offset", q_offset, lengths);
  if (lengths.is_meta()) return at::empty_like(q_offset);
  if (reads(where)) check_kept(lengths, starts, q_offset, number(window), number(max_seqlen));
  return q_offset.sub(starts);
}

// Returns the slot of each sequence's position lengths - seqlen_q, that of the first of its seqlen_q newest queries;
// for 0, the number of slots in use. Every read of a cache begins here, so lengths that a user set are checked too.
template <Where where>
Tensor cache_newest(const Tensor& lengths, const optional<Tensor>& starts, SymInt seqlen_q, SymInt left, SymInt slots) {
  check_state(lengths, starts);
  if (lengths.is_meta()) return at::empty_like(lengths);
  if (reads(where)) check_newest(lengths, starts, number(seqlen_q), number(left), number(slots));
  if (where == Where::kCPU) {  // one loop takes less time than one of torch's operators
    const Values length(lengths), start(starts ? *starts : lengths);
    Tensor first(at::detail::empty_cpu(lengths.sizes(), at::kLong));
    int64_t* const values = first.mutable_data_ptr<int64_t>();
    for (int64_t b = 0; b < lengths.size(0); ++b) values[b] = length[b] - (starts ? start[b] : 0) - number(seqlen_q);
    return first;
  }
  return (starts ? lengths.sub(*starts) : lengths).sub(number(seqlen_q));
}

// Each sequence b keeps its first kept[b] positions. On a GPU it keeps all if it has fewer, and none if a ring
// buffer has dropped them.
template <Where where>
void cache_truncate(const Tensor& lengths, const optional<Tensor>& starts, const Tensor& kept, SymInt window) {
  check_state(lengths, starts);
  check_indices("lengths", kept, lengths);
  if (lengths.is_meta()) return;
  check_apart("lengths", lengths);
  if (reads(where)) check_truncation(lengths, starts, kept, number(window));
  if (where == Where::kCPU)
    lengths.copy_(kept);
  else
    lengths.copy_(at::minimum(starts ? at::maximum(kept, *starts) : kept.clamp_min(0), lengths));
}

TORCH_LIBRARY_FRAGMENT(pyattn, m) {
  define<cache_append>(
      m, kOnCPU,
      "cache_append(Tensor(a!) keys, Tensor(b!) values, Tensor(c!) lengths, Tensor(d!) starts, Tensor k, Tensor v, "
      "Tensor? new_lengths, SymInt max_seqlen) -> ()");
  define_cache<cache_reorder<Where::kCPU>, cache_reorder<Where::kGPU>>(
      m, "cache_reorder(Tensor(a!) keys, Tensor(b!) values, Tensor(c!) lengths, Tensor(d!) starts, Tensor idx) -> ()");
  define<cache_keep<Where::kCPU, cache_append>>(
      m, kOnCPU,
      "cache_keep(Tensor(a!) keys, Tensor(b!) values, Tensor(c!) lengths, Tensor(d!) starts, Tensor indices, "
      "Tensor? base, SymInt left, SymInt max_seqlen) -> ()");
  define<cache_clear>(m, {c10::DispatchKey::CompositeExplicitAutograd}, "cache_clear(Tensor(a!) storage) -> ()");
  define<cache_copy>(m, {c10::DispatchKey::CompositeExplicitAutograd}, "cache_copy(Tensor storage) -> Tensor");
  define_cache<cache_newest<Where::kCPU>, cache_newest<Where::kGPU>>(
      m, "cache_newest(Tensor lengths, Tensor? starts, SymInt seqlen_q, SymInt left, SymInt slots) -> Tensor");
  define_cache<cache_truncate<Where::kCPU>, cache_truncate<Where::kGPU>>(
      m, "cache_truncate(Tensor(a!) lengths, Tensor? starts, Tensor kept, SymInt window) -> ()");
  define_cache<cache_slots<Where::kCPU>, cache_slots<Where::kGPU>>(
      m, "cache_slots(Tensor lengths, Tensor starts, Tensor q_offset, SymInt window, SymInt max_seqlen) -> Tensor");
}

}  // namespace
}  // namespace pyattn
