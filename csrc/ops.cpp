// The operators pyattn::attention_forward and pyattn::attention_backward: check, allocate,
// fill the params, run the kernels in parallel, or hand over to cuda/. The same functions
// serve the CPU, CUDA and, stopping before the kernels, the Meta key, so that shapes,
// strides and errors can't differ between them.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <optional>
#include <tuple>

#include "attention.h"
#include "checks.h"
#include "cuda/ops_cuda.h"
#include "options.h"
#include "params.h"
#include "profile.h"
#include "threads.h"

namespace pyattn {
namespace {

// ---- Results ----

// A dense tensor like `like` but with cols columns. Columns are innermost, because
// kernels write rows; the other dimensions lie in memory in the order that they have
// in like, as empty_like would have them.
Tensor empty_ordered_as(const Tensor& like, const SymInt& cols) {
  const auto strides = like.sym_strides(), sizes = like.sym_sizes();
  std::array<int, 3> order{2, 1, 0};  // innermost first
  for (int i = 1; i < 3; ++i)
    for (int at = i, j = i - 1; j >= 0; --j) {
      // The stride of an expanded dimension, 0, does not say where it lies: it stays in its place.
      if (strides[order[at]] == 0 || strides[order[j]] == 0) continue;
      if (strides[order[j]] <= strides[order[at]]) break;
      std::swap(order[j], order[at]);
      at = j;
    }
  const std::array<SymInt, 4> shape{sizes[0], sizes[1], sizes[2], cols};
  std::array<SymInt, 4> dense;
  SymInt stride = cols.max(1);
  dense[3] = 1;
  for (const int d : order) {
    dense[d] = stride;
    stride *= shape[d].max(1);
  }
  return at::empty_strided_symint(shape, dense, like.options());
}

Tensor empty_dense(const Tensor& like, at::ScalarType type) {
  return at::empty_symint(like.sym_sizes(), like.options().dtype(type));
}

// The memory of a gradient as large as a bias comes fresh from the system, and one fault for each
// small page takes five times as long as writing it. A hint: where it does not hold, nothing changes.
void prefer_huge_pages([[maybe_unused]] const Tensor& t) {
#ifdef MADV_HUGEPAGE
  if (!t.is_cpu()) return;
  constexpr uintptr_t kHugePage = uintptr_t{1} << 21;
  const auto first = reinterpret_cast<uintptr_t>(t.mutable_data_ptr());
  const uintptr_t begin = (first + kHugePage - 1) / kHugePage * kHugePage,
                  end = (first + t.nbytes()) / kHugePage * kHugePage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

// ---- Passes ----

// ATen's allocator, so that the memory profiler sees it, without the dispatcher's microsecond.
c10::DataPtr allocate(int64_t bytes) { return c10::GetCPUAllocator()->allocate(bytes); }

// Runs all work items of a pass. Each task takes the next item when it is done with one; scratch
// belongs to a task, not to the number of a thread.
template <class Params>
void run(const Pass<Params>& pass, const Plan& plan, const Params& p) {
  if (plan.items == 0) return;
  std::atomic<int64_t> next{0};
  const auto task = [&] {
    const c10::DataPtr scratch = allocate(plan.scratch_bytes + kScratchAlign);
    auto address = reinterpret_cast<uintptr_t>(scratch.get());
    address = (address + kScratchAlign - 1) / kScratchAlign * kScratchAlign;
    std::optional<TaskProfile> profile = begin_task(pass.name);
    Params own = p;
    own.counts = profile ? &profile->counts : nullptr;
    int64_t items = 0;
    for (int64_t item; (item = next++) < plan.items; ++items)
      pass.run(own, item, item + 1, reinterpret_cast<void*>(address));
    if (profile) end_task(*profile, items);
  };
  // Waking the other threads costs about 5 us, in which one thread does some 100,000 multiply-adds
  // of a small shape. Ten times as many are worth it.
  constexpr double kWorthThreads = 1 << 20;
  const double work =
      static_cast<double>(p.batch) * p.num_heads_q * p.seqlen_q * p.seqlen_k * (p.head_dim + p.head_dim_v);
  run_tasks(work < kWorthThreads ? 1 : std::min(plan.items, max_tasks()), task);
}

// Runs a pass whose result is an array of its own, to which params point from then on.
template <class Entry>
c10::DataPtr make_array(const Pass<ForwardParams>& pass, ForwardParams& p, Entry*& array) {
  const Plan plan = pass.plan(p);
  c10::DataPtr memory = allocate(plan.workspace_bytes);
  array = static_cast<Entry*>(memory.get());
  run(pass, plan, p);
  return memory;
}

// What the mask leaves of each row and block of rows, where formulas do not say it.
std::array<c10::DataPtr, 2> summarize_mask(const Kernels& table, ForwardParams& p) {
  std::array<c10::DataPtr, 2> memory;
  const bool bias = p.score.bias.type != BiasType::kNone;
  if (bias) memory[0] = make_array(table.bias_rows, p, p.mask.bias_rows);
  if (bias || p.mask.key_ranges) memory[1] = make_array(table.mask_blocks, p, p.mask.blocks);
  return memory;
}

// Runs a pass, then those that make more of what it leaves in the workspace.
template <class Params, class... Next>
void run(const Pass<Params>& pass, Params& p, const Next&... next) {
  const Plan plan = pass.plan(p);
  const c10::DataPtr workspace = allocate(plan.workspace_bytes);
  p.workspace = workspace.get();
  run(pass, plan, p);
  (run(next, next.plan(p), p), ...);
}

// ---- Operators ----

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_forward(
    const Tensor& q, const Tensor& k, const Tensor& v, optional<double> softmax_scale, bool causal,
    optional<SymInt> q_offset, const optional<Tensor>& q_offsets, c10::SymIntArrayRef window,
    const optional<Tensor>& key_ranges, double softcap, const optional<Tensor>& bias,
    const optional<Tensor>& alibi_slopes, const optional<Tensor>& sinks, double dropout_p,
    const optional<Tensor>& dropout_seed) {
  Options options{softmax_scale, causal, q_offset,     q_offsets, window,    key_ranges,
                  softcap,       bias,   alibi_slopes, sinks,     dropout_p, dropout_seed};
  check_inputs(q, k, v, options);
  Tensor out = empty_ordered_as(q, v.sym_size(3));
  Tensor lse =
      at::empty_symint({q.sym_size(0), q.sym_size(1), q.sym_size(2)}, q.options().dtype(row_dtype(q.scalar_type())));
  Tensor row_max = at::empty_like(lse), row_sum = at::empty_like(lse);
  if (q.is_meta()) return {out, lse, row_max, row_sum};

  const Tensor q_ = with_contiguous_columns(q), k_ = with_contiguous_columns(k), v_ = with_contiguous_columns(v);
  ForwardParams p{};
  fill_inputs(p, q_, k_, v_, options);
  p.out = result(out);
  p.lse = lse.mutable_data_ptr(), p.row_max = row_max.mutable_data_ptr(), p.row_sum = row_sum.mutable_data_ptr();
  if (q.is_cuda()) {
    cuda::forward(q, p);
  } else {
    const Kernels& table = kernels(dtype_of(q.scalar_type()), p.score);
    const auto summary = summarize_mask(table, p);
    run(table.forward, p, table.merge_out);
  }
  return {out, lse, row_max, row_sum};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& dout, const optional<Tensor>& dlse, const Tensor& q, const Tensor& k, const Tensor& v,
    const Tensor& out, const Tensor& row_max, const Tensor& row_sum, optional<double> softmax_scale, bool causal,
    optional<SymInt> q_offset, const optional<Tensor>& q_offsets, c10::SymIntArrayRef window,
    const optional<Tensor>& key_ranges, double softcap, const optional<Tensor>& bias,
    const optional<Tensor>& alibi_slopes, const optional<Tensor>& sinks, double dropout_p,
    const optional<Tensor>& dropout_seed, bool deterministic, std::array<bool, 3> output_mask) {
  Options options{softmax_scale, causal, q_offset,     q_offsets, window,    key_ranges,
                  softcap,       bias,   alibi_slopes, sinks,     dropout_p, dropout_seed};
  check_inputs(q, k, v, options);
  const std::array<SymInt, 4> out_sizes{q.sym_size(0), q.sym_size(1), q.sym_size(2), v.sym_size(3)};
  const c10::SymIntArrayRef row_sizes(out_sizes.data(), 3);
  const at::ScalarType type = q.scalar_type();
  check_tensor("dout", dout, q.device(), type, out_sizes);
  check_tensor("out", out, q.device(), type, out_sizes);
  check_tensor("row_max", row_max, q.device(), row_dtype(type), row_sizes);
  check_tensor("row_sum", row_sum, q.device(), row_dtype(type), row_sizes);
  if (dlse) check_tensor("dlse", *dlse, q.device(), row_dtype(type), row_sizes);
  Tensor dq = empty_ordered_as(q, q.sym_size(3)), dk = empty_ordered_as(k, k.sym_size(3)),
         dv = empty_ordered_as(v, v.sym_size(3));
  check_wanted(options, output_mask);
  const auto [with_dbias, with_dslopes, with_dsinks] = output_mask;
  Tensor dbias = with_dbias ? empty_dense(*bias, bias->scalar_type()) : Tensor();
  Tensor dslopes = with_dslopes ? empty_dense(*alibi_slopes, row_dtype(type)) : Tensor();
  Tensor dsinks = with_dsinks ? empty_dense(*sinks, row_dtype(type)) : Tensor();
  const auto results = [&] {
    return std::tuple{dq,
                      dk,
                      dv,
                      dbias,
                      with_dslopes ? dslopes.to(alibi_slopes->scalar_type()) : dslopes,
                      with_dsinks ? dsinks.to(sinks->scalar_type()) : dsinks};
  };
  if (q.is_meta()) return results();

  const Tensor q_ = with_contiguous_columns(q), k_ = with_contiguous_columns(k), v_ = with_contiguous_columns(v);
  const Tensor dout_ = with_contiguous_columns(dout), out_ = with_contiguous_columns(out);
  const Tensor row_max_ = row_max.contiguous(), row_sum_ = row_sum.contiguous();
  const optional<Tensor> dlse_ = contiguous(dlse);
  BackwardParams p{};
  fill_inputs(p, q_, k_, v_, options);
  p.out = input(out_), p.dout = input(dout_);
  p.row_max = input_data(row_max_), p.row_sum = input_data(row_sum_), p.dlse = dlse_ ? input_data(*dlse_) : nullptr;
  p.dq = result(dq), p.dk = result(dk), p.dv = result(dv);
  if (with_dbias && row_max.numel() > 0 && k.size(2) > 0)
    prefer_huge_pages(dbias), p.dbias = bias_view(dbias, type, dbias.mutable_data_ptr());
  else if (with_dbias)
    dbias.zero_();  // no score has it, so no kernel writes it
  if (with_dslopes) p.dslopes = dslopes.mutable_data_ptr();
  if (with_dsinks) p.dsinks = dsinks.mutable_data_ptr();
  if (q.is_cuda()) {
    cuda::backward(q, p, deterministic);
  } else {
    const Kernels& table = kernels(dtype_of(type), p.score);
    const auto summary = summarize_mask(table, p);
    run(table.backward, p, table.reduce_dq, table.bias_gradient, table.head_gradients);
  }
  return results();
}

}  // namespace

#define PYATTN_OPTIONS                                                                           \
  "float? softmax_scale=None, bool causal=True, SymInt? q_offset=None, Tensor? q_offsets=None, " \
  "SymInt[2] window=[-1, -1], Tensor? key_ranges=None, float softcap=0.0, Tensor? bias=None, "   \
  "Tensor? alibi_slopes=None, Tensor? sinks=None, float dropout_p=0.0, Tensor? dropout_seed=None"

TORCH_LIBRARY(pyattn, m) {
  m.def("attention_forward(Tensor q, Tensor k, Tensor v, " PYATTN_OPTIONS
        ") -> (Tensor out, Tensor lse, Tensor row_max, Tensor row_sum)");
  m.def(
      "attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor row_max, "
      "Tensor row_sum, " PYATTN_OPTIONS
      ", bool deterministic=True, bool[3] output_mask=[False, False, False]) "
      "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dalibi_slopes, Tensor dsinks)");
}

TORCH_LIBRARY_IMPL(pyattn, CPU, m) {
  m.impl("attention_forward", attention_forward);
  m.impl("attention_backward", attention_backward);
}

TORCH_LIBRARY_IMPL(pyattn, CUDA, m) {
  m.impl("attention_forward", attention_forward);
  m.impl("attention_backward", attention_backward);
}

TORCH_LIBRARY_IMPL(pyattn, Meta, m) {
  m.impl("attention_forward", attention_forward);
  m.impl("attention_backward", attention_backward);
}

// Every other backend. CompositeExplicitAutograd does not cover nested tensors.
TORCH_LIBRARY_IMPL(pyattn, CompositeExplicitAutograd, m) {
  m.impl("attention_forward", torch::CppFunction::makeFromBoxedFunction<&refuse>());
  m.impl("attention_backward", torch::CppFunction::makeFromBoxedFunction<&refuse>());
}

TORCH_LIBRARY_IMPL(pyattn, NestedTensorCPU, m) {
  m.impl("attention_forward", torch::CppFunction::makeFromBoxedFunction<&refuse>());
  m.impl("attention_backward", torch::CppFunction::makeFromBoxedFunction<&refuse>());
}

TORCH_LIBRARY_IMPL(pyattn, NestedTensorCUDA, m) {
  m.impl("attention_forward", torch::CppFunction::makeFromBoxedFunction<&refuse>());
  m.impl("attention_backward", torch::CppFunction::makeFromBoxedFunction<&refuse>());
}

// Derivatives come from pyattn/autograd.py. Those that it does not define, double backward and
// forward mode, raise here instead of being silently zero.
TORCH_LIBRARY_IMPL(pyattn, Autograd, m) {
  m.impl("attention_forward", torch::autograd::autogradNotImplementedFallback());
  m.impl("attention_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace pyattn
