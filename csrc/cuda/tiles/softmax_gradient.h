// The gradient of softmax, elementwise between the products of backward. The passes over
// queries and over keys share it.
#pragma once

#include "cuda/products/fragment.h"
#include "cuda/ptx/primitives.h"
#include "cuda/products/product.h"
#include "cuda/tiles/tile_mask.h"
#include "cuda/plan/workspace.h"
#include "shared/bias.h"

namespace pyattn::cuda {
namespace {

// S -> P * D and dP -> the gradient of the products divided by dscale, in place, in sums that begin at
// row, or key, `first` of the tile at place(). terms(at, row): the terms of the at-th of the lane's rows.
// Both results are 0 for masked keys, which only a `masked` tile has. D: the factors of dropout. see(dS)
// gets the gradient of the scores.
//
//   P = exp(S - lse)      dS = P * (dP * D - delta)
template <class T, Layout kLayout, class Score, class Dropout, class Place, class Terms, class See, int kM, int kN>
PYATTN_DEVICE void to_gradients(const Score& score, const Dropout& dropout, Sums<kM, kN>& S, Sums<kM, kN>& dP,
                                int first, Place place, bool masked, Terms terms, See see) {
  typename Score::template Derivative<kM, kN> derivative;
  score.template to_scores<kLayout>(S, derivative, first, place);
  dropout.template apply<kLayout>(dP, first);
  each_query<kLayout, kM, kN>(first, [&](int at, int row, auto each_key) {
    const RowTerms of_row = terms(at, row);
    each_key([&](int m, int n, int i, int) {
      S[m][n][i] = score.exp(S[m][n][i], of_row.shift) * of_row.factor;
      dP[m][n][i] = S[m][n][i] * fmaf(dP[m][n][i], of_row.share, -of_row.delta);
    });
  });
  if (masked)
    each_hidden<T, kLayout, kM, kN>(
        place(), first, [&](int m, int n, int i) { S[m][n][i] = dP[m][n][i] = 0, derivative.set(m, n, i, 0); });
  see(dP);
  score.to_products(dP, derivative);
  dropout.template apply<kLayout>(S, first);
}

// Calls f(elements) with dbias in the type that it is stored as; S is q's.
template <class S, class F>
PYATTN_DEVICE void with_gradients(const BiasView& dbias, F f) {
  if (dbias.type == BiasType::kFloat32)
    f(static_cast<float*>(dbias.data));
  else
    f(static_cast<S*>(dbias.data));
}

// Stores dS, in sums that begin at row, or key, `first` of the tile at `place`, to dbias, which
// has an element for each.
template <class S, Layout kLayout, int kM, int kN>
PYATTN_DEVICE void store_bias(const BiasView& dbias, const Sums<kM, kN>& dS, const TileMask& place, int first) {
  with_gradients<S>(dbias, [&](auto* elements) {
    each_query<kLayout, kM, kN>(first, [&](int, int row, auto each_key) {
      auto* of_row = elements + offset_of_row(dbias, place.mask.head, place.row_of(row));
      each_key([&](int m, int n, int i, int key) {
        if (place.contains(row, key)) narrow(of_row[place.key_of(key) * dbias.stride_k], dS[m][n][i]);
      });
    });
  });
}

}  // namespace
}  // namespace pyattn::cuda
