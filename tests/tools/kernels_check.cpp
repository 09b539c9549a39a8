// Runs the kernels of every instruction set that this machine has, without torch, and
// compares them with the scalar ones in float64, which the Python suite proves. For
// machines that have no PyTorch, emulated ones above all:
//
//   c++ -std=c++20 -O2 -Icsrc tests/tools/kernels_check.cpp csrc/cpu/dispatch.cpp <objects of kernels.cpp and kernels_general.cpp> -o kernels_check
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "attention.h"
#include "cpu/dispatch.h"

namespace {

using namespace pyattn;
using Values = std::vector<double>;

struct Case {
  int64_t batch, num_heads_q, num_heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v;
  bool causal;
  int64_t q_offset;
  double dropout_p;
};

constexpr Case kCases[] = {
    {1, 1, 1, 1, 1, 1, 1, true, 0, 0},           {2, 2, 2, 6, 6, 3, 3, true, 0, 0},
    {1, 4, 2, 65, 63, 40, 24, true, -2, 0},      {2, 2, 1, 130, 130, 64, 64, true, 0, 0},
    {1, 3, 3, 70, 200, 33, 17, true, 60, 0.1},   {1, 2, 2, 100, 290, 16, 32, false, 0, 0.4},
    {1, 9, 9, 33, 100, 24, 24, true, 67, 0},     {1, 8, 2, 1, 2500, 64, 128, true, 2499, 0},
    {2, 3, 3, 2, 1300, 32, 48, true, 1020, 0},   {1, 7, 1, 1, 300, 96, 16, false, 0, 0},
    {1, 2, 1, 1100, 150, 20, 24, true, -950, 0}, {1, 1, 1, 100, 30, 16, 16, true, -40, 0},
};

// Conversions by the definition of the formats, rounding to nearest even.
double widen(double x) { return x; }
double widen(float x) { return x; }
double widen(bf16 x) {
  const uint32_t bits = uint32_t{x.bits} << 16;
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}
double widen(f16 x) {
  const int exponent = x.bits >> 10 & 31, mantissa = x.bits & 1023;
  const double magnitude = exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24);
  return x.bits >> 15 ? -magnitude : magnitude;
}

template <class S>
S narrow(double x) {
  if constexpr (std::is_floating_point_v<S>) {
    return static_cast<S>(x);
  } else if constexpr (std::is_same_v<S, bf16>) {
    const float rounded =
        static_cast<float>(std::ldexp(std::nearbyint(std::ldexp(x, 7 - std::ilogb(x))), std::ilogb(x) - 7));
    uint32_t bits;
    std::memcpy(&bits, &rounded, sizeof bits);
    return {static_cast<uint16_t>(bits >> 16)};
  } else {
    const int exponent = std::max(std::ilogb(x), -14), sign = std::signbit(x) << 15;
    const int mantissa = static_cast<int>(std::nearbyint(std::ldexp(std::abs(x), 10 - exponent)));
    return {static_cast<uint16_t>(sign + ((exponent + 14) << 10) + mantissa)};
  }
}

template <class S>
constexpr DType dtype = std::is_same_v<S, double>  ? DType::kFloat64
                        : std::is_same_v<S, float> ? DType::kFloat32
                        : std::is_same_v<S, bf16>  ? DType::kBFloat16
                                                   : DType::kFloat16;

// A tensor of (batch, heads, positions, columns), the positions before the heads in memory.
template <class S>
struct Tensor {
  int64_t heads, positions, cols;
  std::vector<S> data;

  Tensor(int64_t batch, int64_t heads, int64_t positions, int64_t cols)
      : heads(heads), positions(positions), cols(cols), data(batch * heads * positions * cols) {}
  View view() { return {data.data(), positions * heads * cols, cols, heads * cols}; }
  void fill(const Values& from) {
    for (size_t i = 0; i < data.size(); ++i) data[i] = narrow<S>(from[i]);
  }
  Values values() const {
    Values x;
    for (const S& y : data) x.push_back(widen(y));
    return x;
  }
};

template <class Params>
void run(const Pass<Params>& pass, const Pass<Params>& join, Params& p) {
  const Plan plan = pass.plan(p);
  std::vector<char> workspace(plan.workspace_bytes), scratch(plan.scratch_bytes + kScratchAlign);
  auto address = reinterpret_cast<uintptr_t>(scratch.data());
  void* aligned = reinterpret_cast<void*>((address + kScratchAlign - 1) / kScratchAlign * kScratchAlign);
  p.workspace = workspace.data();
  pass.run(p, 0, plan.items, aligned);
  join.run(p, 0, join.plan(p).items, nullptr);
}

constexpr const char* kNames[] = {"out", "lse", "dq", "dk", "dv"};

// q, k, v, dout and dlse to out, lse, dq, dk, dv.
template <class S>
std::array<Values, 5> results(const Case& c, const std::array<Values, 5>& inputs) {
  using T = std::conditional_t<std::is_same_v<S, double>, double, float>;
  Tensor<S> q(c.batch, c.num_heads_q, c.seqlen_q, c.head_dim), k(c.batch, c.num_heads_kv, c.seqlen_k, c.head_dim),
      v(c.batch, c.num_heads_kv, c.seqlen_k, c.head_dim_v), out(c.batch, c.num_heads_q, c.seqlen_q, c.head_dim_v),
      dout = out, dq = q, dk = k, dv = v;
  Tensor<T> lse(c.batch, c.num_heads_q, c.seqlen_q, 1), row_max = lse, row_sum = lse, dlse = lse;
  q.fill(inputs[0]), k.fill(inputs[1]), v.fill(inputs[2]), dout.fill(inputs[3]), dlse.fill(inputs[4]);
  const int64_t seed = 0x0123456789ABCDEF;
  BackwardParams p{};
  p.q = q.view(), p.k = k.view(), p.v = v.view(), p.out = out.view(), p.dout = dout.view();
  p.dq = dq.view(), p.dk = dk.view(), p.dv = dv.view();
  p.row_max = row_max.data.data(), p.row_sum = row_sum.data.data(), p.lse = lse.data.data();
  p.dlse = dlse.data.data();
  p.batch = c.batch, p.num_heads_q = c.num_heads_q, p.num_heads_kv = c.num_heads_kv;
  p.seqlen_q = c.seqlen_q, p.seqlen_k = c.seqlen_k, p.head_dim = c.head_dim, p.head_dim_v = c.head_dim_v;
  p.softmax_scale = 1 / std::sqrt(static_cast<double>(c.head_dim));
  p.mask = {c.causal, c.q_offset, nullptr};
  p.dropout = {static_cast<uint32_t>(std::nearbyint(65536 * c.dropout_p)), &seed};
  const Kernels& table = kernels(dtype<S>, p.score);
  run<ForwardParams>(table.forward, table.merge_out, p);
  run(table.backward, table.reduce_dq, p);
  return {out.values(), lse.values(), dq.values(), dk.values(), dv.values()};
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
  double worst[5] = {};
  for (const Case& c : kCases) {
    const int64_t queries = c.batch * c.num_heads_q * c.seqlen_q, keys = c.batch * c.num_heads_kv * c.seqlen_k;
    const std::array<Values, 5> inputs{normal<S>(queries * c.head_dim), normal<S>(keys * c.head_dim),
                                       normal<S>(keys * c.head_dim_v), normal<S>(queries * c.head_dim_v),
                                       normal<float>(queries)};
    const std::string isa = active_isa();
    set_isa("scalar");
    const auto exact = results<double>(c, inputs);
    set_isa(isa);
    const auto ours = results<S>(c, inputs);
    for (int i = 0; i < 5; ++i) {
      const double rounding = i == 1 ? std::min(epsilon, 0x1p-23) : epsilon;  // lse is float at least
      worst[i] = std::fmax(worst[i], error(ours[i], exact[i], rounding));
    }
  }
  bool good = true;
  std::printf("%-12s %-9s", active_isa().c_str(), name);
  for (int i = 0; i < 5; ++i) {
    std::printf("  %s %5.2f", kNames[i], worst[i]);
    good = good && worst[i] <= allowed;
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
    // Twice what the instruction sets of x86 need: in 16 bits,
    // where sums are float, the rounding of the result is all.
    good &= check<double>("float64", 0x1p-52, 16);
    good &= check<float>("float32", 0x1p-23, 16);
    good &= check<bf16>("bfloat16", 0x1p-7, 1.5);
    good &= check<f16>("float16", 0x1p-10, 1.5);
  }
  return good ? 0 : 1;
}
