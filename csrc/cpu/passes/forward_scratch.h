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

// How keys or values are packed: a row for each, a row for each pair, or a column for each pair.
enum class Packing { kRows, kPairs, kColumns };

// Rows of K or V as operands, in scratch.
template <class E, Packing kPacking>
struct PackedRows {
  Matrix<E> rows;  // [keys or pairs][columns]; [columns][pairs]
  bool whole;      // whether they are those of a whole head, else of a tile

  void take(Carver& carver, int64_t seqlen, int64_t cols) {
    whole = places(seqlen) * cols * int64_t{sizeof(E)} <= kPackedBytes;
    const int64_t count = places(whole ? seqlen : kForwardBlockK);
    if constexpr (kPacking == Packing::kColumns)
      rows = carver.take_spread<E>(round_up(cols, kRegisterTerms), round_up(count, kRegisterTerms));
    else
      rows = kTileRegisters<E> ? carver.take_spread<E>(count, cols) : carver.take<E>(count, cols);
  }

  // The rows of `keys`, from an even key on. pack(keys, rows) packs those that are not in `packed`, the keys of the head whose
  // rows are there. An odd last key is paired with 0, and packed again once it is followed by another.
  template <class Pack>
  Matrix<const E> of(Range& packed, Range keys, Pack pack) const {
    if (!whole) {
      pack(keys, rows);
      return rows;
    }
    const int64_t paired = kPacking == Packing::kRows ? keys.end : round_down(keys.end, 2);
    if (packed.end < keys.begin || keys.end < packed.begin) packed = {keys.begin, keys.begin};
    const auto add = [&](Range missing) {
      if (!missing.empty()) pack(missing, from(missing.begin));
    };
    add({keys.begin, packed.begin});
    add({min(packed.end, paired), keys.end});
    packed = {min(packed.begin, keys.begin), paired < keys.end ? paired : max(packed.end, paired)};
    return from(keys.begin);
  }

 private:
  static constexpr int64_t places(int64_t keys) { return kPacking == Packing::kRows ? keys : (keys + 1) / 2; }
  Matrix<E> from(int64_t key) const {
    return kPacking == Packing::kColumns ? rows.from_column(places(key)) : rows.from(places(key));
  }
};

// Whether rows of K or V that could be read in place are copied: each panel of queries reads them again, but rows a whole number
// of pages apart evict each other from L1, and rows on many pages wait for the translation of addresses. With AVX2, in (batch,
// seqlen, heads, head_dim), 128 to 6,000 tokens of 16 heads of 64 columns take 0.96 to 0.75 of the time, 700 to 4,096 of 12 heads
// 0.98 to 0.8, 32 queries over 256 cached keys 1.05. Not measured with vectors of 64 bytes, whose panels are four times as wide.
template <class S>
bool copies_rows(const ForwardParams& p, const View& view) {
  constexpr int64_t kPanel = kMaxNV * kLanes<Compute<S>>, kFarBytes = 2048, kManyRows = 512;
  const int64_t bytes = view.stride_s * static_cast<int64_t>(sizeof(S)), rows = most_rows(p);
  if (kVectorBytes == 64 || p.seqlen_k < 64 || rows <= kPanel) return false;
  return bytes % kConflictBytes == 0 || (bytes >= kFarBytes && rows >= kManyRows);
}

// ---- Left factors of tile registers ----

// Whether rows of a tensor fill tile registers as a left factor where they lie. A register whose rows lie across cache lines
// takes six times as long to load.
template <class S>
bool fills_registers(const View& view, int64_t cols) {
  constexpr int64_t kLine = kCacheLine / sizeof(S);
  return reinterpret_cast<uintptr_t>(view.data) % kCacheLine == 0 && cols % kLine == 0 && view.stride_s % kLine == 0 &&
         view.stride_h % kLine == 0 && view.stride_b % kLine == 0;
}

// Packs rows that are summed over as such a factor: from[rows][cols] -> dst[cols][terms(rows)]. Columns
// are written up to a multiple of 16; zeros follow the last.
template <class S>
void pack_summed_columns(Matrix<Operand<S>> dst, int64_t rows, int64_t cols, Matrix<const S> from) {
  constexpr int L = kLanes<bf16_pair>;
  for (int64_t i = 0; i < rows; i += 2 * L)
    for (int64_t d = 0; d < cols; d += 2 * L) {
      const int64_t n = min(2 * L, cols - d);
      vec<bf16_pair> low[L] = {}, high[L] = {};  // the columns [d, d + L), and those after them
      for (int64_t r = 0, key = i; r < L && key < rows; ++r, key += 2) {
        low[r] = load_operands(from.at(key) + d, n);
        if (key + 1 < rows) high[r] = load_operands(from.at(key + 1) + d, n);
        interleave(low[r], high[r], std::make_index_sequence<2 * L>{});
      }
      const auto write = [&](vec<bf16_pair>(&square)[L], int64_t column) {
        transpose<bf16_pair>(square);
        for (int64_t c = 0; c < L; ++c)
          store(reinterpret_cast<float*>(dst.at(column + c) + i / 2), bit_cast<float>(square[c]), terms<S>(rows - i));
      };
      write(low, d);
      if (n > L) write(high, d + L);
    }
}

// ---- The scratch ----

template <class S>
struct ForwardScratch {
  using T = Compute<S>;
  using E = Operand<S>;
  Matrix<E> Qt;  // [query_terms(head_dim)][queries]
  Matrix<T> P;   // [keys][queries]
  Matrix<T> Ot;  // [head_dim_v][queries]
  // [keys][head_dim], [keys][head_dim_v]: copies, if tensors can't be read in place.
  PackedRows<E, Packing::kRows> K;
  PackedRows<E, kTileRegisters<E> ? Packing::kColumns : kPairs<S> ? Packing::kPairs : Packing::kRows> V;
  Matrix<S> page_K, page_V;  // the same shapes in the storage type, if keys are copied
  Matrix<E> weights;         // [terms(keys)][queries]: P as an operand of bf16 pairs
  bool copies_K, copies_V;   // whether rows of K and V are copied into K and V
  Matrix<T> joined;          // [head_dim_v][queries]: Ot of the ranges so far, if invariant rows have several
  int64_t bytes;

  ForwardScratch(const ForwardParams& p, void* base) {
    Carver carver(base);
    Qt = carver.take<E>(query_terms<S>(p.head_dim), kBlockQ<T>);
    P = carver.take<T>(kForwardBlockK, kBlockQ<T>);
    Ot = carver.take<T>(p.head_dim_v, kBlockQ<T>);
    if constexpr (kTileRegisters<E>)
      copies_K = keys_copied(p) || !fills_registers<S>(p.k, p.head_dim);
    else
      copies_K = !kPairs<S> && copies(p, p.k);
    copies_V = copies(p, p.v);
    const int64_t uncopied = kPairs<S> && !kTileRegisters<E> ? kForwardBlockK : 0;
    K.take(carver, copies_K ? p.seqlen_k : uncopied, round_up(query_terms<S>(p.head_dim), kLanes<T>));
    V.take(carver, copies_V ? p.seqlen_k : 0, round_up(p.head_dim_v, kLanes<T>));
    page_K = carver.take<S>(keys_copied(p) ? kForwardBlockK : 0, round_up(p.head_dim, kLanes<T>));
    page_V = carver.take<S>(keys_copied(p) ? kForwardBlockK : 0, round_up(p.head_dim_v, kLanes<T>));
    weights = carver.take<E>(kPairs<S> ? terms<S>(kForwardBlockK) : 0, kBlockQ<T>);
    joined = carver.take<T>(p.cpu.row_invariant && p.seqlen_k > kInvariantSplit ? p.head_dim_v : 0, kBlockQ<T>);
    bytes = carver.bytes();
  }

  // The keys of a tile, the left factor in S^T = K Q^T: [keys][head_dim], in place or packed. `packed`: of the head.
  Matrix<const E> pack_keys(Matrix<const S> rows, Range keys, int64_t cols, Range& packed) const {
    if (!copies_K) {
      const Strided<E> in_place = left_keys<S>(rows, keys.count(), cols, K.rows);
      return {in_place.data, in_place.row};
    }
    return K.of(packed, keys, [&](Range some, Matrix<E> to) {
      const Matrix<const S> from = rows.from(some.begin - keys.begin);
      if constexpr (kTileRegisters<E>)
        pack_left_rows<S>(to, some.count(), cols, from);
      else if constexpr (!kPairs<S>)
        pack_rows<S>(to, some.count(), cols, [&](int64_t i) { return from.at(i); });
    });
  }

  // The values of a tile: [terms(keys)][head_dim_v], for tile registers [head_dim_v][terms(keys)].
  Matrix<const E> pack_values(Matrix<const S> rows, Range keys, int64_t cols, Range& packed) const {
    if constexpr (kInPlace<S>)
      if (!copies_V) return rows;
    return V.of(packed, keys, [&](Range some, Matrix<E> to) {
      const Matrix<const S> from = rows.from(some.begin - keys.begin);
      if constexpr (kTileRegisters<E>)
        pack_summed_columns<S>(to, some.count(), cols, from);
      else
        pack_summed_rows<S>(to, some.count(), cols, [&](int64_t i) { return from.at(i); });
    });
  }

 private:
  static bool copies(const ForwardParams& p, const View& view) {
    return !kInPlace<S> || (!keys_copied(p) && copies_rows<S>(p, view));
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
