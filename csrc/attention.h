// The contract between the operators, which know ATen, and the kernels,
// which know only raw pointers. The CPU and CUDA share one set of params.
#pragma once

#include <cstdint>

#include "storage.h"

namespace pyattn {

// [begin, end): from the first to the last key that a mask tensor leaves
// a row. holes: some key in between is masked.
struct RowKeys {
  int64_t begin, end;
  bool holes;
};

// The most intervals of keys that key_ranges give a query.
inline constexpr int64_t kMostRanges = 4;

// Visible keys of a block of kBlockRows rows of a KV head, in one of their intervals: each row sees
// part of [first_begin, last_end) and, apart from holes, all of [last_begin, first_end).
struct BlockKeys {
  int64_t first_begin, last_begin, first_end, last_end;
  bool holes;
};

// Query i is at key position i + q_offset. It sees the keys from window_left before
// that position to window_right after it, and none after it if causal. Of these it sees
// the keys in its key ranges, except where the bool mask is false or the bias is -inf.
//
//   seqlen_q 2, seqlen_k 4     q_offset 2     1 1 1 0     q_offset 0     1 0 0 0     q_offset 2,       0 1 1 0
//   causal                                    1 1 1 1                    1 1 0 0     window_left 1     0 0 1 1
struct MaskParams {
  bool causal;
  int64_t q_offset;
  const int64_t* q_offsets;                     // (batch), replaces q_offset; or null
  int64_t window_left = -1, window_right = -1;  // -1: no bound
  const int64_t* key_ranges;                    // (batch or 1, seqlen_q, num_ranges, 2): begin and end; or null
  int64_t key_ranges_stride_b;                  // 0 where all sequences share them
  int64_t num_ranges = 1;                       // of a query, at most kMostRanges: sorted and disjoint, or empty
  BroadcastView shown;                          // bool mask, true where the key takes part; data may be null
  // Written by the passes mask_rows, bias_rows and mask_blocks. mask_rows and bias_rows
  // hold the keys that the bool mask and the bias leave each row of their shape,
  // dense (batch or 1, num_heads_q or 1, seqlen_q or 1); null without the tensor, and where it masks no key. blocks
  // is (batch, num_heads_kv, blocks of rows, num_ranges); null where formulas describe blocks.
  RowKeys *mask_rows, *bias_rows;
  BlockKeys* blocks;
};

// Turns a scaled product s into a score, where d = j - (i + q_offset), clamped to [-reach, reach] in relative_bias:
//
//   softcap * tanh(s / softcap) + bias + relative_bias[d + reach] - slope * |d|
struct ScoreParams {
  double softcap;  // 0: none
  BiasView bias;
  const void* alibi_slopes;  // (batch or 1, num_heads_q), double for float64, else float; or null
  int64_t slopes_stride_b;   // 0 where all sequences share them
  // (batch or 1, num_heads_q or 1, 2 * reach + 1), of the same type, strides 0 where shared; or null.
  const void* relative_bias;
  int64_t reach, relative_stride_b, relative_stride_h;
  const void* sinks;  // (num_heads_q), of the same type: the score of one more key, which has no value; or null
};

constexpr bool has_bias(const ScoreParams& score) { return score.bias.type != BiasType::kNone; }

// Dropout: each weight is dropped with probability threshold / 65536; cpu/tiles/dropout.h
// defines the draws. One call of the generator draws for kDrawKeys neighbouring keys of a query.
inline constexpr int kDrawKeys = 8;

// Where a sequence's weights lie in a larger call, of num_heads_q heads, whose draws they repeat:
// key j, query i, head h is there key + j, query + i, head + h of `sequence`. No entry is negative.
struct DropoutOrigin {
  int64_t sequence, num_heads_q, head, query, key;
};

struct DropoutParams {
  uint32_t threshold;            // below 65536; 0 drops none
  const int64_t* seed;           // ()
  const DropoutOrigin* origins;  // (batch), or (1) where sequence b is `sequence` + b; null: the call is the whole
  int64_t origins_stride_b;      // 0 for (1)
};

// The place of a packed sequence: queries [first_q, first_q + seqlen_q), keys [first_k, first_k + seqlen_k).
struct Sequence {
  int64_t first_q, first_k, seqlen_q, seqlen_k;
};

// Packed sequences lie one after another. The operator checks cu_seqlens_q, cu_seqlens_k
// and seqused_k and computes sequences from them. On a GPU the pass place_sequences
// computes them, and gives a sequence with invalid indices lengths of -1.
struct PackedParams {
  const int64_t *cu_seqlens_q, *cu_seqlens_k;  // (batch + 1)
  const int64_t* seqused_k;                    // (batch), or null
  int64_t total_q, total_k;                    // rows of q and k, including those in no sequence
  Sequence* sequences;       // (batch + 1): the last entry is where tokens of no sequence begin; null for a batch
  int64_t* default_offsets;  // (batch): mask.q_offsets, computed with sequences; or null
};

// Paged keys and values: position j of sequence b is row j % size of
// page table[b * stride + j / size]. The views' stride_b then steps from page to page.
struct PageParams {
  const int64_t* table;  // (batch, pages of a sequence); or null
  int64_t stride, size;
};

// Selected keys: each query has a list of the keys that it may see. Kernels compute the call as if every query were a
// sequence by itself, whose key j is key entries[j / block] * block + j % block of k and v; seqlen_k is the length of a
// list in keys. Key ranges, mask and bias are those of the listed keys, and key ranges end before unused entries.
struct SelectedParams {
  const int32_t* entries;      // (batch or 1, num_heads_kv or 1, seqlen_q, count), ascending in each row; or null
  int64_t stride_b, stride_h;  // 0 where sequences, or heads, share lists
  int64_t ranges_stride_h;     // of key_ranges, which heads share if they share lists
  int64_t count, block;        // entries of a list; keys of an entry
  int64_t keys;                // of k and v
  int64_t sharing;             // heads of num_heads_kv that read one head of k and v
  bool bias_masks_none;        // -inf in the bias is a weight of 0, as in a relative bias, and masks no key
};

// Keys and values of 8 bits beside float queries: key j of k is scale_k[j] times its row, value j scale_v[j] times its.
struct ByteParams {
  ByteType type;
  ScaleView scale_k, scale_v;
};

// The phases that a profile reports separately.
enum class Phase : int { kPack, kScores, kSoftmax, kDropout, kOut, kdP, kdV, kdK, kdQ, kStore };
inline constexpr const char* kPhaseNames[] = {"pack",        "S = Q K^T",   "softmax",     "dropout",   "O = P V",
                                              "dP = dO V^T", "dV = P^T dO", "dK = dS^T Q", "dQ = dS K", "store"};
inline constexpr int kNumPhases = sizeof(kPhaseNames) / sizeof(*kPhaseNames);

// Time and operations of each phase of a task.
struct PhaseCounts {
  int64_t ticks[kNumPhases];  // of the processor's time-stamp counter
  int64_t flops[kNumPhases];  // of the products as computed, including the masked pairs of a tile
};

// The fields that the CPU's kernels alone read.
struct CpuParams {
  PageParams pages;  // forward only
  SelectedParams selected;
  ByteParams bytes;      // forward only, of float
  struct Units* before;  // packed: (batch + 1), sums over the sequences before; written by the pass count_units
  double pairs;          // pairs of a query and a key of its sequence, or of its list; visible or masked
  bool row_invariant;    // the bits of a row and of its dq depend on that row alone (cpu/README.md)
  bool prefetch_to_l2;   // whether products prefetch into L2, not L1 (products/lines_ahead.h)
  PhaseCounts* counts;   // of the calling task; null when profiling is off
};

struct ForwardParams {
  View q, k, v, out;
  // Row statistics, (batch, num_heads_q, seqlen_q), packed (num_heads_q, total_q): dense,
  // double for float64, else float. row_max is the largest score, in the backend's own
  // unit (cpu/tiles/score.h, cuda/tiles/score.h), row_sum the sum of exp(score - largest score),
  // lse the natural logarithm of the sum of exp(score). Backward reads row_max and
  // row_sum, because exp(score - lse) carries the rounding error of a large lse.
  void *row_max, *row_sum, *lse;
  // Packed: batch is the number of sequences, seqlen_q and seqlen_k the largest lengths.
  int64_t batch, num_heads_q, num_heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v;
  double softmax_scale;
  PackedParams packed;
  MaskParams mask;
  ScoreParams score;
  DropoutParams dropout;
  void* workspace;  // of the size that Plan or DeviceKernels gives, shared by all work items; or null
  CpuParams cpu;
};

struct BackwardParams : ForwardParams {
  View dout, dq, dk, dv;
  const void* dlse;  // dense like lse, or null
  // Gradients of options, null where not requested. dbias has the bias's own
  // shape, with stride 0 where the bias broadcasts. The others are dense and have
  // the shapes of their tensors, double for float64, else float.
  BiasView dbias;
  void *dslopes, *dsinks, *drelative;
  // k and v hold part of the keys that out and the row statistics cover. row_max is then a score, and dq, dk and dv,
  // which are added to other parts', are double for float64, else float.
  bool part;
};

// Whether a score is just its scaled product, and row_max in the backend's
// own unit. Sinks do not count: they enter when a row is finished.
constexpr bool is_plain(const ForwardParams& p) {
  return !p.score.softcap && !p.score.alibi_slopes && !p.score.relative_bias && !has_bias(p.score);
}
constexpr bool is_plain(const BackwardParams& p) { return !p.part && is_plain(static_cast<const ForwardParams&>(p)); }

// The work and memory of a pass for these params. A plan depends on shapes and
// constants, never on the number of threads, so that number can't change any bits.
struct Plan {
  int64_t items;            // independent work items
  int64_t scratch_bytes;    // private to a task, which calls run several times
  int64_t workspace_bytes;  // one buffer for all items, and for the pass that combines their partial results
  int64_t together = 1;     // neighbouring items that one task computes faster than several tasks do
};

// One pass. run computes work items [begin, end) on the calling thread, and neither allocates nor throws. Its scratch is
// aligned to kScratchAlign; the first kScratchAlign bytes are 0 in a task's first call, and later calls find the scratch
// as the call before left it.
template <class Params>
struct Pass {
  const char* name;
  Plan (*plan)(const Params&);
  void (*run)(const Params&, int64_t begin, int64_t end, void* scratch);
};

inline constexpr int64_t kScratchAlign = 64;

struct Kernels {
  Pass<ForwardParams> count_units;  // first, with packed sequences: writes params.cpu.before
  Pass<ForwardParams> mask_rows;    // before forward and backward, with a bool mask: writes params.mask.mask_rows
  Pass<ForwardParams> bias_rows;    // the same with a bias: writes params.mask.bias_rows
  Pass<ForwardParams> mask_blocks;  // then, unless formulas suffice: writes params.mask.blocks
  Pass<ForwardParams> forward;
  Pass<ForwardParams> forward_int8, forward_float8;  // forward of float queries over keys and values of 8 bits
  Pass<ForwardParams> merge_out;                     // after forward; no items where forward writes out itself
  Pass<BackwardParams> backward;
  Pass<BackwardParams> reduce;             // after backward; no items where backward writes all gradients itself
  Pass<BackwardParams> bias_gradient;      // where the bias broadcasts
  Pass<BackwardParams> head_gradients;     // after backward: gradients of sinks and slopes
  Pass<BackwardParams> relative_gradient;  // after backward, with a relative bias
  double (*peak)(int64_t rounds);          // multiplies and adds in registers; returns the number of operations
};

// The kernels of a dtype: those of plain scores, and those of any score.
struct DTypeKernels {
  Kernels plain, general;
};

// The kernels of a dtype in the active instruction set, which may change at any time: a call takes them once.
Kernels kernels(DType dtype, bool plain);

// Whether products prefetch into L2: where the CPU's L1 holds less than 48 KB of data, and on Intel's processors, which wait for
// few lines of L1 at a time.
bool prefetches_to_l2();

// GPU kernels, launched on a stream of the current device; pointers in params are
// device pointers. Launches are asynchronous; a launch error comes back as a message,
// success as null. Without `deterministic`, backward adds up dQ in whatever order its
// blocks run. forward_bytes and backward_bytes give the size of params.workspace.
struct DeviceKernels {
  int64_t (*forward_bytes)(const ForwardParams&);
  int64_t (*backward_bytes)(const BackwardParams&, bool deterministic);
  const char* (*forward)(const ForwardParams&, void* stream);
  const char* (*backward)(const BackwardParams&, bool deterministic, void* stream);
};

}  // namespace pyattn
