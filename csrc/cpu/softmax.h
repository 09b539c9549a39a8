// The elementwise passes between the products, over tiles S[key][query] with queries on the lanes: every reduction over
// keys is a vertical one.
#pragma once

namespace pyattn::PYATTN_ISA {
namespace {

template <class T>
inline constexpr T kNegInf = -static_cast<T>(__builtin_inff());

// softmax_scale = power * factor, power being the power of two below it, with its sign, and at most 1. Q is packed times
// power, which is exact and can't overflow, and the tiles hold S / factor: the score is rounded once, as it enters the
// exponential. (Scaling Q by softmax_scale * log2(e) would round Q, and overflow for scores near the largest number.)
template <class T>
struct Scale {
  T power = 0, factor = 1;

  explicit Scale(double softmax_scale) {
    if (softmax_scale == 0) return;
    int exponent;  // of a fraction in [1/2, 1)
    __builtin_frexp(softmax_scale, &exponent);
    const double exact = __builtin_copysign(__builtin_ldexp(1.0, exponent > 1 ? 0 : exponent - 1), softmax_scale);
    power = static_cast<T>(exact), factor = static_cast<T>(softmax_scale / exact);
  }

  // exp(score) for s = score / factor; exactly 1 at 0.
  __attribute__((always_inline)) vec<T> exp(vec<T> s) const { return exp2<T>(s * static_cast<T>(factor * kLog2e)); }
};

// Online softmax (Milakov and Gimelshein 2018) of a block of queries: after each key block, row_max is the largest
// entry of S / factor, row_sum = sum exp(S - factor * row_max), and sums made before, with a smaller row_max, are worth
// decay times as much.
template <class T>
struct SoftmaxState {
  alignas(kScratchAlign) T row_max[kBlockQ<T>], row_sum[kBlockQ<T>], decay[kBlockQ<T>];

  SoftmaxState() {
    for (int64_t i = 0; i < kBlockQ<T>; ++i) row_max[i] = kNegInf<T>, row_sum[i] = 0;
  }
};

// -inf - -inf is NaN: where nothing was seen yet, subtract 0 and let exp(-inf) be 0.
template <class T>
PYATTN_INLINE vec<T> finite_shift(vec<T> x) {
  return x == kNegInf<T> ? vec<T>{} : x;
}

// Writes a row's maximum, sum and lse, and returns what its output is still to be multiplied by: 1 / row_sum. A row whose
// keys all score -inf divides 0 by 0, as softmax does; one that sees no key does not.
template <class T>
T finish_row(const ForwardParams& p, const HeadRows& head, int64_t r, T row_max, T row_sum, Scale<T> scale) {
  const int64_t at = head.index(p, r);
  static_cast<T*>(p.row_max)[at] = row_max, static_cast<T*>(p.row_sum)[at] = row_sum;
  static_cast<T*>(p.lse)[at] = scale.factor * row_max + log(row_sum);
  return head.visible_keys(r) ? 1 / row_sum : T(0);
}

// P = exp(S - row_max) in place of S / factor, and the new state, for the lanes [j0, j0 + kNV vectors) and,
// below, [j0, j1). seen counts the
// keys that a lane sees, as mask_tile gives it.
template <int kNV, bool kMasked, class T>
void softmax_panel(Rows<T> S, int64_t keys, int64_t j0, const T* seen, Scale<T> scale, SoftmaxState<T>& state) {
  constexpr int L = kLanes<T>;
  vec<T> limit[kNV], old_max[kNV], new_max[kNV], shift[kNV], sum[kNV] = {};
#pragma GCC unroll 16
  for (int v = 0; v < kNV; ++v) {
    limit[v] = kMasked ? load(seen + j0 + v * L) : vec<T>{};
    new_max[v] = old_max[v] = load(state.row_max + j0 + v * L);
  }
  for (int64_t k = 0; k < keys; ++k)
#pragma GCC unroll 16
    for (int v = 0; v < kNV; ++v) {
      vec<T> s = load(S.data + k * S.row + j0 + v * L);
      if constexpr (kMasked) s = static_cast<T>(k) < limit[v] ? s : set1(kNegInf<T>);
      new_max[v] = max(s, new_max[v]);  // a NaN does not enter here; it makes its own P, and so the sum, NaN
    }
#pragma GCC unroll 16
  for (int v = 0; v < kNV; ++v) shift[v] = finite_shift<T>(new_max[v]);
  for (int64_t k = 0; k < keys; ++k)
#pragma GCC unroll 16
    for (int v = 0; v < kNV; ++v) {
      T* s = S.data + k * S.row + j0 + v * L;
      vec<T> p = scale.exp(load(s) - shift[v]);
      if constexpr (kMasked) p = static_cast<T>(k) < limit[v] ? p : vec<T>{};
      sum[v] += p;
      store(s, p);
    }
#pragma GCC unroll 16
  for (int v = 0; v < kNV; ++v) {
    const int64_t j = j0 + v * L;
    const vec<T> decay = scale.exp(old_max[v] - shift[v]);
    store(state.row_max + j, new_max[v]);
    store(state.row_sum + j, fma(load(state.row_sum + j), decay, sum[v]));
    store(state.decay + j, decay);
  }
}

template <bool kMasked, class T, int kNV = kMaxNV>
void softmax_tile(Rows<T> S, int64_t keys, int64_t j0, int64_t j1, const T* seen, Scale<T> scale,
                  SoftmaxState<T>& state) {
  constexpr int64_t width = kNV * kLanes<T>;
  for (; j0 + width <= j1; j0 += width) softmax_panel<kNV, kMasked>(S, keys, j0, seen, scale, state);
  if constexpr (kNV > 1)
    if (j0 < j1) softmax_tile<kMasked, T, kNV - 1>(S, keys, j0, j1, seen, scale, state);
}

// delta += rowsum(P * dP), with P as below, of tiles that hold all keys of their rows.
template <bool kMasked, class T>
void add_delta_tile(Rows<T> S, Rows<T> dP, int64_t keys, int64_t j0, int64_t j1, const T* seen, Scale<T> scale,
                    const T* row_max, const T* inverse_sum, T* delta) {
  for (int64_t j = j0; j < j1; j += kLanes<T>) {
    vec<T> sum = {};
    for (int64_t k = 0; k < keys; ++k) {
      const vec<T> p = scale.exp(load(S.from(k).data + j) - load(row_max + j)) * load(inverse_sum + j);
      const vec<T> more = fma(p, load(dP.from(k).data + j), sum);
      if constexpr (kMasked)
        sum = static_cast<T>(k) < load(seen + j) ? more : sum;
      else
        sum = more;
    }
    store(delta + j, load(delta + j) + sum);
  }
}

// From the tiles S / factor and dP: P = exp(S - factor * row_max) * inverse_sum in place of the first,
// dS = P (dP - delta + dlse) in place of the second.
template <bool kMasked, class T>
void softmax_gradient_tile(Rows<T> S, Rows<T> dP, int64_t keys, int64_t j0, int64_t j1, const T* seen, Scale<T> scale,
                           const T* row_max, const T* inverse_sum, const T* delta, const T* dlse) {
  for (int64_t k = 0; k < keys; ++k)
    for (int64_t j = j0; j < j1; j += kLanes<T>) {
      T *s = S.data + k * S.row + j, *ds = dP.data + k * dP.row + j;
      vec<T> p = scale.exp(load(s) - load(row_max + j)) * load(inverse_sum + j);
      vec<T> d = p * (load(ds) - load(delta + j) + load(dlse + j));
      if constexpr (kMasked) {
        const auto sees = static_cast<T>(k) < load(seen + j);
        p = sees ? p : vec<T>{}, d = sees ? d : vec<T>{};
      }
      store(s, p);
      store(ds, d);
    }
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
