// Scores and weights. The kernels' S is the sign of softmax_scale times Q K^T, so that a row's largest S is its largest score;
// the rest of the scale enters with the exponential. row_max of the params is in units of S.
#pragma once

namespace pyattn::cuda {
namespace {

inline constexpr double kLog2e = 1.4426950408889634;
inline constexpr float kNegInf = -__builtin_inff();

template <class S>
struct Softmax {
  const ForwardParams& p;
  float exponent;  // the magnitude of softmax_scale times log2(e); not 0, so that -inf stays what it is

  PYATTN_DEVICE explicit Softmax(const ForwardParams& p)
      : p(p), exponent(fmaxf(static_cast<float>(fabs(p.softmax_scale) * kLog2e), 0x1p-126f)) {}

  // What weight takes for row_max; 0 where nothing was seen yet, for -inf - -inf is NaN.
  PYATTN_DEVICE float shift(float row_max) const {
    if (row_max == kNegInf) return 0;
    return sizeof(S) == 4 ? row_max : row_max * exponent;
  }

  // exp(score - largest score). In 16 bits with one rounding less to do, and one more in what all weights of the row share.
  PYATTN_DEVICE float weight(float s, float shift) const {
    return sizeof(S) == 4 ? exp2((s - shift) * exponent) : exp2(fmaf(s, exponent, -shift));
  }

  template <int kM, int kN>
  PYATTN_DEVICE void apply_sign(Sums<kM, kN>& C) const {
    if (signbit(p.softmax_scale)) each_sum<kM, kN>([&](int m, int n, int i, int, int) { C[m][n][i] = -C[m][n][i]; });
  }
};

// How many keys the rows of a warp see, of which a lane has 2 kM: row m, half is 16 m + 8 half + lane / 4, counting from
// the warp's first row of the block.
template <int kM>
struct RowLimits {
  int limit[kM][2];

  template <class Block>
  PYATTN_DEVICE RowLimits(const Block& block, int warp_row) {
    const int r0 = block.first() + warp_row;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        limit[m][half] = static_cast<int>(block.head.visible_keys(r0 + 16 * m + 8 * half + lane() / 4));
  }

  // Whether the row of sum m, i sees the key.
  PYATTN_DEVICE bool sees(int m, int i, int key) const { return key < limit[m][i / 2]; }
};

// Over the four lanes that share a row of sums.
template <class F>
PYATTN_DEVICE float reduce_row(float x, F f) {
  x = f(x, shuffle_xor(x, 1));
  return f(x, shuffle_xor(x, 2));
}

// Online softmax (Milakov and Gimelshein 2018) of the rows of a warp. row_sum is of the lane's own columns until finish.
template <class S, int kM>
struct SoftmaxState {
  float row_max[kM][2], row_sum[kM][2];

  PYATTN_DEVICE SoftmaxState() {
#pragma unroll
    for (int m = 0; m < kM; ++m)
      for (int half = 0; half < 2; ++half) row_max[m][half] = kNegInf, row_sum[m][half] = 0;
  }

  // P in place of C, and the output so far worth as much as what is to come.
  template <int kN, int kCols>
  PYATTN_DEVICE void update(Softmax<S> softmax, Sums<kM, kN>& C, Sums<kM, kCols>& O) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float most = row_max[m][half];  // a NaN does not enter here; it makes its own P, and so the sum, NaN
#pragma unroll
        for (int n = 0; n < kN; ++n) most = fmaxf(fmaxf(most, C[m][n][2 * half]), C[m][n][2 * half + 1]);
        most = reduce_row(most, [](float x, float y) { return fmaxf(x, y); });
        const float shift = softmax.shift(most), decay = softmax.weight(row_max[m][half], shift);
        float sum = 0;
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) sum += C[m][n][i] = softmax.weight(C[m][n][i], shift);
        row_max[m][half] = most, row_sum[m][half] = row_sum[m][half] * decay + sum;
#pragma unroll
        for (int n = 0; n < kCols; ++n) O[m][n][2 * half] *= decay, O[m][n][2 * half + 1] *= decay;
      }
  }

  // Writes the row's maximum, sum and lse, and puts in place of row_sum what its output is still to be multiplied by: 1 /
  // row_sum. A row whose keys all score -inf divides 0 by 0, as softmax does; one that sees no key does not.
  PYATTN_DEVICE void finish(const ForwardParams& p, const HeadRows& head, int r0) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float sum = reduce_row(row_sum[m][half], [](float x, float y) { return x + y; });
        const int r = r0 + 16 * m + 8 * half + lane() / 4;
        if (r >= head.count) continue;
        const bool sees_any = head.visible_keys(r) > 0;
        row_sum[m][half] = sees_any ? 1 / sum : 0;
        if (lane() % 4 != 0) continue;
        const int64_t at = head.index(p, r);
        static_cast<float*>(p.row_max)[at] = row_max[m][half], static_cast<float*>(p.row_sum)[at] = sum;
        static_cast<float*>(p.lse)[at] =
            sees_any ? row_max[m][half] * static_cast<float>(fabs(p.softmax_scale)) + logf(sum) : kNegInf;
      }
  }
};

// What backward needs to know of a row.
struct alignas(16) RowTerms {
  float shift, factor;  // of its weights: exp2(S, shift) * factor
  float delta;          // rowsum(dO * O) - dlse
  float share;          // 1; 0 for a row that sees one key alone, whose weight is 1 whatever dP is

  // P and dS in place of S and dP, the latter times what dropout makes of it.
  template <class S>
  PYATTN_DEVICE void gradient(Softmax<S> softmax, float& s, float& dp) const {
    s = softmax.weight(s, shift) * factor;
    dp = s * fmaf(dp, share, -delta);
  }
};

}  // namespace
}  // namespace pyattn::cuda
