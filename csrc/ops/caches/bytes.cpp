// Caches of 8 bits, on the CPU: quantising rows, the rotation of int8's keys, and attention over the quantised rows.
//
//   row x, of float    scale = max |x| / 127, values = round(x / scale)        int8; 448 for float8_e4m3fn
//
// A row that is not finite has scale NaN. int8 has the same steps for all columns of a row, so channels that are far
// larger than the others would leave these few steps. Keys are therefore rotated first, which spreads such a channel
// over all: in blocks of n columns, a power of two, by a Hadamard matrix over signs (QuaRot, Ashkboos et al. 2024).
// Queries are rotated alike, and scores stay the same.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/Float8_e4m3fn.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

#include "ops/calls.h"
#include "ops/operators.h"
#include "ops/options.h"
#include "ops/pages.h"
#include "ops/params.h"
#include "ops/results.h"

namespace pyattn {
namespace {

// The sign of a column, from a hash of its number: without signs, a mean of the keys that is equal in all columns would end up
// in one.
inline bool is_negative(uint32_t column) {
  uint32_t x = column * 0x9e3779b1u;
  x = (x ^ x >> 15) * 0x85ebca77u;
  return (x ^ x >> 13) >> 31;
}

// The rotation of rows of that many columns, in blocks of n.
class Rotation {
 public:
  Rotation(int64_t columns, int64_t n) : n_(n), signs_(columns) {
    for (int64_t d = 0; d < columns; ++d) signs_[d] = is_negative(static_cast<uint32_t>(d)) ? -1.0f : 1.0f;
  }

  // row[columns] -> its rotation in place.
  void apply(float* row, bool inverse) const {
    if (n_ == 1) return;  // no rotation
    if (!inverse) change_signs(row);
    for (float* block = row; block < row + signs_.size(); block += n_) {
      add_neighbours(block);
      for (int64_t half = 4; half < n_; half *= 2) add_halves(block, half);
    }
    const float factor = 1 / std::sqrt(static_cast<float>(n_));
    for (std::size_t d = 0; d < signs_.size(); ++d) row[d] *= factor;
    if (inverse) change_signs(row);
  }

 private:
  int64_t n_;
  std::vector<float> signs_;  // [columns]

  void change_signs(float* row) const {
    for (std::size_t d = 0; d < signs_.size(); ++d) row[d] *= signs_[d];
  }

  // The sums and differences of columns, then those of pairs.
  void add_neighbours(float* block) const {
    for (int64_t i = 0; i + 4 <= n_; i += 4) {
      float* const x = block + i;
      const float sum = x[0] + x[1], difference = x[0] - x[1], sum2 = x[2] + x[3], difference2 = x[2] - x[3];
      x[0] = sum + sum2, x[1] = difference + difference2, x[2] = sum - sum2, x[3] = difference - difference2;
    }
    if (n_ == 2) {
      const float sum = block[0] + block[1], difference = block[0] - block[1];
      block[0] = sum, block[1] = difference;
    }
  }

  // Sums and differences of groups of at least 4 columns. Pointers that do not alias let the compiler vectorise the loop.
  void add_halves(float* block, int64_t half) const {
    for (int64_t i = 0; i < n_; i += 2 * half) {
      float* __restrict const first = block + i;
      float* __restrict const second = first + half;
      for (int64_t j = 0; j < half; ++j) {
        const float a = first[j], b = second[j];
        first[j] = a + b, second[j] = a - b;
      }
    }
  }
};

void check_rotation(const Tensor& x, const SymInt& block) {
  const int64_t n = number(block);
  TORCH_CHECK_VALUE(n >= 1 && (n & (n - 1)) == 0 && x.dim() > 0 && x.sym_size(-1) % n == 0,
                    "pyattn: rotation must be a power of two that divides the ", x.sym_size(-1), " columns, got ",
                    block);
}

// Calls f(row) for the rows [0, count), by several threads if there is work for them.
template <class F>
void each_row_in_parallel(int64_t count, int64_t columns, F f) {
  constexpr int64_t kWorthThreads = 1 << 16, kRows = 64;  // elements; rows that a task takes at once
  const int64_t blocks = (count + kRows - 1) / kRows;
  std::atomic<int64_t> next{0};
  const auto task = [&] {
    for (int64_t block; (block = next.fetch_add(1)) < blocks;)
      for (int64_t i = block * kRows; i < std::min(count, (block + 1) * kRows); ++i) f(i);
  };
  const int64_t tasks = count * columns < kWorthThreads ? 1 : std::min(blocks, torch_host.max_tasks());
  if (tasks <= 1) return task();
  torch_host.run_tasks(
      tasks, [](void* data) { (*static_cast<decltype(&task)>(data))(); },
      const_cast<void*>(static_cast<const void*>(&task)));
}

// Rows of float: the rotation of those of x (.., columns), which queries and results need.
Tensor cache_rotate(const Tensor& x, SymInt block, bool inverse) {
  check_type("x", x, {at::kFloat});
  check_rotation(x, block);
  Tensor out = at::empty_like(x, at::MemoryFormat::Contiguous);
  if (x.is_meta() || x.numel() == 0) return out;
  out.copy_(x);
  const int64_t columns = x.size(-1), n = number(block);
  float* const rows = out.mutable_data_ptr<float>();
  const Rotation rotation(columns, n);
  each_row_in_parallel(out.numel() / columns, columns, [&](int64_t i) { rotation.apply(rows + i * columns, inverse); });
  return out;
}

// x (.., columns) -> values like it, in int8 or float8_e4m3fn, and scales (..), float. block: of the rotation; 1: none.
std::tuple<Tensor, Tensor> cache_quantize(const Tensor& x, SymInt block, bool float8) {
  dtype_of(x.scalar_type());
  check_rotation(x, block);
  const auto type = float8 ? at::kFloat8_e4m3fn : at::kChar;
  Tensor values = at::empty_symint(x.sym_sizes(), x.options().dtype(type));
  Tensor scales = at::empty_symint(x.sym_sizes().slice(0, x.dim() - 1), x.options().dtype(at::kFloat));
  if (x.is_meta()) return {values, scales};
  if (x.numel() == 0) {
    scales.zero_();
    return {values, scales};
  }
  const Tensor rows = x.to(at::kFloat).contiguous();
  const int64_t columns = x.size(-1), n = number(block);
  const float* const from = rows.const_data_ptr<float>();
  float* const scale_of = scales.mutable_data_ptr<float>();
  void* const to = values.mutable_data_ptr();
  const Rotation rotation(columns, n);
  each_row_in_parallel(rows.numel() / columns, columns, [&](int64_t i) {
    std::vector<float> row(from + i * columns, from + (i + 1) * columns);
    rotation.apply(row.data(), false);
    float largest = 0, sum = 0;
    for (const float a : row) largest = std::max(largest, std::abs(a)), sum += a * 0;  // NaN or inf: sum is NaN
    const float scale = sum == 0 ? largest / (float8 ? 448.0f : 127.0f) : std::numeric_limits<float>::quiet_NaN();
    scale_of[i] = scale;
    for (int64_t d = 0; d < columns; ++d) {
      const float a = scale > 0 ? row[d] / scale : 0;
      if (float8)
        static_cast<c10::Float8_e4m3fn*>(to)[i * columns + d] = std::min(std::max(a, -448.0f), 448.0f);
      else
        static_cast<int8_t*>(to)[i * columns + d] =
            static_cast<int8_t>(std::nearbyint(std::min(std::max(a, -127.0f), 127.0f)));
    }
  });
  return {values, scales};
}

// Checks k and v of 8 bits and their scales, which have a number for each row.
void check_bytes(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& scale_k, const Tensor& scale_v,
                 int64_t heads) {
  check_defined(q, k, v);
  TORCH_CHECK_VALUE(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, "pyattn: q, k and v must have 4 dimensions, got q ",
                    q.sym_sizes(), ", k ", k.sym_sizes(), " and v ", v.sym_sizes());
  check_type("q", q, {at::kFloat});
  check_type("k", k, {at::kChar, at::kFloat8_e4m3fn});
  check_heads(q, k, heads);
  check_tensor("v", v, q.device(), k.scalar_type(), with_columns(k, v.sym_size(-1)));
  check_tensor("k", k, q.device(), k.scalar_type(), k.sym_sizes());
  const auto rows = k.sym_sizes().slice(0, 3);
  check_tensor("scale_k", scale_k, q.device(), at::kFloat, rows);
  check_tensor("scale_v", scale_v, q.device(), at::kFloat, rows);
}

ScaleView scale_view(const Tensor& t, bool paged) {
  const auto* data = t.const_data_ptr<float>();
  return paged ? ScaleView{data, t.stride(0), t.stride(2), t.stride(1)}
               : ScaleView{data, t.stride(0), t.stride(1), t.stride(2)};
}

// attention_forward of float q over k and v of 8 bits: (batch, num_heads, seqlen_k, columns), or in pages if there is a
// block_table, of sequences with seqlen_k keys.
ForwardTensors attention_bytes_forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& scale_k,
                                       const Tensor& scale_v, const optional<Tensor>& block_table, SymInt seqlen_k,
                                       const Options& options) {
  const bool paged = block_table.has_value();
  check_bytes(q, k, v, scale_k, scale_v, paged ? 2 : 1);
  const SymInt batch = q.sym_size(0);
  if (paged) {
    check_page_size(k.sym_size(1));
    check_block_table(*block_table, q.device(), batch);
  } else {
    TORCH_CHECK_VALUE(k.sym_size(0) == batch, "pyattn: q and k must have the same batch, got ", batch, " and ",
                      k.sym_size(0));
    TORCH_CHECK_VALUE(k.sym_size(2) == seqlen_k, "pyattn: k must have seqlen_k = ", seqlen_k, " keys, got ",
                      k.sym_size(2));
  }
  TORCH_CHECK_VALUE(seqlen_k >= 0, "pyattn: seqlen_k must be at least 0, got ", seqlen_k);
  check_options(q, batch, q.sym_size(1), options);
  check_options_of_batch(q, seqlen_k, options);
  TORCH_CHECK_NOT_IMPLEMENTED(!options.selected, "pyattn: keys of 8 bits take no selected, got one of shape ",
                              options.selected->sym_sizes());
  return call_forward(q, k, v, [&](ForwardParams& p, const Tensor& q, const Tensor& k, const Tensor& v, Kept& kept) {
    if (paged) {
      fill_inputs(p, q, k.transpose(1, 2), v.transpose(1, 2), seqlen_k.expect_int(), options, kept);
      fill_pages(p, k, v, *block_table, kept);
    } else {
      fill_inputs(p, q, k, v, k.size(2), options, kept);
    }
    const ByteType type = k.scalar_type() == at::kChar ? ByteType::kInt8 : ByteType::kFloat8;
    p.cpu.bytes = {type, scale_view(scale_k, paged), scale_view(scale_v, paged)};
  });
}

TORCH_LIBRARY_FRAGMENT(pyattn, m) {
  define<cache_rotate>(m, kOnCPU, "cache_rotate(Tensor x, SymInt block, bool inverse) -> Tensor");
  define<cache_quantize>(m, kOnCPU, "cache_quantize(Tensor x, SymInt block, bool float8) -> (Tensor, Tensor)");
  define_attention<attention_bytes_forward>(
      m, kOnCPU,
      "attention_bytes_forward(Tensor q, Tensor k, Tensor v, Tensor scale_k, Tensor scale_v, Tensor? block_table, "
      "SymInt seqlen_k" PYATTN_OPTIONS_SCHEMA ") -> " PYATTN_FORWARD_RESULTS);
}

}  // namespace
}  // namespace pyattn
