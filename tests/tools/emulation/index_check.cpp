// Checks the index functions of the CUDA kernels on a host: where tiles put their chunks, which
// part, block or tile takes which columns, rows, keys and elements of a bias. Also tanh and Philox.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <set>
#include <tuple>

#include "cuda/plan/bias_items.h"
#include "cuda/plan/work.h"
#include "cuda/tiles/dropout.h"
#include "cuda/products/product.h"
#include "cuda/plan/forward_splits.h"
#include "cuda/ptx/math.h"
#include "threads.h"
#include "cuda/products/matrix.h"

namespace pyattn::cuda {
namespace {

int failures = 0;

void expect(bool good, const char* what, int a = 0, int b = 0) {
  if (good) return;
  ++failures;
  std::printf("%s: %d %d\n", what, a, b);
}

// Every chunk has its own place within the tile, and the same chunk
// of eight consecutive rows lies in all banks, 128 bytes.
template <class S, int kRows, int kCols>
void check_tile() {
  using T = SharedMatrix<S, kRows, kCols>;
  std::set<int> places;
  for (int row = 0; row < kRows; ++row)
    for (int chunk = 0; chunk < T::kChunks; ++chunk) {
      const int place = T::offset(row, chunk);
      expect(place % kChunkBytes == 0 && 0 <= place && place + kChunkBytes <= T::kBytes, "outside", row, chunk);
      expect(places.insert(place).second, "two chunks in one place", row, chunk);
    }
  for (int row = 0; row < kRows; row += 8)
    for (int chunk = 0; chunk < T::kChunks; ++chunk) {
      std::set<int> banks;
      for (int i = 0; i < 8; ++i) banks.insert(T::offset(row + i, chunk) % 128);
      expect(banks.size() == 8, "bank conflict", row, chunk);
    }
}

// A cursor reaches the chunks that it should, from each row and either first chunk.
template <class S, int kRows, int kCols>
void check_cursor() {
  using T = SharedMatrix<S, kRows, kCols>;
  alignas(128) static char memory[T::kBytes];
  const T tile{memory};
  for (int row = 0; row < 16; ++row)
    for (int first = 0; first < 2; ++first) {
      const Cursor<T> cursor(tile, row, first);
      for (int rows = 0; row + rows < kRows; rows += 8)
        for (int s = 0; first + 2 * s < T::kChunks; ++s)
          expect(cursor.at(rows, s) == shared_address(tile.chunk(row + rows, first + 2 * s)), "cursor", row + rows, s);
    }
}

template <class S, int kDim, int kParts>
void check_parts() {
  std::set<int> columns;
  for (int part = 0; part < kParts; ++part)
    for (int n = 0; n < kDim / kParts / 8; ++n) {
      const int column = column_of_part<S, kParts>(n, part);
      expect(column % 8 == 0 && 0 <= column && column < kDim && columns.insert(column).second, "columns", n, part);
    }
}

template <class S>
void check_dims() {
  check_tile<S, 16, 32>(), check_tile<S, 64, 64>(), check_tile<S, 32, 96>(), check_tile<S, 32, 128>();
  check_tile<S, 16, 192>(), check_tile<S, 16, 256>();
  check_cursor<S, 16, 32>(), check_cursor<S, 64, 64>(), check_cursor<S, 32, 96>(), check_cursor<S, 32, 128>();
  check_cursor<S, 16, 192>(), check_cursor<S, 16, 256>();
  check_parts<S, 192, 2>(), check_parts<S, 256, 2>(), check_parts<S, 96, 1>();
}

// Blocks of threads cover every row, and every key, of every head once.
void check_blocks() {
  ForwardParams p{};
  p.batch = 2, p.num_heads_q = 6, p.num_heads_kv = 2, p.seqlen_q = 45, p.seqlen_k = 70, p.mask.causal = true;
  int64_t& block = emulation::here.block;
  std::set<std::tuple<int64_t, int64_t, int>> rows, keys;
  for (block = 0; block < 2 * 2 * 3; ++block) {
    const RowBlock<64> here(p);
    for (int i = 0; i < here.rows(); ++i) rows.insert({here.head.b, here.head.h_kv, here.first() + i});
  }
  for (block = 0; block < 2 * 2 * 3; ++block) {
    const KeyBlock<32> here(p);
    for (int j = 0; j < here.keys(); ++j) keys.insert({here.head.b, here.head.h_kv, here.first() + j});
  }
  expect(rows.size() == 2 * 2 * 45 * 3, "rows", rows.size());
  expect(keys.size() == 2 * 2 * 70, "keys", keys.size());
  block = 0;
  expect(RowBlock<64>(p).first() == 128, "the longest rows first");
}

// Splits have each key exactly once, there are no more of them than blocks, and the partial results of sequences
// that follow each other have room.
void check_splits() {
  for (int64_t rows = 1; rows <= kSplitRows + 1; ++rows)
    for (int64_t seqlen_k = 0; seqlen_k < 100000; seqlen_k += seqlen_k < 3000 ? 1 : 977) {
      const Splits splits(rows, seqlen_k);
      if (splits.count <= 1) continue;
      expect(splits.keys % kSplitStep == 0 && rows <= kSplitRows, "keys of a split", rows, seqlen_k);
      expect(splits.keys_of(0).begin == 0 && splits.keys_of(1).begin == splits.keys_of(0).end, "a gap", rows, seqlen_k);
      const Range last = splits.keys_of(splits.count - 1);
      expect(last.begin < seqlen_k && seqlen_k <= last.end, "the last split", rows, seqlen_k);
      expect(splits.count <= min(ceil_div(seqlen_k, kSplitKeys), kMostSplits), "more splits than blocks", rows,
             seqlen_k);
      for (int64_t most = rows; most <= kSplitRows; ++most)
        for (int64_t first : {0, 1, 255, 1000001})
          expect(SplitResults::room(most, first) + rows * splits.count <= SplitResults::room(most, first + seqlen_k),
                 "no room for a sequence", rows, seqlen_k);
    }
}

// Every element of a bias's gradient lies in one tile, and every score belongs to exactly one tile.
void check_bias_tiles() {
  BackwardParams p{};
  p.batch = 2, p.num_heads_q = 3, p.num_heads_kv = 1, p.seqlen_q = 21, p.seqlen_k = 37;
  for (int full = 0; full < 16; ++full) {
    const int64_t sizes[] = {full & 1 ? p.batch : 1, full & 2 ? p.num_heads_q : 1, full & 4 ? p.seqlen_q : 1,
                             full & 8 ? p.seqlen_k : 1};
    p.dbias.stride_b = full & 1 ? sizes[1] * sizes[2] * sizes[3] : 0;
    p.dbias.stride_h = full & 2 ? sizes[2] * sizes[3] : 0;
    p.dbias.stride_q = full & 4 ? sizes[3] : 0, p.dbias.stride_k = full & 8 ? 1 : 0;
    const BiasItems<8, 16> tiles(p);
    std::set<int64_t> elements;
    int64_t scores = 0;
    for (int64_t at = 0; at < tiles.count(); ++at) {
      const BiasItem tile(p, tiles, at);
      scores += tile.sequences.count() * tile.heads.count() * tile.queries.count() * tile.keys.count();
      for (int64_t i = 0; i < (full & 4 ? tile.queries.count() : 1); ++i)
        for (int64_t j = 0; j < (full & 8 ? tile.keys.count() : 1); ++j)
          expect(elements.insert(tile.offset(p.dbias) + i * p.dbias.stride_q + j * p.dbias.stride_k).second,
                 "two tiles of a bias", full);
    }
    const int64_t count = sizes[0] * sizes[1] * sizes[2] * sizes[3];
    expect(static_cast<int64_t>(elements.size()) == count && *elements.rbegin() == count - 1, "bias", full);
    expect(scores == 2 * 3 * 21 * 37, "scores of a bias", full);
    expect(one_score_each(p) == (full == 15), "a bias broadcasts", full);
  }
}

// Every 101st float, of either sign, and NaN.
void check_tanh() {
  double worst = 0;
  for (uint32_t bits = 0; bits < 0x7f800000; bits += 101) {
    const float x = std::bit_cast<float>(bits), y = tanh(x);
    const double exact = std::tanh(static_cast<double>(x));
    const float ulp = std::max(std::nextafterf(y, 2) - y, 0x1p-149f);
    worst = std::max(worst, std::abs(y - exact) / ulp);
    expect(tanh(-x) == -y, "tanh is odd", bits);
    expect(bits > 0x39000000 || y == x, "tanh near 0", bits);
  }
  expect(worst <= 2, "tanh, ulp", static_cast<int>(worst));
  for (uint32_t bits = 0; bits < 0x42200000; bits += 101) {  // up to 40
    const float x = std::bit_cast<float>(bits);
    const double u = std::exp(-2.0 * x), exact = 4 * u / ((1 + u) * (1 + u));
    // A few roundings, and that of the exponent, whose effect grows with x.
    expect(std::abs(tanh_derivative(x) - exact) <= (4 + 3 * x) * 0x1p-24 * exact, "derivative of tanh", bits);
  }
  expect(tanh_derivative(__builtin_inff()) == 0 && tanh_derivative(0) == 1, "derivative of tanh at the ends");
  expect(tanh(__builtin_inff()) == 1 && std::isnan(tanh(__builtin_nanf(""))), "tanh at the ends");
}

// The known answer of Philox4x32-10 for a counter and key of all
// ones (Salmon et al., the kat_vectors of Random123).
void check_philox() {
  Philox x{{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}};
  x.rounds(0xffffffffffffffff);
  const uint32_t known[] = {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd};
  for (int i = 0; i < 4; ++i) expect(x.word[i] == known[i], "philox", i);
}

}  // namespace
}  // namespace pyattn::cuda

int main() {
  using namespace pyattn;
  cuda::check_dims<f16>();
  cuda::check_dims<float>();
  cuda::check_blocks();
  cuda::check_splits();
  cuda::check_bias_tiles();
  cuda::check_tanh();
  cuda::check_philox();
  if (cuda::failures == 0) std::puts("ok");
  return cuda::failures != 0;
}
