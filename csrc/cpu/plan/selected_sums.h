// Selected keys in backward: a work item computes some of the queries of a KV head, one after another, and adds the dK
// and dV of their lists to sums over all keys. The pass reduce adds up the sums of a head's items in order.
#pragma once

#include "cpu/plan/backward_splits.h"
#include "cpu/plan/units.h"
#include "cpu/products/matrix.h"
#include "cpu/products/scratch.h"
#include "cpu/simd/simd.h"
#include "shared/selected_keys.h"

namespace pyattn::PYATTN_ISA {
namespace {

template <class S>
class SelectedSums {
  using T = Compute<S>;

 public:
  // KV heads of all batch entries.
  static int64_t heads(const ForwardParams& p) { return p.batch * p.num_heads_kv; }
  // Work items of a KV head: at least kMinItems in all.
  static int64_t items_each(const ForwardParams& p) {
    return clamp(ceil_div(kMinItems, max(1, heads(p))), 1, max(1, p.seqlen_q));
  }
  static int64_t items(const ForwardParams& p) { return p.seqlen_q ? heads(p) * items_each(p) : 0; }
  static int64_t bytes(const ForwardParams& p) {
    return items(p) * p.cpu.selected.keys * (columns_k<S>(p) + columns_v<S>(p)) * static_cast<int64_t>(sizeof(T));
  }

  SelectedSums(const BackwardParams& p, int64_t item) : p_(p), item_(item) {}

  // The heads of count_heads that the item computes.
  Range heads_of_queries() const {
    const int64_t each = items_each(p_), n = item_ % each, first = item_ / each * p_.seqlen_q;
    return {first + p_.seqlen_q * n / each, first + p_.seqlen_q * (n + 1) / each};
  }

  // The sums of all keys, [keys][cols_k] and [keys][cols_v].
  Matrix<T> dK() const { return {first_of(item_), columns_k<S>(p_)}; }
  Matrix<T> dV() const { return {first_of(item_) + p_.cpu.selected.keys * columns_k<S>(p_), columns_v<S>(p_)}; }

  void clear() const { fill_zero(first_of(item_), size()); }

  // Adds dK[keys][cols_k] and dV[keys][cols_v] of the keys of a list from n0 on, and clears them.
  void take(const Head& head, int64_t n0, int64_t keys, Matrix<T> dK, Matrix<T> dV) const {
    move_rows(SelectedKeys(p_, head, n0), keys, dK, this->dK());
    move_rows(SelectedKeys(p_, head, n0), keys, dV, this->dV());
  }

 private:
  const BackwardParams& p_;
  int64_t item_;

  int64_t size() const { return p_.cpu.selected.keys * (columns_k<S>(p_) + columns_v<S>(p_)); }
  T* first_of(int64_t item) const { return static_cast<T*>(p_.workspace) + item * size(); }

  static void move_rows(SelectedKeys listed, int64_t keys, Matrix<T> from, Matrix<T> to) {
    constexpr int64_t kAhead = 4;  // keys whose sums are prefetched: they lie anywhere
    SelectedKeys later = listed;
    for (int64_t k = -kAhead; k < keys; ++k) {
      if (k + kAhead < keys) {
        const T* const row = to.from(later.key()).data;
        for (int64_t d = 0; d < to.row; d += kCacheLine / sizeof(T)) __builtin_prefetch(row + d, 1);
        later.next();
      }
      if (k < 0) continue;
      T *const sum = to.from(listed.key()).data, *const more = from.from(k).data;
      listed.next();
      for (int64_t d = 0; d < to.row; d += kLanes<T>) {
        store(sum + d, load(sum + d) + load(more + d));
        store(more + d, vec<T>{});
      }
    }
  }
};

}  // namespace
}  // namespace pyattn::PYATTN_ISA
