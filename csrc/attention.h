// The contract between the operators, which know ATen, and the kernels, which know raw pointers.
// One set of params serves the CPU and CUDA.
#pragma once

#include <cstdint>

namespace pyattn {

// Storage formats without arithmetic: kernels widen them to float when
// they load and round once when they store.
struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

enum class DType : int { kFloat64, kFloat32, kBFloat16, kFloat16 };
inline constexpr int kNumDTypes = 4;

// A (batch, head, position, column) tensor. Strides count elements; columns are contiguous.
struct View {
  void* data;
  int64_t stride_b, stride_h, stride_s;
};

// A (batch, query head, query, key) tensor of any strides, 0 where it broadcasts.
struct BroadcastView {
  void* data;
  int64_t stride_b, stride_h, stride_q, stride_k;
};

// The type that a bias is stored as.
enum class BiasType : int { kNone, kLikeQ, kFloat32 };

struct BiasView : BroadcastView {
  BiasType type;
};

// The keys [begin, end) of a row; holes: some key between is hidden.
struct RowKeys {
  int64_t begin, end;
  bool holes;
};

// The keys of a block of kBlockRows rows of a KV head: each row sees a part of
// [first_begin, last_end) and all of [last_begin, first_end), but for holes.
struct BlockKeys {
  int64_t first_begin, last_begin, first_end, last_end;
  bool holes;
};

// Query i stands at key position i + q_offset and sees the keys from window_left before it to
// window_right behind it, if causal none behind it; of these, the keys of its range; and of these,
// those that neither a bool mask hides, where it is false, nor a bias, where it is -inf.
//
//   seqlen_q 2, seqlen_k 4     q_offset 2     1 1 1 0     q_offset 0     1 0 0 0     q_offset 2,       0 1 1 0
//   causal                                    1 1 1 1                    1 1 0 0     window_left 1     0 0 1 1
struct MaskParams {
  bool causal;
  int64_t q_offset;
  const int64_t* q_offsets;                     // (batch), in place of q_offset, or null
  int64_t window_left = -1, window_right = -1;  // -1: no bound
  const int64_t* key_ranges;                    // (batch or 1, seqlen_q, 2): begin and end, or null
  int64_t key_ranges_stride_b;                  // 0 where one sequence stands for all
  BroadcastView shown;                          // the bool mask, true: the key takes part; its data may be null
  // Made by the passes mask_rows, bias_rows and mask_blocks: what the bool mask and the bias each leave
  // of each row of their own shape, dense, (batch or 1, num_heads_q or 1, seqlen_q or 1), and (batch,
  // num_heads_kv, blocks of rows). Null without the tensor, and where formulas answer for blocks.
  RowKeys *mask_rows, *bias_rows;
  BlockKeys* blocks;
};

// What becomes of a scaled product s: softcap * tanh(s / softcap), then bias and -slope * |i + q_offset - j| added.
struct ScoreParams {
  double softcap;  // 0: none
  BiasView bias;
  const void* alibi_slopes;  // (batch or 1, num_heads_q), double for float64, else float, or null
  int64_t slopes_stride_b;   // 0 where one sequence stands for all
  const void* sinks;         // (num_heads_q), likewise: the score of one more key, without a value, or null
};

constexpr bool has_bias(const ScoreParams& score) { return score.bias.type != BiasType::kNone; }

// Each weight is dropped with probability threshold / 65536; cpu/tiles/dropout.h says which. kDrawKeys neighbouring
// keys of a query are drawn for at once.
inline constexpr int kDrawKeys = 8;
struct DropoutParams {
  uint32_t threshold;   // below 65536; 0 drops none
  const int64_t* seed;  // ()
};

// Where a packed sequence lies: its queries [first_q, first_q + seqlen_q), and its keys likewise.
struct Sequence {
  int64_t first_q, first_k, seqlen_q, seqlen_k;
};

// Packed sequences lie one behind the other. The operator checks cu_seqlens_q, cu_seqlens_k and
// seqused_k and makes the sequences of them; on a GPU the pass place_sequences does, and a sequence
// whose indices are invalid has lengths of -1.
struct PackedParams {
  const int64_t *cu_seqlens_q, *cu_seqlens_k;  // (batch + 1)
  const int64_t* seqused_k;                    // (batch), or null
  int64_t total_q, total_k;                    // rows of q and k, with those that belong to no sequence
  Sequence* sequences;       // (batch + 1), the last one where tokens of no sequence begin; null for a batch
  int64_t* default_offsets;  // (batch): mask.q_offsets, made together with sequences; or null
  struct Units* before;      // (batch + 1), over the sequences before; made by the pass count_units
};

// Keys and values in pages: position j of sequence b lies at j % size of page table[b * stride + j / size]. The
// views' stride_b is then that of pages. CPU kernels of forward alone know of them.
struct PageParams {
  const int64_t* table;  // (batch, pages of a sequence), or null
  int64_t stride, size;
};

// The parts of a pass that a profile tells apart.
enum class Phase : int { kPack, kScores, kSoftmax, kDropout, kOut, kdP, kdV, kdK, kdQ, kStore };
inline constexpr const char* kPhaseNames[] = {"pack",        "S = Q K^T",   "softmax",     "dropout",   "O = P V",
                                              "dP = dO V^T", "dV = P^T dO", "dK = dS^T Q", "dQ = dS K", "store"};
inline constexpr int kNumPhases = sizeof(kPhaseNames) / sizeof(*kPhaseNames);

// What each phase of a task took.
struct PhaseCounts {
  int64_t ticks[kNumPhases];  // of the processor's time-stamp counter
  int64_t flops[kNumPhases];  // of the products as computed, with what a tile computes in vain behind its mask
};

struct ForwardParams {
  View q, k, v, out;
  // (batch, num_heads_q, seqlen_q), packed (num_heads_q, total_q), dense, double for float64, else
  // float. row_max: the largest score, in the backend's own unit (cpu/tiles/score.h, cuda/score.h);
  // row_sum: the sum of exp(score - largest score); lse: the natural logarithm of the sum of
  // exp(score). Backward reads the first two, because exp(score - lse) has the rounding error of a
  // large lse.
  void *row_max, *row_sum, *lse;
  // Packed: batch is the number of sequences, seqlen_q and seqlen_k are the largest lengths.
  int64_t batch, num_heads_q, num_heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v;
  double pairs;  // of a query and a key of the same sequence, seen or not
  double softmax_scale;
  PackedParams packed;
  PageParams pages;
  MaskParams mask;
  ScoreParams score;
  DropoutParams dropout;
  void* workspace;      // what Plan, or DeviceKernels, asks for: memory that all work items share; or null
  PhaseCounts* counts;  // of the calling task; null when profiling is off
};

struct BackwardParams : ForwardParams {
  View dout, dq, dk, dv;
  const void* dlse;  // dense like lse, or null
  // Null where they are not asked for. dbias has the bias's own shape, with strides 0 where that
  // broadcasts; the others are dense, of slopes' and sinks' own shape, double for float64, else float.
  BiasView dbias;
  void *dslopes, *dsinks;
  bool part;  // of the keys: out and the row statistics are those of all keys, row_max in scores
};

// Whether a score is no more than its scaled product, and counts in the unit of a backend's own. A sink
// is a matter of finished rows.
constexpr bool is_plain(const ForwardParams& p) {
  return !p.score.softcap && !p.score.alibi_slopes && !has_bias(p.score);
}
constexpr bool is_plain(const BackwardParams& p) { return !p.part && is_plain(static_cast<const ForwardParams&>(p)); }

// What a pass needs for these params. It depends on shapes and constants, never on the
// number of threads, which therefore can't change bits.
struct Plan {
  int64_t items;            // independent work items
  int64_t scratch_bytes;    // private to each call of run
  int64_t workspace_bytes;  // one buffer for all items, and for the pass that combines their partial results
};

// One pass. run computes the work items [begin, end) on the calling thread, neither allocates nor
// throws, and takes scratch that is aligned to kScratchAlign.
template <class Params>
struct Pass {
  const char* name;
  Plan (*plan)(const Params&);
  void (*run)(const Params&, int64_t begin, int64_t end, void* scratch);
};

inline constexpr int64_t kScratchAlign = 64;

struct Kernels {
  Pass<ForwardParams> count_units;  // before all, with packed sequences: makes params.packed.before
  Pass<ForwardParams> mask_rows;    // before both, with a bool mask: makes params.mask.mask_rows
  Pass<ForwardParams> bias_rows;    // likewise, with a bias: makes params.mask.bias_rows
  Pass<ForwardParams> mask_blocks;  // then: makes params.mask.blocks, unless formulas answer
  Pass<ForwardParams> forward;
  Pass<ForwardParams> merge_out;  // after forward; no items where forward writes out itself
  Pass<BackwardParams> backward;
  Pass<BackwardParams> reduce;          // after backward; no items where backward writes all gradients itself
  Pass<BackwardParams> bias_gradient;   // where the bias broadcasts
  Pass<BackwardParams> head_gradients;  // after backward; of sinks and slopes
  double (*peak)(int64_t rounds);       // multiplies and adds in registers; returns the number of operations
};

// The kernels of the active instruction set, for plain scores or for all.
const Kernels& kernels(DType dtype, bool plain);

// GPU kernels, on a stream of the current device; addresses in params are the device's. Launches
// are asynchronous; a launch error comes back as a message, success as null. Backward that need not
// be deterministic adds up dQ in the order in which its blocks run. The bytes are params.workspace's.
struct DeviceKernels {
  int64_t (*forward_bytes)(const ForwardParams&);
  int64_t (*backward_bytes)(const BackwardParams&, bool deterministic);
  const char* (*forward)(const ForwardParams&, void* stream);
  const char* (*backward)(const BackwardParams&, bool deterministic, void* stream);
};

}  // namespace pyattn
