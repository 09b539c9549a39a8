// Backward for dK and dV: a thread block takes kKeys keys of a KV head and loops over the query
// rows that see them, one head of the group after another. So K and V are not expanded, and no
// other block adds to its sums. Tiles are transposed, [keys][queries]: P^T and dS^T serve as left
// factors directly from the registers in which they are computed.
//
//   S^T = K Q^T      dP^T = V dO^T      P, dS as in softmax_gradient.h      dV += (P * D)^T dO      dK += dS^T Q
//
// A warp takes 16 kM keys and, in wide heads, half of their columns.
#pragma once

#include "cuda/passes/add_queries.h"
#include "cuda/plan/work.h"
#include "cuda/tiles/dropout.h"
#include "cuda/products/fragment.h"
#include "cuda/ptx/primitives.h"
#include "cuda/products/product.h"
#include "cuda/products/team.h"
#include "cuda/tiles/softmax_gradient.h"
#include "cuda/products/matrix.h"
#include "cuda/tiles/tile_mask.h"
#include "cuda/plan/workspace.h"
#include "shared/mask.h"

namespace pyattn::cuda {
namespace {

template <class S, int kDim, class Score>
struct KeysShape {
  // The sums of dK and dV take kM * kDim / kParts of a lane's 255
  // registers; S, dP and fragments take as many again.
  static constexpr Team kTeam = kTeamOf<S, kDim>;
  static constexpr bool kTogether = kTeam == Team::kWarpgroup, kWide = kDim > 128;
  static constexpr int kM = !kTogether && sizeof(S) == 2 && kDim <= (Score::kGeneral ? 32 : 64) ? 2 : 1;
  static constexpr int kParts = kWide ? 2 : 1, kColumns = kDim / kParts;
  static constexpr int kKeys = sizeof(S) == 2 ? (kWide ? 64 : 128) : (kWide ? 32 : 64);
  static constexpr int kWarps = kKeys / (16 * kM) * kParts, kThreads = kWarps * kWarpLanes;
  // Blocks per multiprocessor. If ptxas chose, it would at 64 columns fit three blocks for float and spill 200 bytes,
  // and at 96 and 128 columns take 128 registers and spill 1.6 KB.
  static constexpr int kBlocks = sizeof(S) == 4 && kDim == 64 ? 2 : 1;
  static constexpr int kRows = (Score::kGeneral || (kDim > 64 && sizeof(S) == 4) ? 16 : 32) * (kTogether ? 2 : 1);
  // 2 prefetch the next rows, if shared memory has room; with 3, products of the previous rows may still run.
  static constexpr int kStages = kTogether ? 3 : kDim > 192 ? 1 : 2;
  using KTile = SharedMatrix<S, kKeys, kDim>;
  using QTile = SharedMatrix<S, kRows, kDim>;
  using dSTile = SharedMatrix<S, kRows, kKeys>;
  using Dropout = DropoutTile<kRows, kKeys>;
  static constexpr int kRowsBytes = 2 * QTile::kBytes + kRows * sizeof(RowTerms);
  static constexpr int kStageBytes = kTogether ? ceil_div(kRowsBytes, kPanelAlignment) * kPanelAlignment : kRowsBytes;
  // dS, which add_queries.h reads, overwrites dO if it fits there: dO is no longer read by then.
  static constexpr bool kdSReplacesdO = kKeys <= kDim;
  static constexpr int kdS = 2 * KTile::kBytes + kStages * kStageBytes;
  static constexpr int kFlags = kdS + (kdSReplacesdO ? 0 : dSTile::kBytes), kKept = kFlags + kRows;
  static constexpr int kBytes = kKept + Dropout::kBytes;
  static_assert(kBytes <= kSharedBytes);
};

// The tiles of a block of query rows in shared memory.
template <class S, int kDim, class Shape>
struct RowStage {
  typename Shape::QTile Q, dO;  // [kRows][kDim]
  RowTerms* terms;              // [kRows]

  PYATTN_DEVICE explicit RowStage(char* memory)
      : Q{memory}, dO{memory + Q.kBytes}, terms(reinterpret_cast<RowTerms*>(memory + 2 * Q.kBytes)) {}

  PYATTN_DEVICE void load(const BackwardParams& p, const QueryRows<S>& q, const QueryRows<S>& dout, RowsBefore before,
                          int r0) const {
    q.template load<Shape::kThreads>(Q, r0);
    dout.template load<Shape::kThreads>(dO, r0);
    static_assert(Shape::kRows <= Shape::kThreads);
    const int i = thread_index();
    if (i < Shape::kRows)
      copy_16_bytes(shared_address(terms + i), row_terms_of(p, before, q.count) + r0 + i,
                    r0 + i < q.count ? sizeof(RowTerms) : 0);
  }
};

// Shared memory of the pass.
template <class S, int kDim, class Shape>
struct KeysMemory {
  typename Shape::KTile K, V;       // [kKeys][kDim]
  char* stages;                     // kStages of RowStage
  char* dS;                         // [kRows][kKeys]; unused if dS overwrites dO
  char* flags;                      // [kRows]: rows of Q or dO that are not finite
  typename Shape::Dropout dropout;  // [kRows][kKeys]

  PYATTN_DEVICE KeysMemory(const ForwardParams& p, char* memory)
      : K{memory},
        V{memory + K.kBytes},
        stages(memory + 2 * K.kBytes),
        dS(memory + Shape::kdS),
        flags(memory + Shape::kFlags),
        dropout(p, memory + Shape::kKept) {}

  PYATTN_DEVICE RowStage<S, kDim, Shape> rows(int stage) const {
    return RowStage<S, kDim, Shape>(stages + stage * Shape::kStageBytes);
  }
};

// The keys of a warp, and the sums of their dK and dV.
template <class S, int kDim, class Score, class Shape = KeysShape<S, kDim, Score>>
struct KeysPass {
  static constexpr Layout kLayout = Layout::kKeysByQueries;
  static constexpr int kM = Shape::kM, kRows = Shape::kRows, kN = kRows / 8;
  using Weights = Sums<kM, kN>;
  const BackwardParams& p;
  const KeysMemory<S, kDim, Shape> shared;
  const Score score;
  const int warp_key, part;
  Sums<kM, Shape::kColumns / 8> dK = {}, dV = {};
  Factors<S, kN / 2> weights, gradients;  // of products that still run

  PYATTN_DEVICE explicit KeysPass(const BackwardParams& p)
      : p(p),
        shared(p, shared_memory()),
        score(p),
        warp_key(warp() / Shape::kParts * 16 * kM),
        part(warp() % Shape::kParts) {}

  PYATTN_DEVICE TileMask place(int r0) const { return mask_of_keys<Shape::kKeys>(p, r0); }

  // Computes P <- (P * D)^T and dS <- dS^T for these rows. Writes dS to dbias if dbias has one element per score.
  PYATTN_DEVICE void make_weights(Weights& P, Weights& dS, const RowStage<S, kDim, Shape>& rows, int r0, bool masked) {
    wait_for_started();
    multiply_rows<S, Shape::kTeam>(P, shared.K, rows.Q, dS, shared.V, rows.dO, warp_key);
    to_gradients<S, kLayout>(
        score, shared.dropout, P, dS, warp_key, [&] { return place(r0); }, masked,
        [&](int, int row) { return rows.terms[row]; },
        [&](const Weights& dS) {
          if constexpr (Score::kGeneral)
            if (!is_packed(p) && p.dbias.data && part == 0) store_bias<S, kLayout>(p.dbias, dS, place(r0), warp_key);
        });
  }

  // C += W * tile, where tile holds the rows of Q or dO starting at r0.
  PYATTN_DEVICE void add_product(Sums<kM, Shape::kColumns / 8>& C, const Weights& W, typename Shape::QTile tile, int r0,
                                 bool masked) const {
    const bool cleared = masked && clear_nonfinite<Shape::kThreads>(tile, shared.flags);
    multiply_sums<S, Shape::kTeam, Shape::kParts>(C, W, tile, part);
    if (cleared) poison<S, kLayout>(C, shared.flags, kRows, place(r0), warp_key);
  }

  // Starts dV += P dO and dK += dS Q.
  PYATTN_DEVICE void start_products(const Weights& P, const Weights& dS, const RowStage<S, kDim, Shape>& rows) {
    weights.take(P[0]), gradients.take(dS[0]);
    begin_products(dV[0], dK[0], weights.slice, gradients.slice);
    start_sums(dV[0], weights, rows.dO);
    start_sums(dK[0], gradients, rows.Q);
    end_group();
  }
  PYATTN_DEVICE void wait_for_started() {
    if constexpr (Shape::kTogether) wait_for_products<0>(dV[0], dK[0], weights.slice, gradients.slice);
  }

  PYATTN_DEVICE void store() const {
    const KeyBlock<Shape::kKeys> same(p);
    const int first_key = same.first() + warp_key, keys = same.keys() - warp_key;
    const auto store = [&](const auto& C, const View& view, int64_t cols, float scale) {
      with_written<S>(p, [&](auto type) {
        using R = decltype(type);
        store_sums<S, Shape::kParts>(
            C, part, keys, cols, whole_chunks<R>(view),
            [&](int j) { return same.head.template key<R>(view, first_key + j); }, [&](int, int) { return scale; });
      });
    };
    store(dK, p.dk, p.head_dim, score.dscale());
    store(dV, p.dv, p.head_dim_v, 1);
  }
};

// kAddQueries: also adds to dQ, as add_queries.h describes.
template <class S, int kDim, bool kAddQueries, class Score, class Shape = KeysShape<S, kDim, Score>>
PYATTN_KERNEL(Shape::kThreads, Shape::kBlocks)
backward_keys(const __grid_constant__ BackwardParams p) {
  constexpr int kKeys = Shape::kKeys, kRows = Shape::kRows;
  const KeyBlock<kKeys> block(p);
  if (block.empty()) return;
  const int n0 = block.first();
  const RowsBefore before = rows_before(p, block.number / block.blocks, block.head);
  const Run run = rows_of_keys(Mask(p, block.head), n0, kKeys);
  KeysPass<S, kDim, Score> pass(p);
  const auto& shared = pass.shared;

  const QueryRows<S> q(block.head, p.q, p.head_dim), dout(block.head, p.dout, p.head_dim_v);
  if (!run.empty()) {  // without rows no loop waits for copies, so none may start
    KeyRows<S>(block.head, p.k, p.head_dim).template load<Shape::kThreads>(shared.K, n0);
    KeyRows<S>(block.head, p.v, p.head_dim_v).template load<Shape::kThreads>(shared.V, n0);
    shared.rows(0).load(p, q, dout, before, run.begin);
  }
  bool finite_K = true;
  if (kAddQueries && !run.empty()) {
    wait_for_copies();
    barrier();  // K has arrived
    finite_K = !find_nonfinite<Shape::kThreads>(shared.K, [](int) {});
  }
  int turn = 0;
  for (int r0 = run.begin, next; r0 < run.end; r0 = next) {
    const RowStage<S, kDim, Shape> rows = shared.rows(turn);
    next = skip_rows<kRows, kKeys>(p, run, r0 + kRows);
    wait_for_copies();
    barrier();  // these rows have arrived, and the previous ones are no longer read
    if (Shape::kStages > 1) {
      turn = (turn + 1) % Shape::kStages;
      if (next < run.end) shared.rows(turn).load(p, q, dout, before, next);
    }
    if (shared.dropout.any()) {
      const KeyBlock<kKeys> same(p);
      shared.dropout.template draw<Shape::kThreads>(same.head, r0, same.first());
      barrier();
    }

    const bool masked = !sees_all_keys<kRows, kKeys>(p, run, r0);
    typename decltype(pass)::Weights P, dS;
    pass.make_weights(P, dS, rows, r0, masked);
    if constexpr (Shape::kTogether && !Score::kGeneral && !kAddQueries)
      if (!masked) {
        pass.start_products(P, dS, rows);
        continue;
      }
    pass.add_product(pass.dV, P, rows.dO, r0, masked);
    if (masked || kAddQueries) barrier();  // flags and dO are no longer read
    if constexpr (kAddQueries) {
      const typename Shape::dSTile T{Shape::kdSReplacesdO ? rows.dO.data : shared.dS};
      if (pass.part == 0) store_transposed(T, dS, pass.warp_key);  // both parts have the same dS
      pass.add_product(pass.dK, dS, rows.Q, r0, masked);
      barrier();  // T is complete
      float* sums = query_sums_of(p, before, q.count) + r0 * p.head_dim;
      add_queries<Shape::kWarps>(sums, min(kRows, q.count - r0), p.head_dim, T, shared.K, finite_K);
    } else {
      pass.add_product(pass.dK, dS, rows.Q, r0, masked);
    }
    if (Shape::kStages == 1) {
      barrier();  // the rows are no longer read
      if (next < run.end) shared.rows(0).load(p, q, dout, before, next);
    }
  }
  pass.wait_for_started();
  pass.store();
}

}  // namespace
}  // namespace pyattn::cuda
