// Backward for dK and dV: a block of threads takes kKeys keys of a KV head and runs over the query rows that see them, all
// heads of the group one after the other, so that nothing is expanded, and nobody else adds to its sums. Tiles lie transposed,
// keys in the rows: with P = exp(S - lse), D what dropout makes of it, and delta = rowsum(dO * O),
//
//   dV += (P * D)^T dO      dP^T = V dO^T * D      dS = P * (dP - delta + dlse)      dK += dS^T Q
//
// P^T and dS^T are left factors in the registers in which they are made. A warp takes 16 kM keys and, of wide heads, half of
// their columns.
#pragma once

namespace pyattn::cuda {
namespace {

template <class S, int kDim>
struct KeysShape {
  // Sums of dK and dV take kM * kDim / kParts registers of a lane's 255; as many again hold S, dP and fragments.
  static constexpr bool kWide = kDim > 128;
  static constexpr int kM = sizeof(S) == 2 && kDim <= 64 ? 2 : 1;
  static constexpr int kParts = kWide ? 2 : 1, kColumns = kDim / kParts;
  static constexpr int kKeys = sizeof(S) == 2 ? (kWide ? 64 : 128) : (kWide ? 32 : 64);
  static constexpr int kWarps = kKeys / (16 * kM) * kParts, kThreads = kWarps * kWarpLanes;
  static constexpr int kRows = kDim > 64 && sizeof(S) == 4 ? 16 : 32;
  static constexpr int kStages = kDim > 192 ? 1 : 2;  // 2: the next rows are copied meanwhile, where memory allows
  using KTile = Tile<S, kKeys, kDim>;
  using QTile = Tile<S, kRows, kDim>;
  using Dropout = DropoutTile<kRows, kKeys>;
  static constexpr int kStageBytes = 2 * QTile::kBytes + kRows * sizeof(RowTerms);
  // dS for add_queries.h lies where dO was, which by then has been read, if there is no more room.
  using dSTile = Tile<S, kRows, kKeys>;
  static constexpr bool kdSInPlaceOfdO = kKeys <= kDim;
  static constexpr int kdS = 2 * KTile::kBytes + kStages * kStageBytes;
  static constexpr int kFlags = kdS + (kdSInPlaceOfdO ? 0 : dSTile::kBytes), kKept = kFlags + kRows;
  static constexpr int kBytes = kKept + Dropout::kBytes;
  static_assert(kBytes <= kSharedBytes);
};

// What is copied of a block of query rows.
template <class S, int kDim, class Shape = KeysShape<S, kDim>>
struct RowStage {
  typename Shape::QTile Q, dO;
  RowTerms* terms;

  PYATTN_DEVICE explicit RowStage(char* memory)
      : Q{memory}, dO{memory + Q.kBytes}, terms(reinterpret_cast<RowTerms*>(memory + 2 * Q.kBytes)) {}

  PYATTN_DEVICE void load(const BackwardParams& p, const QueryRows<S>& q, const QueryRows<S>& dout, unsigned head,
                          int r0) const {
    q.template load<Shape::kThreads>(Q, r0);
    dout.template load<Shape::kThreads>(dO, r0);
    static_assert(Shape::kRows <= Shape::kThreads);
    const int i = thread_index();
    if (i < Shape::kRows)
      copy_16_bytes(shared_address(terms + i), row_terms_of(p, head, q.count) + r0 + i,
                    r0 + i < q.count ? sizeof(RowTerms) : 0);
  }
};

template <class S, int kDim, bool kAddQueries, class Shape = KeysShape<S, kDim>>
PYATTN_KERNEL(Shape::kThreads)
backward_keys(const __grid_constant__ BackwardParams p) {
  constexpr int kM = Shape::kM, kKeys = Shape::kKeys, kRows = Shape::kRows, kN = kRows / 8;
  const KeyBlock<kKeys> block(p);
  const int n0 = block.first(), count = static_cast<int>(block.head.count);
  const int warp_key = warp() / Shape::kParts * 16 * kM;
  const int part = warp() % Shape::kParts;
  char* memory = shared_memory();
  const typename Shape::KTile K{memory}, V{memory + K.kBytes};
  char* flags = memory + Shape::kFlags;
  const typename Shape::Dropout dropout(p, memory + Shape::kKept);
  const Softmax<S> softmax(p);
  const unsigned head = block.number / block.blocks;
  const auto stage = [&](int i) { return RowStage<S, kDim>(memory + 2 * K.kBytes + i * Shape::kStageBytes); };

  const QueryRows<S> q(block.head, p.q, p.head_dim), dout(block.head, p.dout, p.head_dim_v);
  const int first = static_cast<int>(block.head.first_row(n0));
  // From here on, rows see all keys of the block.
  const int all_seen = n0 + kKeys <= p.seqlen_k ? static_cast<int>(block.head.first_row(n0 + kKeys - 1)) : count;
  if (first < count) {  // a block may not end before its copies
    KeyRows<S>(block.head, p.k, p.head_dim).template load<Shape::kThreads>(K, n0);
    KeyRows<S>(block.head, p.v, p.head_dim_v).template load<Shape::kThreads>(V, n0);
    stage(0).load(p, q, dout, head, first);
  }
  Sums<kM, Shape::kColumns / 8> dK = {}, dV = {};
  bool finite_K = true;
  int turn = 0;
  for (int r0 = first; r0 < count; r0 += kRows) {
    const RowStage<S, kDim> rows = stage(turn);
    const int next = r0 + kRows;
    wait_for_copies();
    barrier();  // these rows are there, and those before no longer read
    if (kAddQueries && r0 == first) finite_K = !find_nonfinite<Shape::kThreads>(K, [](int) {});
    if (Shape::kStages == 2) {
      turn ^= 1;
      if (next < count) stage(turn).load(p, q, dout, head, next);
    }
    if (p.dropout.threshold) {
      dropout.template draw<Shape::kThreads>(p, KeyBlock<kKeys>(p).head, r0, n0);
      barrier();
    }

    Sums<kM, kN> P = {}, dS = {};
    multiply_rows<S>(P, K, warp_key, rows.Q);
    multiply_rows<S>(dS, V, warp_key, rows.dO);
    softmax.apply_sign(P);
    if (p.dropout.threshold)
      each_sum<kM, kN>(
          [&](int m, int n, int i, int key, int row) { dS[m][n][i] *= dropout.factor(row, warp_key + key); });
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const RowTerms of_row = rows.terms[8 * n + lane() % 4 * 2 + odd];
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
          for (int i = odd; i < 4; i += 2) of_row.gradient(softmax, P[m][n][i], dS[m][n][i]);
      }
    if (p.dropout.threshold)
      each_sum<kM, kN>(
          [&](int m, int n, int i, int key, int row) { P[m][n][i] *= dropout.factor(row, warp_key + key); });
    const bool masked = r0 < all_seen || count < next;
    const auto limit = [&](const HeadRows& head, int row) {
      return r0 + row < count ? static_cast<int>(head.visible_keys(r0 + row)) - n0 - warp_key : 0;
    };
    if (masked) {
      const KeyBlock<kKeys> same(p);
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const int sees = limit(same.head, 8 * n + lane() % 4 * 2 + odd);
#pragma unroll
          for (int m = 0; m < kM; ++m)
#pragma unroll
            for (int i = odd; i < 4; i += 2)
              if (16 * m + i / 2 * 8 + lane() / 4 >= sees) P[m][n][i] = dS[m][n][i] = 0;
        }
    }

    const auto add_product = [&](auto& C, const auto& W, const typename Shape::QTile& tile) {
      const bool cleared = masked && clear_nonfinite<Shape::kThreads>(tile, flags);
      multiply_sums<S, Shape::kParts>(C, W, tile, part);
      if (cleared) {
        const KeyBlock<kKeys> same(p);
        poison(C, flags, kRows,
               [&](int m, int i, int row) { return 16 * m + i / 2 * 8 + lane() / 4 < limit(same.head, row); });
      }
    };
    add_product(dV, P, rows.dO);
    const typename Shape::dSTile T{Shape::kdSInPlaceOfdO ? rows.dO.data : memory + Shape::kdS};
    if (masked || kAddQueries) barrier();  // flags, and dO, no longer read
    if constexpr (kAddQueries)
      if (part == 0) store_transposed(T, dS, warp_key);  // both parts have the same dS
    add_product(dK, dS, rows.Q);
    if constexpr (kAddQueries) {
      barrier();
      float* sums = query_sums_of(p, head, count) + r0 * p.head_dim;
      add_queries<Shape::kWarps>(sums, min(kRows, count - r0), p.head_dim, T, K, finite_K);
    }
    if (Shape::kStages == 1) {
      barrier();  // the rows no longer read
      if (next < count) stage(0).load(p, q, dout, head, next);
    }
  }

  const KeyBlock<kKeys> same(p);
  const int first_key = same.first() + warp_key, keys = same.keys() - warp_key;
  const auto store = [&](const auto& C, const View& view, int64_t cols, float scale) {
    store_sums<S, Shape::kParts>(
        C, part, keys, cols, whole_chunks<S>(view),
        [&](int j) { return same.head.template key<S>(view, first_key + j); }, [&](int, int) { return scale; });
  };
  store(dK, p.dk, p.head_dim, static_cast<float>(p.softmax_scale));
  store(dV, p.dv, p.head_dim_v, 1);
}

}  // namespace
}  // namespace pyattn::cuda
