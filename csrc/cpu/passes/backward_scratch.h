// The scratch of backward: packed queries, operands of a block of keys, the tiles, and the sums.
#pragma once

#include <cstdint>

#include "attention.h"
#include "cpu/products/dots.h"
#include "shared/heads.h"
#include "cpu/products/matrix.h"
#include "cpu/products/operand.h"
#include "cpu/products/pack.h"
#include "cpu/passes/packed_queries.h"
#include "cpu/products/scratch.h"
#include "cpu/simd/simd.h"
#include "cpu/tiles/strips.h"
#include "cpu/plan/units.h"

namespace pyattn::PYATTN_ISA {
namespace {

template <class S>
struct BackwardScratch {
  using T = Compute<S>;
  using E = Operand<S>;
  int64_t cols_k, cols_v;  // head_dim and head_dim_v in whole vectors
  Carver carver;
  PackedQueries<S> queries;
  Matrix<E> K, V;             // [terms(keys)][cols_k], [keys][cols_v]: copies, where the tensor can't be read in place
  Matrix<E> few_Q;            // [rows][few_terms(head_dim)], of few rows
  Matrix<E> left_K;           // [keys][cols_k]: K again, where the left factor and the rows that are summed over differ
  Matrix<E> left_P, left_dS;  // [keys][terms(queries)]: tiles as operands, where these are not the tiles themselves
  Matrix<E> summed_dS;        // [terms(keys)][queries]
  Matrix<T> P, dP;            // [keys][queries]
  Matrix<T> kept;             // [keys][queries], dropout's factors
  Matrix<T> derivative;       // [keys][queries], of the softcap
  Matrix<T> dQ;               // [rows of a super-block][cols_k], where the item's sum is the whole of it
  Matrix<T> dK, dV;           // [keys of the item][cols_k], [keys of the item][cols_v]
  int64_t bytes;

  BackwardScratch(const BackwardParams& p, bool whole, int64_t keys, void* base)
      : cols_k(columns_k<S>(p)), cols_v(columns_v<S>(p)), carver(base), queries(p, carver) {
    const int64_t pairs = kPairs<S>;
    K = carver.take_spread<E>(summed_in_place<S>(p.k, p.head_dim) ? 0 : terms<S>(kBackwardBlockK), cols_k);
    V = carver.take<E>(kInPlace<S> ? 0 : kBackwardBlockK, cols_v);
    few_Q = carver.take<E>(few_rows<S>(p, 1) ? kDecodeRows : 0, few_terms<S>(p.head_dim));
    left_K = carver.take<E>(pairs * kBackwardBlockK, cols_k);
    left_P = carver.take<E>(pairs * kBackwardBlockK, terms<S>(kBlockQ<T>));
    left_dS = carver.take<E>(pairs * kBackwardBlockK, terms<S>(kBlockQ<T>));
    summed_dS = carver.take_spread<E>(pairs * terms<S>(kBackwardBlockK), kBlockQ<T>);
    P = carver.take<T>(kBackwardBlockK, kBlockQ<T>);
    dP = carver.take_spread<T>(kBackwardBlockK, kBlockQ<T>);
    kept = carver.take<T>(p.dropout.threshold ? kBackwardBlockK : 0, kBlockQ<T>);
    derivative = carver.take<T>(p.score.softcap ? kBackwardBlockK : 0, kBlockQ<T>);
    dQ = carver.take<T>(whole ? PackedQueries<S>::super_block_rows(p) : 0, cols_k);
    dK = carver.take<T>(keys, cols_k);
    dV = carver.take<T>(keys, cols_v);
    bytes = carver.bytes();
  }
};

}  // namespace
}  // namespace pyattn::PYATTN_ISA
