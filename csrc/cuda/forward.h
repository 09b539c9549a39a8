// Forward: a block of threads takes kRows query rows of a KV head and runs over the keys that they see with online softmax
// (Dao 2023, algorithm 1). While one product runs, the keys or values of the next are copied.
#pragma once

namespace pyattn::cuda {
namespace {

template <class S, int kDim>
struct ForwardShape : RowShape<S, kDim> {
  using typename RowShape<S, kDim>::QTile;
  // Sums take as many registers as there are keys, or with one time 16 rows half as many.
  static constexpr int kKeys = sizeof(S) == 2 ? (kDim == 128 ? 48 : 64) : kDim <= 64 ? 64 : 32;
  using KTile = Tile<S, kKeys, kDim>;
  using Dropout = DropoutTile<ForwardShape::kRows, kKeys>;
  static constexpr int kFlags = QTile::kBytes + 2 * KTile::kBytes, kKept = kFlags + kKeys;
  static constexpr int kBytes = kKept + Dropout::kBytes;
  static_assert(kBytes <= kSharedBytes);
};

template <class S, int kDim, class Shape = ForwardShape<S, kDim>>
PYATTN_KERNEL(Shape::kThreads)
forward(const __grid_constant__ ForwardParams p) {
  constexpr int kM = Shape::kM, kKeys = Shape::kKeys, kRows = Shape::kRows;
  const RowBlock<kRows> block(p);
  const int r0 = block.first();
  const int all_see = static_cast<int>(block.head.visible_keys(r0));
  const int visible = static_cast<int>(block.head.visible_keys(r0 + block.rows() - 1));
  const int warp_row = warp() / Shape::kParts * 16 * kM;
  const int part = warp() % Shape::kParts;
  const auto limits = [&] { return RowLimits<kM>(RowBlock<kRows>(p), warp_row); };
  char* memory = shared_memory();
  const typename Shape::QTile Q{memory};
  const typename Shape::KTile K{memory + Shape::QTile::kBytes}, V{K.data + K.kBytes};
  char* flags = memory + Shape::kFlags;
  const typename Shape::Dropout dropout(p, memory + Shape::kKept);
  const Softmax<S> softmax(p);

  const KeyRows<S> keys_of_K(block.head, p.k, p.head_dim), keys_of_V(block.head, p.v, p.head_dim_v);
  if (visible) {  // a block may not end before its copies
    QueryRows<S>(block.head, p.q, p.head_dim).template load<Shape::kThreads>(Q, r0);
    keys_of_K.template load<Shape::kThreads>(K, 0);
  }
  Sums<kM, Shape::kColumns / 8> O = {};
  SoftmaxState<S, kM> state;
  for (int n0 = 0; n0 < visible; n0 += kKeys) {
    wait_for_copies();
    barrier();  // K is there, and V no longer read
    keys_of_V.template load<Shape::kThreads>(V, n0);
    if (p.dropout.threshold) {
      const RowBlock<kRows> same(p);
      dropout.template draw<Shape::kThreads>(p, same.head, same.first(), n0);
    }

    Sums<kM, kKeys / 8> P = {};
    multiply_rows<S>(P, Q, warp_row, K);
    softmax.apply_sign(P);
    wait_for_copies();
    barrier();  // V is there, and K no longer read
    if (n0 + kKeys < visible) keys_of_K.template load<Shape::kThreads>(K, n0 + kKeys);

    const bool masked = all_see < n0 + kKeys;
    if (masked) {
      const RowLimits<kM> rows = limits();
      each_sum<kM, kKeys / 8>([&](int m, int n, int i, int, int key) {
        if (!rows.sees(m, i, n0 + key)) P[m][n][i] = kNegInf;
      });
    }
    state.update(softmax, P, O);
    if (p.dropout.threshold)
      each_sum<kM, kKeys / 8>(
          [&](int m, int n, int i, int row, int key) { P[m][n][i] *= dropout.factor(warp_row + row, key); });
    const bool cleared = masked && clear_nonfinite<Shape::kThreads>(V, flags);
    multiply_sums<S, Shape::kParts>(O, P, V, part);
    if (cleared) {
      const RowLimits<kM> rows = limits();
      poison(O, flags, kKeys, [&](int m, int i, int key) { return rows.sees(m, i, n0 + key); });
    }
  }

  const RowBlock<kRows> same(p);
  const int first = same.first() + warp_row;
  state.finish(p, same.head, first);
  store_sums<S, Shape::kParts>(
      O, part, same.rows() - warp_row, p.head_dim_v, whole_chunks<S>(p.out),
      [&](int i) { return same.head.template row<S>(p.out, first + i); },
      [&](int m, int half) { return state.row_sum[m][half]; });
}

}  // namespace
}  // namespace pyattn::cuda
