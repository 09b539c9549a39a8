// The scratch of a work item of forward, and how its transposed O becomes a partial result.
#pragma once

#include "cpu/plan/forward_splits.h"
#include "cpu/products/matrix.h"
#include "cpu/products/operand.h"
#include "cpu/products/pack.h"
#include "cpu/products/scratch.h"
#include "cpu/simd/simd.h"
#include "cpu/tiles/keys.h"
#include "cpu/tiles/strips.h"

namespace pyattn::PYATTN_ISA {
namespace {

// The time varies by only 3 % between 96 and 384 keys, and a sum of 96 terms has a smaller
// rounding error than one of 192. 96 is a multiple of the register tile's height, 6.
inline constexpr int64_t kForwardBlockK = 96;
static_assert(kForwardBlockK % kDrawKeys == 0 && kForwardBlockK <= kTileKeys && kForwardBlockK == kInvariantBlockK);

// Bytes up to which the packed rows of a whole head are kept, of K and of V, in each thread; rows of longer heads are packed
// again for each block of queries. With kept rows bfloat16 takes 0.95 to 0.97 of the time; float16 gains nothing from 4 MB of them.
inline constexpr int64_t kPackedBytes = 2 * 1024 * 1024;

// Rows of K or V as operands, in scratch; kPaired: pairs of keys.
template <class E, bool kPaired>
struct PackedRows {
  Matrix<E> rows;  // [keys or pairs][columns]
  bool whole;      // whether they are those of a whole head, else of a tile

  void take(Carver& carver, int64_t seqlen, int64_t cols) {
    whole = rows_of(seqlen) * cols * int64_t{sizeof(E)} <= kPackedBytes;
    rows = carver.take<E>(rows_of(whole ? seqlen : kForwardBlockK), cols);
  }

  // The rows of `keys`, from an even key on. pack(keys, rows) packs those that are not in `packed`, the keys of the head whose
  // rows are there. An odd last key is paired with 0, and packed again once it is followed by another.
  template <class Pack>
  Matrix<const E> of(Range& packed, Range keys, Pack pack) const {
    if (!whole) {
      pack(keys, rows);
      return rows;
    }
    const int64_t paired = kPaired ? round_down(keys.end, 2) : keys.end;
    if (packed.end < keys.begin || keys.end < packed.begin) packed = {keys.begin, keys.begin};
    const auto add = [&](Range missing) {
      if (!missing.empty()) pack(missing, rows.from(rows_of(missing.begin)));
    };
    add({keys.begin, packed.begin});
    add({min(packed.end, paired), keys.end});
    packed = {min(packed.begin, keys.begin), paired < keys.end ? paired : max(packed.end, paired)};
    return rows.from(rows_of(keys.begin));
  }

 private:
  static constexpr int64_t rows_of(int64_t keys) { return kPaired ? (keys + 1) / 2 : keys; }
};

template <class S>
struct ForwardScratch {
  using T = Compute<S>;
  using E = Operand<S>;
  Matrix<E> Qt;  // [terms(head_dim)][queries]
  Matrix<T> P;   // [keys][queries]
  Matrix<T> Ot;  // [head_dim_v][queries]
  // [keys][head_dim], [keys][head_dim_v]: copies, if tensors can't be read in place.
  PackedRows<E, false> K;
  PackedRows<E, kPairs<S>> V;
  Matrix<S> page_K, page_V;  // the same shapes in the storage type, if keys are copied
  Matrix<E> weights;         // [terms(keys)][queries]: P as an operand of bf16 pairs
  Matrix<T> joined;          // [head_dim_v][queries]: Ot of the ranges so far, if invariant rows have several
  int64_t bytes;

  ForwardScratch(const ForwardParams& p, void* base) {
    Carver carver(base);
    Qt = carver.take<E>(terms<S>(p.head_dim), kBlockQ<T>);
    P = carver.take<T>(kForwardBlockK, kBlockQ<T>);
    Ot = carver.take<T>(p.head_dim_v, kBlockQ<T>);
    K.take(carver, kInPlace<S> ? 0 : kPairs<S> ? kForwardBlockK : p.seqlen_k, round_up(p.head_dim, kLanes<T>));
    V.take(carver, kInPlace<S> ? 0 : p.seqlen_k, round_up(p.head_dim_v, kLanes<T>));
    page_K = carver.take<S>(keys_copied(p) ? kForwardBlockK : 0, round_up(p.head_dim, kLanes<T>));
    page_V = carver.take<S>(keys_copied(p) ? kForwardBlockK : 0, round_up(p.head_dim_v, kLanes<T>));
    weights = carver.take<E>(kPairs<S> ? terms<S>(kForwardBlockK) : 0, kBlockQ<T>);
    joined = carver.take<T>(p.cpu.row_invariant && p.seqlen_k > kInvariantSplit ? p.head_dim_v : 0, kBlockQ<T>);
    bytes = carver.bytes();
  }
};

// Ot[cols][queries] -> O[rows][cols in whole vectors, as in dots.h].
template <class T>
void store_part(Matrix<const T> Ot, int64_t rows, int64_t cols, Matrix<T> O) {
  constexpr int L = kLanes<T>;
  alignas(kScratchAlign) T ones[kBlockQ<T>];
  for (T& one : ones) one = 1;
  const int64_t whole = round_down(cols, L);
  unpack_transposed<T>(Ot, rows, whole, ones, [&](int64_t i) { return O.from(i).data; });
  if (whole < cols)
    unpack_transposed<T>(Ot.from(cols - L), rows, L, ones, [&](int64_t i) { return O.from(i).data + whole; });
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
