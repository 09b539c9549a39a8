// The operators over paged keys and values, on the CPU: pyattn::attention_paged_forward is attention_forward for
// sequences that all have seqlen_k keys, and pyattn::attention_varlen_paged_forward is attention_varlen_forward. They
// have no backward: if gradients are required, pyattn/cache/pages.py copies the pages that pyattn::pages_in_use lists
// and calls the operators without pages.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <tuple>

#include "ops/calls.h"
#include "ops/operators.h"
#include "ops/options.h"
#include "ops/packing.h"
#include "ops/pages.h"
#include "ops/params.h"
#include "ops/results.h"
#include "ops/selected/call.h"

namespace pyattn {
namespace {

// The pages one after another, as the positions of each sequence: (batch, num_heads, pages * page_size, columns).
Tensor all_positions(const Tensor& pages, int64_t batch) {
  return pages.flatten(0, 1).transpose(0, 1).unsqueeze(0).expand({batch, -1, -1, -1});
}

ForwardTensors selected_in_pages(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& block_table,
                                 int64_t seqlen_k, const Options& options) {
  TORCH_CHECK_NOT_IMPLEMENTED(options.dropout_p == 0, "pyattn: selected keys in pages take no dropout, got dropout_p=",
                              options.dropout_p);  // it draws by positions, which the call does not know
  const int64_t batch = q.size(0);
  const Tensor keys = at::empty({1}, k.options()).expand({batch, k.size(2), seqlen_k, k.size(3)});  // sizes alone
  SelectedCall call(q, keys, options);
  call.list_pages(block_table, k.size(0), k.size(1));
  return call.forward(q, all_positions(k, batch), all_positions(v, batch));
}

ForwardTensors attention_paged_forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& block_table,
                                       SymInt seqlen_k, const Options& options) {
  check_paged(q, k, v, 4);
  const SymInt batch = q.sym_size(0);
  check_block_table(block_table, q.device(), batch);
  TORCH_CHECK_VALUE(seqlen_k >= 0, "pyattn: seqlen_k must be at least 0, got ", seqlen_k);
  check_options(q, batch, q.sym_size(1), options);
  check_options_of_batch(q, seqlen_k, options);
  check_selected(q, k.sym_size(2), seqlen_k, options);
  if (options.selected && !q.is_meta()) return selected_in_pages(q, k, v, block_table, seqlen_k.expect_int(), options);
  return call_forward(q, k, v, [&](ForwardParams& p, const Tensor& q, const Tensor& k, const Tensor& v, Kept& kept) {
    fill_inputs(p, q, k.transpose(1, 2), v.transpose(1, 2), seqlen_k.expect_int(), options, kept);
    fill_pages(p, k, v, block_table, kept);
  });
}

ForwardTensors attention_varlen_paged_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                              const Tensor& block_table, const Packing& packing,
                                              const Options& options) {
  check_paged(q, k, v, 3);
  check_packing(q, packing, options);
  check_block_table(block_table, q.device(), sequences(packing));
  return call_forward(q, k, v, [&](ForwardParams& p, const Tensor& q, const Tensor& k, const Tensor& v, Kept& kept) {
    fill_packed(p, q, k, v, packing, options, kept);
    fill_pages(p, k, v, block_table, kept);
  });
}

// Checks as above. Returns, in int64, block_table with 0 where a sequence has no keys, and each sequence's keys.
std::tuple<Tensor, Tensor> pages_in_use(const Tensor& block_table, const Tensor& cu_seqlens_k, SymInt max_seqlen_k,
                                        const optional<Tensor>& seqused_k, SymInt pages, SymInt page_size) {
  check_pages_in_use(block_table, cu_seqlens_k, seqused_k, page_size);
  const auto wide = block_table.options().dtype(at::kLong);
  // Dense, whatever the strides of block_table, because it is written through a pointer.
  Tensor used = at::zeros_symint(block_table.sym_sizes(), wide),
         lengths = at::empty_symint({cu_seqlens_k.sym_size(0) - 1}, wide);
  if (block_table.is_meta()) return {used, lengths};

  Kept kept;
  const int64_t *table = kept.indices(block_table), *starts = kept.indices(cu_seqlens_k);
  const int64_t* seqused = seqused_k ? kept.indices(*seqused_k) : nullptr;
  const int64_t batch = block_table.size(0), each = block_table.size(1);
  check_longest("max_seqlen_k", check_starts("cu_seqlens_k", starts, batch, kAnyTokens), max_seqlen_k);
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t* listed = table + b * each;
    const int64_t length = check_used(starts, seqused, b);
    const int64_t count = check_pages(listed, each, length, b, pages.expect_int(), page_size.expect_int());
    std::copy_n(listed, count, used.mutable_data_ptr<int64_t>() + b * each);
    lengths.mutable_data_ptr<int64_t>()[b] = length;
  }
  return {used, lengths};
}

TORCH_LIBRARY_FRAGMENT(pyattn, m) {
  define_attention<attention_paged_forward>(
      m, kOnCPU,
      "attention_paged_forward(Tensor q, Tensor k, Tensor v, Tensor block_table, SymInt seqlen_k" PYATTN_OPTIONS_SCHEMA
      ") -> " PYATTN_FORWARD_RESULTS);
  define_attention<attention_varlen_paged_forward>(m, kOnCPU,
                                                   "attention_varlen_paged_forward(Tensor q, Tensor k, Tensor v, "
                                                   "Tensor block_table" PYATTN_PACKING_SCHEMA PYATTN_OPTIONS_SCHEMA
                                                   ") -> " PYATTN_FORWARD_RESULTS);
  define<pages_in_use>(
      m, kOnCPU,
      "pages_in_use(Tensor block_table, Tensor cu_seqlens_k, SymInt max_seqlen_k, Tensor? seqused_k, SymInt pages, "
      "SymInt page_size) -> (Tensor, Tensor)");
}

}  // namespace
}  // namespace pyattn
