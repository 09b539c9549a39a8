// Scores: the one place where a product of a query and a key becomes a score, and where the
// gradient of a score becomes that of the product. Kernels are templates over the score;
// softmax is the same for all scores.
#pragma once

#include "cuda/products/fragment.h"
#include "cuda/ptx/primitives.h"
#include "cuda/products/product.h"
#include "cuda/tiles/relative_bias.h"
#include "cuda/ptx/math.h"
#include "shared/bias.h"

namespace pyattn::cuda {
namespace {

inline constexpr double kLog2e = 1.4426950408889634;
inline constexpr float kNegInf = -__builtin_inff();

// Whether a call's scores are General and not Plain. Plain divides a sink by the factor,
// which overflows for a factor near 0.
template <class Params>
bool general_score(const Params& p) {
  return !is_plain(p) || (p.score.sinks && fabs(p.softmax_scale) < 0x1p-32);
}

// The derivative of scores with respect to softmax_scale times product, where that is 1.
struct NoDerivative {
  PYATTN_DEVICE void set(int, int, int, float) {}
};

// score = softmax_scale * (q . k) = factor * s, where factor = |softmax_scale| and s has the sign
// of softmax_scale in it: a row's largest s belongs to its largest score, and exp applies the
// factor. row_max of the params is in units of s.
template <class S>
class Plain {
 public:
  static constexpr bool kGeneral = false;
  template <int kM, int kN>
  using Derivative = NoDerivative;

  PYATTN_DEVICE explicit Plain(const ForwardParams& p)
      : p_(p), exponent_(fmaxf(static_cast<float>(fabs(p.softmax_scale) * kLog2e), 0x1p-126f)) {}

  // Products of queries and keys -> s, in place, in either layout.
  template <Layout, int kM, int kN, class Place>
  PYATTN_DEVICE void to_scores(Sums<kM, kN>& C, NoDerivative, int, Place) const {
    if (signbit(p_.softmax_scale)) each_sum<kM, kN>([&](int m, int n, int i, int, int) { C[m][n][i] = -C[m][n][i]; });
  }

  // dS, the gradient of the scores -> the gradient of the products
  // divided by dscale, in place: here they are the same.
  template <int kM, int kN>
  PYATTN_DEVICE void to_products(Sums<kM, kN>&, NoDerivative) const {}

  // The factor that dQ = dS K and dK = dS^T Q are multiplied by when they are stored.
  PYATTN_DEVICE float dscale() const { return static_cast<float>(p_.softmax_scale); }

  // A sink in units of s. A finite sink stays finite, and so does its product with the exponent.
  PYATTN_DEVICE float from_sink(float sink) const {
    const float s = sink / static_cast<float>(fabs(p_.softmax_scale));
    return sink - sink == 0 ? fminf(fmaxf(s, -0x1p100f), 0x1p100f) : sink;
  }

  // The shift that exp subtracts for row_max; 0 for -inf, where no key was seen yet, because -inf - -inf is NaN.
  PYATTN_DEVICE float shift(float row_max) const {
    if (row_max == kNegInf) return 0;
    return sizeof(S) == 4 ? row_max : row_max * exponent_;
  }

  // exp(score - largest score). 16-bit types have one rounding fewer for
  // each weight, and one more that all weights of a row share.
  PYATTN_DEVICE float exp(float s, float shift) const {
    return sizeof(S) == 4 ? exp2((s - shift) * exponent_) : exp2(fmaf(s, exponent_, -shift));
  }

  // exp(sink - row_max), where row_max includes the sink's s; exactly 1 if the sink is the largest.
  PYATTN_DEVICE float weight_of_sink(float sink, float row_max) const {
    return sink == row_max && sink != kNegInf ? 1 : exp(sink, shift(row_max));
  }

  // log(sum of exp(score)), with row_max = largest s and
  // row_sum = sum of exp(score - largest score).
  PYATTN_DEVICE float lse(float row_max, float row_sum) const {
    return row_max * static_cast<float>(fabs(p_.softmax_scale)) + logf(row_sum);
  }

 private:
  const ForwardParams& p_;
  float exponent_;  // factor * log2(e), and never 0, so -inf stays -inf
};

// Minus the distance of a key from the position of row r's query, which ALiBi multiplies by its slope.
PYATTN_DEVICE int64_t minus_distance(const ForwardParams& p, const Head& head, int64_t r, int64_t key) {
  const int64_t offset = p.mask.q_offsets ? p.mask.q_offsets[head.b] : p.mask.q_offset;
  const auto distance =
      static_cast<int64_t>(static_cast<uint64_t>(offset) + static_cast<uint64_t>(head.query(r) - key));
  return distance < 0 ? distance : -distance;
}

// The derivative of softcap, kept because P overwrites the scores.
template <int kM, int kN>
struct SoftcapDerivative {
  Sums<kM, kN> of;

  PYATTN_DEVICE void set(int m, int n, int i, float x) { of[m][n][i] = x; }
};

// score = softcap * tanh(softmax_scale * (q . k) / softcap) + bias + relative bias - slope * distance, with the
// terms that are given. row_max of the params is a score.
template <class S>
class General {
 public:
  static constexpr bool kGeneral = true;
  template <int kM, int kN>
  using Derivative = SoftcapDerivative<kM, kN>;

  PYATTN_DEVICE explicit General(const ForwardParams& p) : p_(p) {}

  // Products of queries and keys -> scores, in place, in sums that begin at row, or key, `first`
  // of the tile at place().
  template <Layout kLayout, int kM, int kN, class D, class Place>
  PYATTN_DEVICE void to_scores(Sums<kM, kN>& C, D& derivative, int first, Place place) const {
    const bool capped = p_.score.softcap != 0;
    // Bounded so that neither the cap nor the factor is infinite.
    const double cap = capped ? fmin(fmax(p_.score.softcap, 0x1p-100), 0x1p100) : 1;
    const auto factor = static_cast<float>(fmin(fmax(p_.softmax_scale / cap, -0x1p127), 0x1p127));
    each_sum<kM, kN>([&](int m, int n, int i, int, int) { C[m][n][i] *= factor; });
    if (capped)
      each_sum<kM, kN>([&](int m, int n, int i, int, int) {
        derivative.set(m, n, i, tanh_derivative(C[m][n][i]));
        C[m][n][i] = static_cast<float>(cap) * tanh(C[m][n][i]);
      });
    const BiasType bias = is_packed(p_) ? BiasType::kNone : p_.score.bias.type;  // packed sequences take none
    if (bias == BiasType::kLikeQ) add_bias<S, kLayout>(C, first, place());
    if constexpr (sizeof(S) != sizeof(float))
      if (bias == BiasType::kFloat32) add_bias<float, kLayout>(C, first, place());
    if (p_.score.relative_bias) add_relative<kLayout>(C, first, place());
    if (p_.score.alibi_slopes) add_alibi<kLayout>(C, first, place());
  }

  // dS, the gradient of the scores -> the gradient of the products divided by dscale, in place.
  template <int kM, int kN>
  PYATTN_DEVICE void to_products(Sums<kM, kN>& dS, const Derivative<kM, kN>& derivative) const {
    if (p_.score.softcap != 0)
      each_sum<kM, kN>([&](int m, int n, int i, int, int) { dS[m][n][i] *= derivative.of[m][n][i]; });
  }

  // As in Plain, but a score may be the lowest finite number, so
  // every type subtracts before it multiplies.
  PYATTN_DEVICE float dscale() const { return p_.softmax_scale; }
  PYATTN_DEVICE float from_sink(float sink) const { return sink; }
  PYATTN_DEVICE float shift(float row_max) const { return row_max == kNegInf ? 0 : row_max; }
  PYATTN_DEVICE float exp(float s, float shift) const { return exp2((s - shift) * static_cast<float>(kLog2e)); }
  PYATTN_DEVICE float weight_of_sink(float sink, float row_max) const { return exp(sink, shift(row_max)); }
  PYATTN_DEVICE float lse(float row_max, float row_sum) const { return row_max + logf(row_sum); }

 private:
  template <class T, Layout kLayout, int kM, int kN, class Place>
  PYATTN_DEVICE void add_bias(Sums<kM, kN>& C, int first, const Place& place) const {
    const BiasView& bias = p_.score.bias;
    each_query<kLayout, kM, kN>(first, [&](int, int row, auto each_key) {
      const T* of_row = static_cast<const T*>(bias.data) + offset_of_row(bias, place.mask.head, place.row_of(row));
      each_key([&](int m, int n, int i, int key) { C[m][n][i] += widen(of_row[place.key_of(key) * bias.stride_k]); });
    });
  }

  template <Layout kLayout, int kM, int kN, class Place>
  PYATTN_DEVICE void add_relative(Sums<kM, kN>& C, int first, const Place& place) const {
    each_query<kLayout, kM, kN>(first, [&](int, int row, auto each_key) {
      const RelativeRow<float> bias(p_, place.mask.head, place.row_of(row), place.n0);
      each_key([&](int m, int n, int i, int key) { C[m][n][i] += bias.at(key); });
    });
  }

  template <Layout kLayout, int kM, int kN, class Place>
  PYATTN_DEVICE void add_alibi(Sums<kM, kN>& C, int first, const Place& place) const {
    const Head& head = place.mask.head;
    each_query<kLayout, kM, kN>(first, [&](int, int row, auto each_key) {
      const int64_t r = place.row_of(row);
      const auto slope = head.slope<float>(p_, r);
      each_key([&](int m, int n, int i, int key) {
        C[m][n][i] = fmaf(slope, static_cast<float>(minus_distance(p_, head, r, place.key_of(key))), C[m][n][i]);
      });
    });
  }

  const ForwardParams& p_;
};

// The float64 kernels take scores one by one, so one class serves all of them. row_max is a score.
template <>
class General<double> {
 public:
  PYATTN_DEVICE explicit General(const ForwardParams& p) : p_(p) {}

  // The score of row r and key j, and its derivative with respect to dscale times product.
  struct Value {
    double score, derivative;
  };
  PYATTN_DEVICE Value at(const Head& head, int64_t r, int64_t j, double product) const {
    Value value{p_.softmax_scale * product, 1};
    if (const double cap = p_.score.softcap; cap != 0) {
      const double x = value.score / cap, u = ::exp(-2 * fabs(x));
      value = {cap * ::tanh(x), 4 * u / ((1 + u) * (1 + u))};
    }
    const BiasView& bias = p_.score.bias;
    if (has_bias(p_.score))
      with_elements<double>(bias, [&](const auto* elements) {
        value.score += elements[offset_of_row(bias, head, r) + j * bias.stride_k];
      });
    if (p_.score.relative_bias) value.score += RelativeRow<double>(p_, head, r, j).at(0);
    if (p_.score.alibi_slopes) value.score += head.slope<double>(p_, r) * minus_distance(p_, head, r, j);
    return value;
  }

  PYATTN_DEVICE double dscale() const { return p_.softmax_scale; }

 private:
  const ForwardParams& p_;
};

}  // namespace
}  // namespace pyattn::cuda
