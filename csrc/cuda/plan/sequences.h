// Packed sequences: where each lies, which only the device knows, the rows and keys of all of them, and
// the values of tokens that belong to none.
#pragma once

#include <type_traits>

#include "cuda/products/fragment.h"
#include "cuda/ptx/primitives.h"
#include "shared/defaults.h"
#include "shared/heads.h"

namespace pyattn::cuda {
namespace {

// The sequence that token t is in if it is in any; first: Sequence::first_q or first_k.
PYATTN_DEVICE int64_t sequence_at(const ForwardParams& p, int64_t Sequence::* first, int64_t t) {
  return last_that(p.batch, [&](int64_t b) { return p.packed.sequences[b].*first <= t; });
}

// A row, or key, of a KV head, if there is one.
struct Item {
  int64_t head, place;
  bool there;
};

// Row `at` of all rows, which are ordered by head; packed, by KV head and then by sequence.
PYATTN_DEVICE Item row_at(const ForwardParams& p, int64_t at) {
  const int64_t group = group_size(p), count = (is_packed(p) ? p.packed.total_q : p.seqlen_q) * group;
  const int64_t head = at / count, r = at % count;
  if (!is_packed(p)) return {head, r, head < p.batch * p.num_heads_kv};
  if (head >= p.num_heads_kv || !p.batch) return {0, 0, false};
  const int64_t b = sequence_at(p, &Sequence::first_q, r / group);
  const Head own(p, b * p.num_heads_kv + head);
  const int64_t place = r - own.first_q * group;
  return {b * p.num_heads_kv + head, place, place < own.count};
}

// Key `at` of all keys, in the same order.
PYATTN_DEVICE Item key_at(const ForwardParams& p, int64_t at) {
  const int64_t count = is_packed(p) ? p.packed.total_k : p.seqlen_k, head = at / count, key = at % count;
  if (!is_packed(p)) return {head, key, head < p.batch * p.num_heads_kv};
  if (head >= p.num_heads_kv || !p.batch) return {0, 0, false};
  const int64_t b = sequence_at(p, &Sequence::first_k, key);
  const Sequence& own = p.packed.sequences[b];
  return {b * p.num_heads_kv + head, key - own.first_k, key - own.first_k < own.seqlen_k};
}

// Writes params.packed.sequences and default_offsets, in one warp. If the starts of sequences are
// invalid, so is every sequence; else a sequence is invalid if it has more tokens than it may, or uses
// more keys than it has.
template <class S>
PYATTN_KERNEL(kWarpLanes)
place_sequences(const __grid_constant__ ForwardParams p) {
  const PackedParams& packed = p.packed;
  const int64_t *starts_q = packed.cu_seqlens_q, *starts_k = packed.cu_seqlens_k;
  int invalid =
      starts_q[0] != 0 || starts_k[0] != 0 || starts_q[p.batch] > packed.total_q || starts_k[p.batch] > packed.total_k;
#pragma unroll 4
  for (int64_t b = lane(); b < p.batch; b += kWarpLanes)
    invalid |= starts_q[b] > starts_q[b + 1] || starts_k[b] > starts_k[b + 1];
  invalid = sum_lanes(invalid);
#pragma unroll 4
  for (int64_t b = lane(); b <= p.batch; b += kWarpLanes) {
    Sequence own{starts_q[b], starts_k[b], 0, 0};
    if (invalid) {
      own = b < p.batch ? Sequence{0, 0, -1, -1} : Sequence{packed.total_q, packed.total_k, 0, 0};
    } else if (b < p.batch) {
      const int64_t seqlen_q = starts_q[b + 1] - own.first_q, length = starts_k[b + 1] - own.first_k;
      const int64_t used = packed.seqused_k ? packed.seqused_k[b] : length;
      const bool valid = seqlen_q <= p.seqlen_q && length <= p.seqlen_k && 0 <= used && used <= length;
      own.seqlen_q = valid ? seqlen_q : -1, own.seqlen_k = valid ? used : -1;
    }
    packed.sequences[b] = own;
    if (b < p.batch && packed.default_offsets) packed.default_offsets[b] = default_q_offset(own.seqlen_q, own.seqlen_k);
  }
}

inline constexpr int kFillWarps = 4;

// The tensor to fill: out, together with the row statistics, or a gradient of queries or of keys.
enum class Filled { kOut, kQueries, kKeys };
struct Rest {
  ForwardParams p;
  View to;
  int64_t cols;
  Filled what;
};

// Fills tokens of no sequence and unused keys with 0, and tokens of invalid sequences with NaN.
// One warp per token.
template <class S>
PYATTN_KERNEL(kFillWarps* kWarpLanes)
fill_rest(const __grid_constant__ Rest rest) {
  using T = std::conditional_t<std::is_same_v<S, double>, double, float>;
  const ForwardParams& p = rest.p;
  const bool keys = rest.what == Filled::kKeys;
  const auto first = keys ? &Sequence::first_k : &Sequence::first_q;
  const auto seqlen = keys ? &Sequence::seqlen_k : &Sequence::seqlen_q;
  const int64_t t = block_index() * kFillWarps + warp();
  if (t >= (keys ? p.packed.total_k : p.packed.total_q)) return;
  float value = 0;
  if (t < p.packed.sequences[p.batch].*first) {
    const Sequence& own = p.packed.sequences[sequence_at(p, first, t)];
    if (t - own.*first < own.*seqlen) return;
    if (own.*seqlen < 0) value = __builtin_nanf("");
  }
  for (int64_t h = 0; h < (keys ? p.num_heads_kv : p.num_heads_q); ++h) {
    S* row = static_cast<S*>(rest.to.data) + h * rest.to.stride_h + t * rest.to.stride_s;
    for (int64_t c = lane(); c < rest.cols; c += kWarpLanes) narrow(row[c], value);
    if (rest.what != Filled::kOut || lane() != 0) continue;
    const int64_t at = h * p.packed.total_q + t;
    static_cast<T*>(p.row_sum)[at] = value;
    static_cast<T*>(p.row_max)[at] = static_cast<T*>(p.lse)[at] = value - __builtin_inff();
  }
}

}  // namespace
}  // namespace pyattn::cuda
