// Scores: the one place where the product of a query and a key becomes a score,
// and where the gradient of a score becomes that of the product. Kernels are
// templates over the score; softmax does not know which one it works on.
#pragma once

#include "cpu/products/matrix.h"
#include "cpu/simd/math.h"
#include "cpu/tiles/alibi.h"
#include "cpu/tiles/relative_bias.h"
#include "cpu/tiles/strips.h"
#include "cpu/tiles/tile_bias.h"
#include "shared/bias.h"

namespace pyattn::PYATTN_ISA {
namespace {

// softmax_scale = power * factor. power is the power of two below softmax_scale, with
// its sign, at most 1, and a normal number. Q is packed times power, which is exact
// and can't overflow, so products are score / factor. (Q times softmax_scale * log2(e)
// would be rounded, and overflow for scores near the largest number.)
template <class T>
struct Scale {
  T power = 0, factor = 1;
  T dscale;  // multiplies dQ = dS K and dK = dS^T Q when they are written out

  explicit Scale(double softmax_scale) : dscale(static_cast<T>(softmax_scale)) {
    if (softmax_scale == 0) return;
    const uint64_t exponent = __builtin_bit_cast(uint64_t, softmax_scale) & uint64_t{0x7ff} << 52;
    const double below = __builtin_bit_cast(double, exponent);
    const double least = sizeof(T) == sizeof(float) ? 0x1p-126 : 0x1p-1022;
    const double exact = __builtin_copysign(below > 1 ? 1 : below < least ? least : below, softmax_scale);
    power = static_cast<T>(exact), factor = static_cast<T>(softmax_scale / exact);
  }
};

// score = softmax_scale * (q . k). Tiles hold score / factor:
// the score is rounded once, as it enters the exponential.
template <class S>
class Plain : public Scale<Compute<S>> {
  using T = Compute<S>;
  using Scale<T>::factor;

 public:
  static constexpr bool kBias = false;

  explicit Plain(const ForwardParams& p) : Scale<T>(p.softmax_scale) {}

  // Called before the products of a tile.
  void prefetch(const ForwardParams&, const Head&, const Tile&) const {}

  // S[keys][queries], in decoding S[queries][keys]:
  // products -> arguments of exp, in place. Here they are the same.
  void to_scores(const ForwardParams&, Matrix<T>, const Head&, const Tile&, Strip, Matrix<T>) const {}
  void to_scores_by_rows(const ForwardParams&, Matrix<T>, const Head&, const Tile&) const {}

  // dS[keys][queries]: gradient of exp's argument -> gradient of the
  // product, divided by dscale, in place. Here they are the same.
  void to_products(const BackwardParams&, Matrix<T>, const Head&, const Tile&, Strip, Matrix<T>, HeadSums) const {}

  // exp(score) for s = score / factor; exactly 1 at 0.
  PYATTN_MEMBER_INLINE vec<T> exp(vec<T> s) const { return exp2<T>(s * static_cast<T>(factor * kLog2e)); }

  // The argument of exp for a score, and back.
  T from_score(T score) const { return score / factor; }
  vec<T> to_score(vec<T> s) const { return s * factor; }
};

// score = softcap * tanh(softmax_scale * (q . k) / softcap) + bias + relative bias - slope * |i + q_offset - j|,
// without the terms that params do not have. Tiles hold the score itself.
template <class S>
class General : public Scale<Compute<S>> {
  using T = Compute<S>;

 public:
  static constexpr bool kBias = true;

  explicit General(const ForwardParams& p)
      : Scale<T>(p.softmax_scale),
        softcap_(static_cast<T>(bounded(p.score.softcap))),
        inner_(static_cast<T>(__builtin_fmin(this->factor / bounded(p.score.softcap), 0x1p127))) {}

  PYATTN_MEMBER_INLINE void prefetch(const ForwardParams& p, const Head& head, const Tile& tile) const {
    if (has_bias(p.score))
      with_floats<S>(p.score.bias,
                     [&](const auto* bias) PYATTN_MEMBER_INLINE { prefetch_bias(bias, p.score.bias, head, tile); });
  }

  // As in Plain. The derivative of the softcap, by which to_products
  // multiplies, is stored in a separate tile, if that has data.
  void to_scores(const ForwardParams& p, Matrix<T> scores, const Head& head, const Tile& tile, Strip strip,
                 Matrix<T> derivative) const {
    const T softcap = softcap_, inner = inner_;
    T factor = this->factor;  // not yet multiplied in when the next term comes
    if (p.score.softcap) {
      for (int64_t k = strip.begin; k < strip.end; ++k)
        for (int64_t j = strip.j0; j < strip.j1; j += kLanes<T>) {
          const vec<T> x = cap(scores.from(k).data + j, inner, softcap);
          if (derivative.data) store(derivative.from(k).data + j, tanh_derivative<T>(x));
        }
      factor = 1;
    }
    if (has_bias(p.score)) {
      with_floats<S>(p.score.bias,
                     [&](const auto* bias) { add_bias(scores, bias, p.score.bias, head, tile, strip, factor); });
      factor = 1;
    }
    if (p.score.relative_bias) {
      add_relative_bias(p, scores, head, tile, strip, factor);
      factor = 1;
    }
    if (p.score.alibi_slopes)
      for (int64_t j = strip.j0; j < strip.j1; j += kLanes<T>) {
        const auto distances = Distances<T>::of_rows(p, head, tile.r0 + j, tile.n0, strip.end);
        const vec<T> slopes = slopes_of(p, head, tile.r0 + j);
        for (int64_t k = strip.begin; k < strip.end; ++k)
          approach(scores.from(k).data + j, factor, slopes, distances.at(k));
      }
    else if (factor != 1)
      for (int64_t k = strip.begin; k < strip.end; ++k)
        for (int64_t j = strip.j0; j < strip.j1; j += kLanes<T>) multiply(scores.from(k).data + j, factor);
  }

  void to_scores_by_rows(const ForwardParams& p, Matrix<T> scores, const Head& head, const Tile& tile) const {
    const T softcap = softcap_, inner = inner_;
    T factor = this->factor;
    if (p.score.softcap) {
      for (int64_t r = 0; r < tile.rows; ++r)
        for (int64_t k = 0; k < tile.keys; k += kLanes<T>) cap(scores.from(r).data + k, inner, softcap);
      factor = 1;
    }
    if (has_bias(p.score)) {
      with_floats<S>(p.score.bias,
                     [&](const auto* bias) { add_bias_by_rows(scores, bias, p.score.bias, head, tile, factor); });
      factor = 1;
    }
    if (p.score.relative_bias) {
      add_relative_bias_by_rows(p, scores, head, tile, factor);
      factor = 1;
    }
    if (p.score.alibi_slopes)
      for (int64_t r = 0; r < tile.rows; ++r) {
        const auto distances = Distances<T>::of_keys(position(p, head, tile.r0 + r), tile.n0, tile.keys);
        const vec<T> slope = set1(head.slope<T>(p, tile.r0 + r));
        for (int64_t k = 0; k < tile.keys; k += kLanes<T>)
          approach(scores.from(r).data + k, factor, slope, distances.at(k));
      }
    else if (factor != 1)
      for (int64_t r = 0; r < tile.rows; ++r)
        for (int64_t k = 0; k < tile.keys; k += kLanes<T>) multiply(scores.from(r).data + k, factor);
  }

  // dS[keys][queries]: gradient of the scores -> gradient of the product,
  // divided by dscale, in place. Also writes the gradient of the bias, and
  // adds those of the slopes and of the relative bias to the sums.
  void to_products(const BackwardParams& p, Matrix<T> dS, const Head& head, const Tile& tile, Strip strip,
                   Matrix<T> derivative, HeadSums sums) const {
    if (p.dbias.data && one_score_each(p))
      with_floats<S>(p.dbias, [&](auto* dbias) { store_bias_gradient(dS, dbias, p.dbias, head, tile, strip); });
    if (p.dslopes)
      for (int64_t j = strip.j0; j < strip.j1; j += kLanes<T>) {
        const auto distances = Distances<T>::of_rows(p, head, tile.r0 + j, tile.n0, strip.end);
        vec<T> sum = {};
        for (int64_t k = strip.begin; k < strip.end; ++k) sum = fma(load(dS.from(k).data + j), distances.at(k), sum);
        for (int64_t l = j; l < min(j + kLanes<T>, tile.rows); ++l)
          sums.slopes[head.query_head(tile.r0 + l) - head.h_kv * head.group] -= sum[l - j];
      }
    if (p.drelative) add_relative_gradient(p, dS, head, tile, strip, sums.relative);
    if (p.score.softcap) multiply_strip(dS, derivative, strip);
  }

  // exp(score); exactly 1 at 0.
  PYATTN_MEMBER_INLINE vec<T> exp(vec<T> s) const { return exp2<T>(s * static_cast<T>(kLog2e)); }

  T from_score(T score) const { return score; }
  vec<T> to_score(vec<T> s) const { return s; }

 private:
  T softcap_, inner_;  // inner: factor / softcap

  // Clamps the cap so that neither it nor its inverse is infinite in float.
  static double bounded(double softcap) { return __builtin_fmin(__builtin_fmax(softcap, 0x1p-100), 0x1p100); }

  // s = softcap * tanh(inner * s); returns inner * s.
  static PYATTN_MEMBER_INLINE vec<T> cap(T* s, T inner, T softcap) {
    const vec<T> x = load(s) * inner;
    store(s, tanh<T>(x) * softcap);
    return x;
  }

  // s = factor * s - slope * distance
  static PYATTN_MEMBER_INLINE void approach(T* s, T factor, vec<T> slope, vec<T> distance) {
    store(s, fma(-slope, distance, load(s) * factor));
  }

  static PYATTN_MEMBER_INLINE void multiply(T* s, T factor) { store(s, load(s) * factor); }

  static vec<T> slopes_of(const ForwardParams& p, const Head& head, int64_t r0) {
    T slopes[kLanes<T>];
    for (int l = 0; l < kLanes<T>; ++l) slopes[l] = head.slope<T>(p, r0 + l);
    return load(slopes);
  }
};

}  // namespace
}  // namespace pyattn::PYATTN_ISA
