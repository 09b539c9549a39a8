// The scratch of a work item of forward, and how its transposed O becomes a partial result.
#pragma once

#include "cpu/plan/forward_splits.h"
#include "cpu/products/matrix.h"
#include "cpu/products/operand.h"
#include "cpu/products/pack.h"
#include "cpu/products/scratch.h"
#include "cpu/simd/simd.h"
#include "cpu/tiles/dropout.h"
#include "cpu/tiles/keys.h"
#include "cpu/tiles/strips.h"

namespace pyattn::PYATTN_ISA {
namespace {

// The time varies by only 3 % between 96 and 384 keys, and a sum of 96 terms has a smaller
// rounding error than one of 192. 96 is a multiple of the register tile's height, 6.
inline constexpr int64_t kForwardBlockK = 96;
static_assert(kForwardBlockK % kDrawKeys == 0 && kForwardBlockK <= kTileKeys && kForwardBlockK == kInvariantBlockK);

template <class S>
struct ForwardScratch {
  using T = Compute<S>;
  using E = Operand<S>;
  Matrix<E> Qt;              // [terms(head_dim)][queries]
  Matrix<T> P;               // [keys][queries]
  Matrix<T> Ot;              // [head_dim_v][queries]
  Matrix<E> K, V;            // [keys][head_dim], [keys][head_dim_v]: copies, if tensors can't be read in place
  Matrix<S> page_K, page_V;  // the same shapes in the storage type, if keys are copied
  Matrix<E> weights;         // [terms(keys)][queries]: P as an operand of bf16 pairs
  Matrix<T> joined;          // [head_dim_v][queries]: Ot of the ranges so far, if invariant rows have several
  int64_t bytes;

  ForwardScratch(const ForwardParams& p, void* base) {
    Carver carver(base);
    Qt = carver.take<E>(terms<S>(p.head_dim), kBlockQ<T>);
    P = carver.take<T>(kForwardBlockK, kBlockQ<T>);
    Ot = carver.take<T>(p.head_dim_v, kBlockQ<T>);
    K = carver.take<E>(kInPlace<S> ? 0 : kForwardBlockK, round_up(p.head_dim, kLanes<T>));
    V = carver.take<E>(kInPlace<S> ? 0 : kForwardBlockK, round_up(p.head_dim_v, kLanes<T>));
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
