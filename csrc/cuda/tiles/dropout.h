// Dropout: the draws that cpu/tiles/dropout.h defines, kept as bits in shared
// memory, where they serve tiles of either layout.
#pragma once

#include "cuda/ptx/primitives.h"
#include "cuda/products/product.h"
#include "shared/dropout.h"
#include "shared/heads.h"

namespace pyattn::cuda {
namespace {

// Philox4x32-10 (Salmon et al. 2011): counter -> four random words, in place.
struct Philox {
  uint32_t word[4];

  PYATTN_DEVICE void rounds(uint64_t seed) {
    uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
#pragma unroll
    for (int i = 0; i < 10; ++i, key0 += 0x9E3779B9, key1 += 0xBB67AE85) {
      const uint32_t high0 = multiply_high(word[0], 0xD2511F53), low0 = word[0] * 0xD2511F53;
      const uint32_t high2 = multiply_high(word[2], 0xCD9E8D57), low2 = word[2] * 0xCD9E8D57;
      word[0] = high2 ^ word[1] ^ key0, word[1] = low2;
      word[2] = high0 ^ word[3] ^ key1, word[3] = low0;
    }
  }
};

// Bit i: whether row r keeps key + i, for i < 8; key is a multiple of 8.
PYATTN_DEVICE uint32_t draw_kept(const ForwardParams& p, const FirstDraw& first, const Head& head, int64_t r,
                                 int64_t key) {
  const uint64_t index = first.head + head.query_head(r);
  uint32_t bits = 0;
  // With a shift, the eight keys lie in two groups.
#pragma unroll 1
  for (int n = 0; n <= (first.shift != 0); ++n) {
    Philox draws{{first.group + static_cast<uint32_t>(key / kDrawKeys) + n,
                  first.query + static_cast<uint32_t>(head.query(r)), static_cast<uint32_t>(index),
                  static_cast<uint32_t>(index >> 32)}};
    draws.rounds(static_cast<uint64_t>(*p.dropout.seed));
#pragma unroll
    for (int i = 0; i < kDrawKeys; ++i) {
      const uint32_t draw = i % 2 ? draws.word[i / 2] >> 16 : draws.word[i / 2] & 0xffff;
      bits |= static_cast<uint32_t>(draw >= p.dropout.threshold) << (n * kDrawKeys + i);
    }
  }
  return bits >> first.shift;
}

// The dropout factors of a tile of kRows rows and kKeys keys.
template <int kRows, int kKeys>
struct DropoutTile {
  static constexpr int kBytes = kRows * kKeys / kDrawKeys;
  const ForwardParams& p;
  uint8_t* bits;  // [kRows][kKeys / 8]
  float scale;    // of weights that are kept; 1 without dropout

  PYATTN_DEVICE DropoutTile(const ForwardParams& p, char* memory)
      : p(p), bits(reinterpret_cast<uint8_t*>(memory)), scale(65536.0f / (65536 - p.dropout.threshold)) {}

  PYATTN_DEVICE bool any() const { return p.dropout.threshold; }

  // Draws for the rows r0, r0 + step and so on, and the keys from n0 on. A barrier must follow.
  template <int kThreads>
  PYATTN_DEVICE void draw(const Head& head, int r0, int n0, int step = 1) const {
    constexpr int kGroups = kKeys / kDrawKeys;
    const FirstDraw first(p, head.b);
    for (unsigned at = opaque(thread_index()); at < kBytes; at += kThreads)
      bits[at] = draw_kept(p, first, head, r0 + at / kGroups * step, n0 + at % kGroups * kDrawKeys);
  }

  PYATTN_DEVICE float factor(int row, int key) const {
    return bits[row * (kKeys >> 3) + (key >> 3)] >> (key & 7) & 1 ? scale : 0;
  }

  // Multiplies C[queries][keys], or [keys][queries], by the factors; the
  // warp's sums begin at row, or key, `first` of the tile.
  template <Layout kLayout, int kM, int kN>
  PYATTN_DEVICE void apply(Sums<kM, kN>& C, int first) const {
    if (!any()) return;
    each_query<kLayout, kM, kN>(first, [&](int, int row, auto each_key) {
      each_key([&](int m, int n, int i, int key) { C[m][n][i] *= factor(row, key); });
    });
  }
};

}  // namespace
}  // namespace pyattn::cuda
