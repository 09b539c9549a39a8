// Backward for dQ: a block of threads takes kRows query rows of a KV head and runs over the keys that they see, making S and dP
// once more. Of seven products of backward these two are the price of adding up dQ in one place, in one order.
//
//   dP = dO V^T * D      dS = P * (dP - delta + dlse)      dQ += dS K
#pragma once

namespace pyattn::cuda {
namespace {

template <class S, int kDim>
struct QueriesShape : RowShape<S, kDim> {
  using typename RowShape<S, kDim>::QTile;
  // S and dP together take twice the registers that S takes in forward.
  static constexpr int kKeys = sizeof(S) == 2 || kDim <= 64 ? 32 : 16;
  static constexpr int kStages = kDim > 192 ? 1 : 2;  // 2: the next keys are copied meanwhile, where memory allows
  using KTile = Tile<S, kKeys, kDim>;
  using Dropout = DropoutTile<QueriesShape::kRows, kKeys>;
  static constexpr int kFlags = 2 * QTile::kBytes + 2 * kStages * KTile::kBytes, kKept = kFlags + kKeys;
  static constexpr int kBytes = kKept + Dropout::kBytes;
  static_assert(kBytes <= kSharedBytes);
};

template <class S, int kDim, class Shape = QueriesShape<S, kDim>>
PYATTN_KERNEL(Shape::kThreads)
backward_queries(const __grid_constant__ BackwardParams p) {
  constexpr int kM = Shape::kM, kKeys = Shape::kKeys, kRows = Shape::kRows;
  using KTile = typename Shape::KTile;
  const RowBlock<kRows> block(p);
  const int r0 = block.first();
  const int all_see = static_cast<int>(block.head.visible_keys(r0));
  const int visible = static_cast<int>(block.head.visible_keys(r0 + block.rows() - 1));
  const int warp_row = warp() / Shape::kParts * 16 * kM;
  const int part = warp() % Shape::kParts;
  const auto limits = [&] { return RowLimits<kM>(RowBlock<kRows>(p), warp_row); };
  char* memory = shared_memory();
  const typename Shape::QTile Q{memory}, dO{memory + Q.kBytes};
  char* flags = memory + Shape::kFlags;
  const typename Shape::Dropout dropout(p, memory + Shape::kKept);
  const Softmax<S> softmax(p);
  const auto stage_of_K = [&](int i) { return KTile{memory + 2 * Q.kBytes + 2 * i * KTile::kBytes}; };
  const auto stage_of_V = [&](int i) { return KTile{stage_of_K(i).data + KTile::kBytes}; };

  const KeyRows<S> keys_of_K(block.head, p.k, p.head_dim), keys_of_V(block.head, p.v, p.head_dim_v);
  const auto load_keys = [&](int i, int n0) {
    keys_of_K.template load<Shape::kThreads>(stage_of_K(i), n0);
    keys_of_V.template load<Shape::kThreads>(stage_of_V(i), n0);
  };
  if (visible) {  // a block may not end before its copies
    QueryRows<S>(block.head, p.q, p.head_dim).template load<Shape::kThreads>(Q, r0);
    QueryRows<S>(block.head, p.dout, p.head_dim_v).template load<Shape::kThreads>(dO, r0);
    load_keys(0, 0);
  }
  RowTerms terms[kM][2];
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t r = r0 + warp_row + 16 * m + 8 * half + lane() / 4;
      terms[m][half] = row_terms_of(p, block.number / block.blocks, block.head.count)[min(r, block.head.count - 1)];
    }

  Sums<kM, Shape::kColumns / 8> dQ = {};
  int turn = 0;
  for (int n0 = 0; n0 < visible; n0 += kKeys) {
    const KTile K = stage_of_K(turn), V = stage_of_V(turn);
    const int next = n0 + kKeys;
    wait_for_copies();
    barrier();  // these keys are there, and those before no longer read
    if (Shape::kStages == 2) {
      turn ^= 1;
      if (next < visible) load_keys(turn, next);
    }
    if (p.dropout.threshold) {
      const RowBlock<kRows> same(p);
      dropout.template draw<Shape::kThreads>(p, same.head, same.first(), n0);
      barrier();
    }

    Sums<kM, kKeys / 8> P = {}, dS = {};
    multiply_rows<S>(P, Q, warp_row, K);
    multiply_rows<S>(dS, dO, warp_row, V);
    softmax.apply_sign(P);
    if (p.dropout.threshold)
      each_sum<kM, kKeys / 8>(
          [&](int m, int n, int i, int row, int key) { dS[m][n][i] *= dropout.factor(warp_row + row, key); });
    each_sum<kM, kKeys / 8>(
        [&](int m, int n, int i, int, int) { terms[m][i / 2].gradient(softmax, P[m][n][i], dS[m][n][i]); });
    const bool masked = all_see < next;
    if (masked) {
      const RowLimits<kM> rows = limits();
      each_sum<kM, kKeys / 8>([&](int m, int n, int i, int, int key) {
        if (!rows.sees(m, i, n0 + key)) dS[m][n][i] = 0;
      });
    }

    const bool cleared = masked && clear_nonfinite<Shape::kThreads>(K, flags);
    multiply_sums<S, Shape::kParts>(dQ, dS, K, part);
    if (cleared) {
      const RowLimits<kM> rows = limits();
      poison(dQ, flags, kKeys, [&](int m, int i, int key) { return rows.sees(m, i, n0 + key); });
    }
    if (Shape::kStages == 1) {
      barrier();  // the keys no longer read
      if (next < visible) load_keys(0, next);
    }
  }

  const RowBlock<kRows> same(p);
  const int first = same.first() + warp_row;
  const float scale = static_cast<float>(p.softmax_scale);
  store_sums<S, Shape::kParts>(
      dQ, part, same.rows() - warp_row, p.head_dim, whole_chunks<S>(p.dq),
      [&](int i) { return same.head.template row<S>(p.dq, first + i); }, [&](int, int) { return scale; });
}

}  // namespace
}  // namespace pyattn::cuda
