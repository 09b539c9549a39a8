// Runs the kernels of every instruction set that this machine has, without torch, and compares
// them with the scalar ones in float64, which the Python suite verifies. For machines without
// PyTorch, emulated ones above all:
//
//   c++ -std=c++20 -O2 -Icsrc tests/tools/kernels_check.cpp csrc/library/dispatch.cpp <objects of kernels.cpp> -o kernels_check
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>
#include <random>
#include <vector>

#include "attention.h"
#include "library.h"
#include "tensor.h"

namespace {

using namespace pyattn;

struct Options {
  int64_t window_left = -1, window_right = -1;
  bool key_ranges = false;
  double softcap = 0;
  bool mask = false;  // a bool mask; it and the bias are the same for every sequence
  BiasType bias = BiasType::kNone;
  bool alibi = false, sinks = false, relative = false;
};

constexpr int64_t kReach = 40;  // of the relative bias

struct Case {
  int64_t batch, num_heads_q, num_heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v;
  bool causal;
  int64_t q_offset;
  double dropout_p;
  Options options = {};
};

constexpr Case kCases[] = {
    {1, 1, 1, 1, 1, 1, 1, true, 0, 0},
    {2, 2, 2, 6, 6, 3, 3, true, 0, 0},
    {1, 4, 2, 65, 63, 40, 24, true, -2, 0},
    {2, 2, 1, 130, 130, 64, 64, true, 0, 0},
    {1, 3, 3, 70, 200, 33, 17, true, 60, 0.1},
    {1, 2, 2, 100, 290, 16, 32, false, 0, 0.4},
    {1, 9, 9, 33, 100, 24, 24, true, 67, 0},
    {1, 8, 2, 1, 2500, 64, 128, true, 2499, 0},
    {2, 3, 3, 2, 1300, 32, 48, true, 1020, 0},
    {1, 7, 1, 1, 300, 96, 16, false, 0, 0},
    {1, 2, 1, 1100, 150, 20, 24, true, -950, 0},
    {1, 1, 1, 100, 30, 16, 16, true, -40, 0},
    {1, 2, 2, 150, 200, 32, 24, true, 50, 0, {.window_left = 20}},
    {2, 4, 2, 70, 90, 24, 40, false, 10, 0.2, {.window_left = 9, .window_right = 3, .key_ranges = true}},
    {1, 2, 1, 90, 130, 40, 33, true, 40, 0, {.softcap = 2, .alibi = true, .sinks = true, .relative = true}},
    {1, 3, 1, 65, 140, 16, 16, true, 75, 0.1, {.bias = BiasType::kLikeQ, .sinks = true}},
    {1, 6, 2, 90, 150, 32, 16, false, 30, 0.1, {.window_left = 60, .relative = true}},
    {1, 4, 2, 2, 400, 64, 64, true, 398, 0, {.relative = true}},
    {2, 2, 2, 80, 70, 48, 16, false, 0, 0, {.softcap = 3, .bias = BiasType::kLikeQ, .alibi = true}},
    {2, 2, 1, 60, 150, 17, 20, true, 90, 0, {.key_ranges = true, .mask = true, .alibi = true}},
    {1, 8, 2, 1, 700, 64, 64, true, 699, 0, {.window_left = 500, .bias = BiasType::kLikeQ, .sinks = true}},
    {1, 4, 1, 2, 300, 20, 36, true, 298, 0, {.key_ranges = true, .mask = true, .alibi = true}},
    {1, 4, 2, 70, 120, 24, 16, false, 0, 0.1, {.mask = true, .bias = BiasType::kLikeQ, .sinks = true}},
    {2, 6, 2, 1, 600, 32, 20, true, 599, 0, {.mask = true, .bias = BiasType::kLikeQ}},
    {1, 5, 1, 1, 333, 80, 40, true, 332, 0},
    {2, 16, 1, 1, 1100, 96, 64, false, 0, 0},
    {1, 22, 2, 1, 200, 64, 48, true, 199, 0, {.window_left = 150}},
    {2, 4, 2, 4, 1100, 64, 64, true, 1096, 0, {.sinks = true}},
    {1, 4, 2, 150, 260, 64, 80, true, 110, 0, {.window_left = 45}},
    {2, 2, 2, 200, 250, 72, 40, false, 0, 0, {.key_ranges = true}},
    {1, 2, 2, 90, 331, 96, 33, true, 241, 0.3, {.key_ranges = true}},
};

template <class Params>
void run(const Pass<Params>& pass, const Plan& plan, const Params& p) {
  if (plan.items == 0) return;
  std::vector<char> scratch(plan.scratch_bytes + kScratchAlign);
  auto address = reinterpret_cast<uintptr_t>(scratch.data());
  pass.run(p, 0, plan.items, reinterpret_cast<void*>((address + kScratchAlign - 1) / kScratchAlign * kScratchAlign));
}

// Runs a pass, then the passes that combine its partial results in the workspace.
template <class Params, class... Next>
void run(const Pass<Params>& pass, Params& p, const Next&... next) {
  const Plan plan = pass.plan(p);
  std::vector<char> workspace(plan.workspace_bytes);
  p.workspace = workspace.data();
  run(pass, plan, p);
  (run(next, next.plan(p), p), ...);
}

// Runs a pass whose result is an array, and points `array`, a member of p, to it.
template <class Entry>
std::vector<Entry> make_array(const Pass<ForwardParams>& pass, const ForwardParams& p, Entry*& array) {
  const Plan plan = pass.plan(p);
  std::vector<Entry> entries(plan.workspace_bytes / sizeof(Entry));
  array = entries.data();
  run(pass, plan, p);
  return entries;
}

// A few keys for each query, the same for every sequence; every seventh query sees none.
std::vector<int64_t> ranges(const Case& c) {
  std::vector<int64_t> ends;
  for (int64_t i = 0; i < c.seqlen_q; ++i) {
    const int64_t begin = i * 37 % c.seqlen_k, count = i % 7 == 3 ? 0 : 30 + i * 13 % 50;
    ends.insert(ends.end(), {begin, std::min(begin + count, c.seqlen_k)});
  }
  return ends;
}

// q, k, v, dout, dlse, bias, ALiBi slopes, sinks and relative bias.
using Inputs = std::array<Values, 9>;
using Results = std::array<Values, 9>;
constexpr const char* kNames[] = {"out", "lse", "dq", "dk", "dv", "dbias", "dslopes", "dsinks", "drelative"};

template <class S>
Results results(const Case& c, const Inputs& inputs) {
  using T = std::conditional_t<std::is_same_v<S, double>, double, float>;
  const Options& options = c.options;
  Tensor<S> q(c.batch, c.num_heads_q, c.seqlen_q, c.head_dim), k(c.batch, c.num_heads_kv, c.seqlen_k, c.head_dim),
      v(c.batch, c.num_heads_kv, c.seqlen_k, c.head_dim_v), out(c.batch, c.num_heads_q, c.seqlen_q, c.head_dim_v),
      dout = out, dq = q, dk = k, dv = v, bias(1, c.num_heads_q, c.seqlen_q, c.seqlen_k), dbias = bias;
  Tensor<T> lse(c.batch, c.num_heads_q, c.seqlen_q, 1), row_max = lse, row_sum = lse, dlse = lse;
  Tensor<T> slopes(1, c.num_heads_q, 1, 1), sinks = slopes, dslopes = slopes, dsinks = slopes;
  Tensor<T> relative(1, 1, c.num_heads_q * (2 * kReach + 1), 1), drelative = relative;
  q.fill(inputs[0]), k.fill(inputs[1]), v.fill(inputs[2]), dout.fill(inputs[3]), dlse.fill(inputs[4]);
  bias.fill(inputs[5]), slopes.fill(inputs[6]), sinks.fill(inputs[7]), relative.fill(inputs[8]);
  std::vector<uint8_t> shown;
  for (double x : inputs[5]) shown.push_back(x > -1);
  const std::vector<int64_t> key_ranges = ranges(c);
  const int64_t seed = 0x0123456789ABCDEF;
  BackwardParams p{};
  p.q = q.view(), p.k = k.view(), p.v = v.view(), p.out = out.view(), p.dout = dout.view();
  p.dq = dq.view(), p.dk = dk.view(), p.dv = dv.view();
  p.row_max = row_max.data.data(), p.row_sum = row_sum.data.data(), p.lse = lse.data.data();
  p.dlse = dlse.data.data();
  p.batch = c.batch, p.num_heads_q = c.num_heads_q, p.num_heads_kv = c.num_heads_kv;
  p.seqlen_q = c.seqlen_q, p.seqlen_k = c.seqlen_k, p.head_dim = c.head_dim, p.head_dim_v = c.head_dim_v;
  p.cpu.pairs = static_cast<double>(c.batch * c.seqlen_q * c.seqlen_k);
  p.softmax_scale = 1 / std::sqrt(static_cast<double>(c.head_dim));
  p.mask.causal = c.causal, p.mask.q_offset = c.q_offset;
  p.mask.window_left = options.window_left, p.mask.window_right = options.window_right;
  if (options.key_ranges) p.mask.key_ranges = key_ranges.data();
  p.score.softcap = options.softcap;
  if (options.mask) p.mask.shown = {shown.data(), 0, c.seqlen_k, c.num_heads_q * c.seqlen_k, 1};
  if (options.bias != BiasType::kNone) {
    p.score.bias = {{bias.data.data(), 0, c.seqlen_k, c.num_heads_q * c.seqlen_k, 1}, options.bias};
    p.dbias = p.score.bias, p.dbias.data = dbias.data.data();
  }
  if (options.alibi) p.score.alibi_slopes = slopes.data.data(), p.dslopes = dslopes.data.data();
  if (options.sinks) p.score.sinks = sinks.data.data(), p.dsinks = dsinks.data.data();
  if (options.relative) {
    p.score.relative_bias = relative.data.data(), p.score.reach = kReach;
    p.score.relative_stride_h = 2 * kReach + 1, p.drelative = drelative.data.data();
  }
  p.dropout.threshold = static_cast<uint32_t>(std::nearbyint(65536 * c.dropout_p)), p.dropout.seed = &seed;

  const Kernels& table = kernels(dtype<S>, is_plain(p));
  const std::vector<RowKeys> mask_rows = make_array(table.mask_rows, p, p.mask.mask_rows);
  const std::vector<RowKeys> bias_rows = make_array(table.bias_rows, p, p.mask.bias_rows);
  const std::vector<BlockKeys> blocks = make_array(table.mask_blocks, p, p.mask.blocks);
  run<ForwardParams>(table.forward, p, table.merge_out);
  run(table.backward, p, table.reduce, table.bias_gradient, table.head_gradients, table.relative_gradient);
  return {out.values(),   lse.values(),     dq.values(),     dk.values(),       dv.values(),
          dbias.values(), dslopes.values(), dsinks.values(), drelative.values()};
}

std::mt19937 generator(0);

template <class S>
Values normal(int64_t n) {
  std::normal_distribution<double> distribution;
  Values x(n);
  for (double& y : x) y = widen(narrow<S>(distribution(generator)));
  return x;
}

// The largest error of a result, in roundings of its largest value; infinities and NaN must agree.
double error(const Values& x, const Values& exact, double epsilon) {
  double worst = 0, largest = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    if (!std::isfinite(exact[i])) {
      if (x[i] != exact[i]) return std::numeric_limits<double>::infinity();
    } else if (const double e = std::abs(x[i] - exact[i]); e > worst || std::isnan(e)) {
      worst = e;
    }
    if (std::isfinite(exact[i])) largest = std::max(largest, std::abs(exact[i]));
  }
  return largest ? worst / largest / epsilon : worst;
}

template <class S>
bool check(const char* name, double epsilon, double allowed) {
  double worst[std::size(kNames)] = {};
  for (const Case& c : kCases) {
    const int64_t queries = c.batch * c.num_heads_q * c.seqlen_q, keys = c.batch * c.num_heads_kv * c.seqlen_k;
    Inputs inputs{normal<S>(queries * c.head_dim),
                  normal<S>(keys * c.head_dim),
                  normal<S>(keys * c.head_dim_v),
                  normal<S>(queries * c.head_dim_v),
                  normal<float>(queries),
                  normal<S>(c.num_heads_q * c.seqlen_q * c.seqlen_k),
                  normal<float>(c.num_heads_q),
                  normal<float>(c.num_heads_q),
                  normal<S>(c.num_heads_q * (2 * kReach + 1))};
    for (double& slope : inputs[6]) slope /= 32;  // as in models
    const std::string isa = active_isa();
    set_isa("scalar");
    const auto exact = results<double>(c, inputs);
    set_isa(isa);
    const auto ours = results<S>(c, inputs);
    for (size_t i = 0; i < std::size(kNames); ++i) {
      const double rounding = i == 1 ? std::min(epsilon, 0x1p-23) : epsilon;  // lse is float at least
      worst[i] = std::fmax(worst[i], error(ours[i], exact[i], rounding));
    }
  }
  bool good = true;
  std::printf("%-12s %-9s", active_isa().c_str(), name);
  for (size_t i = 0; i < std::size(kNames); ++i) {
    std::printf("  %s %5.2f", kNames[i], worst[i]);
    good = good && worst[i] <= (i > 5 ? 4 : 1) * allowed;  // terms of dslopes and dsinks cancel
  }
  std::printf("  %s\n", good ? "ok" : "WRONG");
  return good;
}

}  // namespace

int main() {
  std::printf("errors in roundings of the largest value\n");
  bool good = true;
  for (const std::string& isa : available_isas()) {
    set_isa(isa);
    // Twice what the instruction sets of x86 need. 16-bit types sum in
    // float, so only the rounding of the result counts.
    good &= check<double>("float64", 0x1p-52, 16);
    good &= check<float>("float32", 0x1p-23, 16);
    good &= check<bf16>("bfloat16", 0x1p-7, 1.5);
    good &= check<f16>("float16", 0x1p-10, 1.5);
  }
  return good ? 0 : 1;
}
