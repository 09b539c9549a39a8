// Groups of short heads that share elements of a bias: a work item of backward computes the heads of a group one after
// another and sums their dS. If these are all heads that share the elements, the sums are the gradient; otherwise they stay
// in the workspace, where the pass bias_gradient adds up the groups in order.
#pragma once

#include "cpu/plan/backward_splits.h"
#include "cpu/tiles/bias_sums.h"

namespace pyattn::PYATTN_ISA {
namespace {

// Backward has about this many groups, each with separate sums. Recomputing dS instead takes 2 of backward's 5 products.
inline constexpr int64_t kGroups = 64;
// The most bytes of a group's sums: they stay in L2, and all groups' in 32 MB. That is 256 queries and 256 keys.
inline constexpr int64_t kGroupBytes = 1 << 19;

template <class S>
class BiasGroups {
 public:
  int64_t owners = 0;  // sets of heads that share elements; 0 if backward sums no bias gradient
  int64_t count = 0;   // groups of an owner

  explicit BiasGroups(const BackwardParams& p)
      : p_(p), sequences_(p.dbias.stride_b ? 1 : p.batch), heads_(p.dbias.stride_h ? 1 : p.num_heads_kv) {
    const int64_t all = p.batch * p.num_heads_kv;
    if (!p.dbias.data || one_score_each(p) || all == 0) return;
    if (splits_of(p, p.seqlen_q, p.seqlen_k).count > 1 || bytes_of_sums() > kGroupBytes) return;
    owners = all / (sequences_ * heads_);
    each_ = ceil_div(sequences_ * heads_, ceil_div(kGroups, owners));
    count = ceil_div(sequences_ * heads_, each_);
  }

  bool used() const { return owners > 0; }
  int64_t items() const { return owners * count; }
  // Bytes of the workspace.
  int64_t bytes() const { return count > 1 ? items() * bytes_of_sums() : 0; }

  // The sums of a group: in its part of the workspace, which begins at `shared`, or at `own` if they are all of an owner's.
  BiasSums<S> sums(int64_t item, void* shared, Carver own) const {
    Carver one_of_all(static_cast<char*>(shared) + item * bytes_of_sums());
    return {p_, item_of(item / count), count > 1 ? one_of_all : own};
  }

  int64_t bytes_of_sums() const {
    Carver carver(nullptr);
    BiasSums<S>(p_, item_of(0), carver);
    return carver.bytes();
  }

  // Calls f(head, the head after it) for the KV heads of a group.
  template <class F>
  void each_head(int64_t item, F f) const {
    const int64_t first = item % count * each_, past = min(first + each_, sequences_ * heads_);
    for (int64_t m = first; m < past; ++m)
      f(head(item / count, m), head(item / count, min(m + 1, sequences_ * heads_ - 1)));
  }

 private:
  const BackwardParams& p_;
  int64_t sequences_, heads_;  // that share elements
  int64_t each_ = 0;           // heads of a group

  // All elements of an owner.
  BiasItem item_of(int64_t owner) const {
    const int64_t b = owner / (p_.num_heads_kv / heads_), h = owner % (p_.num_heads_kv / heads_);
    return {{b, b + sequences_}, {h, h + heads_}, {0, p_.seqlen_q}, {0, p_.seqlen_k}};
  }

  int64_t head(int64_t owner, int64_t member) const {
    const BiasItem item = item_of(owner);
    return (item.sequences.begin + member / heads_) * p_.num_heads_kv + item.kv_heads.begin + member % heads_;
  }
};

// The scratch of a group, before that of its heads.
template <class S>
struct GroupScratch {
  Matrix<Compute<S>> tile;  // for sums on their way to dbias
  Carver sums;
  int64_t bytes;

  GroupScratch(const BiasGroups<S>& groups, void* base) : sums(nullptr) {
    Carver carver(base);
    tile = carver.take<Compute<S>>(kBackwardBlockK, kBlockQ<Compute<S>>);
    sums = carver;
    bytes = carver.bytes() + (groups.count > 1 ? 0 : groups.bytes_of_sums());
  }
};

}  // namespace
}  // namespace pyattn::PYATTN_ISA
