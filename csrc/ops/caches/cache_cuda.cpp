// cache_append and cache_keep on a GPU, in ATen operations without a host read, so CUDA graphs can capture them. Without
// a read nothing can be refused: positions that a sequence has no room for are left out, indices are clamped, and
// nothing outside the cache is read or written. With PYATTN_CHECK=1 everything is read and checked first.
#include <ATen/ops/arange.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <algorithm>
#include <utility>

#include "ops/caches/cache.h"
#include "ops/caches/keep.h"

namespace pyattn {
namespace {

// at (B, n) -> (B, heads, n, columns): the index that gather and scatter_ need for these rows of t.
Tensor rows(const Tensor& at, const Tensor& t) {
  return at.unsqueeze(1).unsqueeze(3).expand({t.size(0), t.size(1), at.size(1), t.size(3)});
}

// The steps of an append, each (B,): `written` of the new positions, from number `skipped` on, go to the slots from
// `end` on. In a ring buffer that is too full, the positions to keep move to its first slots before that.
struct Steps {
  Tensor added, skipped, end, written;
  Tensor moved, from;  // of a ring: whether positions move, and which slot moves to slot 0

  Steps(const Tensor& lengths, const Tensor& starts, const Tensor& k, const optional<Tensor>& new_lengths,
        int64_t slots, int64_t kept_positions)
      : added(new_lengths ? new_lengths->clamp(0, k.size(2)) : at::full_like(lengths, k.size(2))),
        skipped(at::zeros_like(lengths)),
        end(lengths.sub(starts)) {
    if (slots > kept_positions) {
      moved = end.add(added).gt(slots);
      skipped = at::where(moved, added.sub(kept_positions).clamp_min(0), skipped);
      const Tensor kept = at::minimum(end, skipped.sub(added).add(kept_positions));
      from = end.sub(kept);
      end = at::where(moved, kept, end);
    } else {
      added = at::minimum(added, end.neg().add(slots).clamp_min(0));
    }
    written = added.sub(skipped);
  }
};

void cuda_append(const Tensor& keys, const Tensor& values, const Tensor& lengths, const Tensor& starts,
                 const Tensor& new_k, const Tensor& new_v, const optional<Tensor>& new_counts, SymInt max_seqlen) {
  check_append(keys, values, lengths, starts, new_k, new_v, new_counts);
  check_written(keys, values, {{"lengths", lengths}, {"starts", starts}});
  const Tensor k = apart_from({keys, values}, new_k), v = apart_from({keys, values}, new_v);
  const optional<Tensor> new_lengths = apart_from({lengths, starts}, new_counts);
  const int64_t slots = keys.size(2), kept_positions = number(max_seqlen);
  if (checks_gpu()) check_room(lengths, starts, new_lengths, k.size(2), slots, kept_positions);
  const int64_t count = std::min(k.size(2), slots);  // no sequence gets more
  const Steps steps(lengths, starts, k, new_lengths, slots, kept_positions);
  if (count == 0) return;
  const Tensor number = at::arange(count, lengths.options());
  const auto column = [](const Tensor& t) { return t.unsqueeze(1); };
  // Consecutive slots, modulo `slots`: each is written once, with its new row or the one that it has.
  const Tensor slot = column(steps.end).add(number).remainder(slots), counts = number.lt(column(steps.written));
  const Tensor source = column(steps.skipped).add(number).clamp(0, k.size(2) - 1);
  for (const auto& [storage, t] : {std::pair(keys, k), std::pair(values, v)}) {
    if (steps.moved.defined()) {
      const Tensor all = at::arange(kept_positions, lengths.options());
      const Tensor from = at::where(column(steps.moved), column(steps.from).add(all).clamp(0, slots - 1), all);
      storage.narrow(2, 0, kept_positions).copy_(storage.gather(2, rows(from, storage)));
    }
    const Tensor at = rows(slot, storage), fresh = t.gather(2, rows(source, t));
    storage.scatter_(2, at, at::where(counts.unsqueeze(1).unsqueeze(3), fresh, storage.gather(2, at)));
  }
  if (steps.moved.defined()) starts.copy_(at::where(steps.moved, lengths.sub(steps.end).add(steps.skipped), starts));
  lengths.add_(steps.added);
}

TORCH_LIBRARY_IMPL(pyattn, CUDA, m) {
  m.impl("cache_append", cuda_append);
  m.impl("cache_keep", cache_keep<Where::kGPU, cuda_append>);
}

}  // namespace
}  // namespace pyattn
