// Elements of a bool mask and of a bias: their storage type, their place, and which of them mask
// a key. Every backend shares this file; everything is constexpr, so device code may call it.
#pragma once

#include "shared/heads.h"

namespace pyattn::PYATTN_ISA {
namespace {

// Whether an element leaves its key visible: true, or not -inf. Any nonzero byte is true.
constexpr bool allows(uint8_t x) { return x != 0; }
constexpr bool allows(bf16 x) { return x.bits != 0xff80; }
constexpr bool allows(f16 x) { return x.bits != 0xfc00; }
constexpr bool allows(float x) { return x != -__builtin_inff(); }
constexpr bool allows(double x) { return x != -__builtin_inf(); }

// Calls f with a pointer to the first element, in its storage type; S is q's.
template <class S, class F>
constexpr auto with_elements(const BiasView& bias, F f) {
  if (bias.type == BiasType::kFloat32) return f(static_cast<const float*>(bias.data));
  return f(static_cast<const S*>(bias.data));
}

// The same for a bool mask, stored in bytes.
template <class S, class F>
constexpr auto with_elements(const BroadcastView& shown, F f) {
  return f(static_cast<const uint8_t*>(shown.data));
}

// The offset of the element of row r and key 0; key j is j * stride_k further on.
constexpr int64_t offset_of_row(const BroadcastView& view, const Head& head, int64_t r) {
  return head.b * view.stride_b + head.query_head(r) * view.stride_h + (head.first_q + head.query(r)) * view.stride_q;
}

// The elements of a row; shown(j) says whether key j may take part.
template <class E>
struct ShownKeys {
  const E* row;  // the element of key 0
  constexpr bool operator()(int64_t j) const { return allows(row[j]); }
};
template <class E>
struct StridedShownKeys {
  const E* row;
  int64_t stride;
  constexpr bool operator()(int64_t j) const { return allows(row[j * stride]); }
};

// Calls f(shown) for the row whose element for key 0 is given.
// Contiguous keys are a separate case, which compilers vectorise.
template <class E, class F>
constexpr void with_keys(const BroadcastView& view, const E* row, F f) {
  if (view.stride_k == 1)
    f(ShownKeys<E>{row});
  else
    f(StridedShownKeys<E>{row, view.stride_k});
}

// The same for row r of a head.
template <class S, class V, class F>
constexpr void with_keys_of_row(const V& view, const Head& head, int64_t r, F f) {
  with_elements<S>(view, [&](const auto* elements) { with_keys(view, elements + offset_of_row(view, head, r), f); });
}

// Whether each element of dbias is the gradient of exactly one score.
constexpr bool one_score_each(const BackwardParams& p) {
  const BiasView& view = p.dbias;
  return (view.stride_b || p.batch == 1) && (view.stride_h || p.num_heads_q == 1) &&
         (view.stride_q || p.seqlen_q == 1) && (view.stride_k || p.seqlen_k == 1);
}

// The rows of a view's own shape, which has size 1 where it broadcasts:
// how many there are, which of them applies to row r, and where each lies.
struct OwnRows {
  uint32_t batch, heads, queries;  // below 2^32 in any memory; 64 bits would take twice the registers on a GPU

  constexpr OwnRows(const ForwardParams& p, const BroadcastView& view)
      : batch(static_cast<uint32_t>(view.stride_b ? p.batch : min(p.batch, 1))),
        heads(static_cast<uint32_t>(view.stride_h ? p.num_heads_q : min(p.num_heads_q, 1))),
        queries(static_cast<uint32_t>(view.stride_q ? p.seqlen_q : min(p.seqlen_q, 1))) {}

  constexpr int64_t count() const { return int64_t{batch} * heads * queries; }
  constexpr uint32_t index(const Head& head, int64_t r) const {
    const auto b = static_cast<uint32_t>(batch > 1 ? head.b : 0);
    const auto h = static_cast<uint32_t>(heads > 1 ? head.query_head(r) : 0);
    return (b * heads + h) * queries + static_cast<uint32_t>(queries > 1 ? head.first_q + head.query(r) : 0);
  }
  constexpr int64_t offset(const BroadcastView& view, int64_t row) const {
    const int64_t head = row / queries;
    return head / heads * view.stride_b + head % heads * view.stride_h + row % queries * view.stride_q;
  }
};

}  // namespace
}  // namespace pyattn::PYATTN_ISA
