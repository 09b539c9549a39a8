// Kernel calls: tensors (dense, packed or paged) -> params -> results.
#pragma once

#include <atomic>

#include "attention.h"
#include "ops/checks.h"
#include "ops/devices/cuda.h"
#include "ops/devices/host.h"
#include "ops/devices/huge_pages.h"
#include "ops/operators.h"
#include "ops/options.h"
#include "ops/params.h"
#include "ops/results.h"

namespace pyattn {

// Whether the bits of a row depend on that row alone, on the CPU; read when a forward runs. Backward gets it as an argument.
inline std::atomic<bool> is_row_invariant{false};

// fill(p, q, k, v, kept) sets the sizes and options of p: operators differ in what they take beside q, k and v.
template <class Fill>
ForwardTensors call_forward(const Tensor& q, const Tensor& k, const Tensor& v, Fill fill) {
  TORCH_CHECK_NOT_IMPLEMENTED(!q.is_cuda() || !is_row_invariant,
                              "pyattn: set_row_invariant(True) is for the CPU alone, got q on ", q.device());
  const ForwardResults results(q, v.sym_size(-1));
  if (q.is_meta()) return results.all();

  const Tensor q_ = with_contiguous_columns(q), k_ = with_contiguous_columns(k), v_ = with_contiguous_columns(v);
  Kept kept;
  ForwardParams p{};
  p.q = input(q_), p.k = input(k_), p.v = input(v_);
  fill(p, q_, k_, v_, kept);
  if (is_packed(q) || results.out.nbytes() > kMappedAnew) prefer_huge_pages(results.out);
  p.out = result(results.out), results.fill_rows(p);
  p.cpu.row_invariant = is_row_invariant;
  if (q.is_cuda()) {
    cuda::forward(q, p);
  } else {
    run_forward(torch_host, dtype_of(q.scalar_type()), p);
    if (is_packed(q)) results.fill_unused(p);
  }
  return results.all();
}

// The arguments of backward beside dout and the options, in the form of PYATTN_OPTIONS.
#define PYATTN_SAVED(X)                    \
  X(optional<Tensor>, dlse, "Tensor?", "") \
  X(Tensor, q, "Tensor", "")               \
  X(Tensor, k, "Tensor", "")               \
  X(Tensor, v, "Tensor", "")               \
  X(Tensor, out, "Tensor", "")             \
  X(Tensor, row_max, "Tensor", "")         \
  X(Tensor, row_sum, "Tensor", "")
#define PYATTN_FLAGS(X)                                              \
  X(bool, deterministic, "bool", "=True")                            \
  X(Wanted, output_mask, "bool[4]", "=[False, False, False, False]") \
  X(bool, part, "bool", "=False")                                    \
  X(bool, row_invariant, "bool", "=False")

struct Saved {
  PYATTN_FIELDS(Saved, PYATTN_SAVED)
};
struct Flags {
  PYATTN_FIELDS(Flags, PYATTN_FLAGS)
};

// Checks dout and what forward returned: out like q with head_dim_v columns, row statistics one value per query row.
inline void check_saved(const Tensor& dout, const Saved& saved) {
  const Tensor& q = saved.q;
  const at::ScalarType type = q.scalar_type(), rows = row_dtype(type);
  const c10::SymDimVector out_sizes = with_columns(q, saved.v.sym_size(-1)), row_sizes = sizes_of_rows(q);
  check_tensor("dout", dout, q.device(), type, out_sizes);
  check_tensor("out", saved.out, q.device(), type, out_sizes);
  check_tensor("row_max", saved.row_max, q.device(), rows, row_sizes);
  check_tensor("row_sum", saved.row_sum, q.device(), rows, row_sizes);
  if (saved.dlse) check_tensor("dlse", *saved.dlse, q.device(), rows, row_sizes);
}

template <class Fill>
BackwardTensors call_backward(const Tensor& dout, const Saved& saved, const Options& options, const Flags& flags,
                              Fill fill) {
  const auto& [dlse, q, k, v, out, row_max, row_sum] = saved;
  const at::ScalarType type = q.scalar_type();
  check_saved(dout, saved);
  const at::ScalarType written = flags.part ? row_dtype(type) : type;
  Tensor dq = empty_ordered_as(q, q.sym_size(-1), written), dk = empty_ordered_as(k, k.sym_size(-1), written),
         dv = empty_ordered_as(v, v.sym_size(-1), written);
  check_wanted(options, flags.output_mask);
  const OptionGradients more(options, flags.output_mask, row_dtype(type));
  if (q.is_meta()) return more.with(dq, dk, dv);

  const Tensor q_ = with_contiguous_columns(q), k_ = with_contiguous_columns(k), v_ = with_contiguous_columns(v);
  const Tensor dout_ = with_contiguous_columns(dout), out_ = with_contiguous_columns(out);
  const Tensor row_max_ = row_max.contiguous(), row_sum_ = row_sum.contiguous();
  const optional<Tensor> dlse_ = contiguous(dlse);
  Kept kept;
  BackwardParams p{};
  p.q = input(q_), p.k = input(k_), p.v = input(v_);
  fill(p, q_, k_, v_, kept);
  p.out = input(out_), p.dout = input(dout_);
  p.row_max = input_data(row_max_), p.row_sum = input_data(row_sum_), p.dlse = dlse_ ? input_data(*dlse_) : nullptr;
  p.part = flags.part, p.cpu.row_invariant = flags.row_invariant;
  if (is_packed(q))
    for (const Tensor& t : {dq, dk, dv}) prefer_huge_pages(t);
  p.dq = result(dq), p.dk = result(dk), p.dv = result(dv);
  more.fill_rows(p);
  if (const Tensor& dbias = more.dbias; dbias.defined()) {
    if (row_max.numel() > 0 && k.size(2) > 0) {
      prefer_huge_pages(dbias);
      p.dbias = bias_view(dbias, type, dbias.mutable_data_ptr());
    } else {
      dbias.zero_();  // there are no scores, so no kernel writes it
    }
  }
  if (q.is_cuda()) {
    cuda::backward(q, p, flags.deterministic);
  } else {
    if (is_packed(q)) fill_unused(p, dq, dk, dv);
    run_backward(torch_host, dtype_of(type), p);
  }
  return more.with(dq, dk, dv);
}

}  // namespace pyattn
