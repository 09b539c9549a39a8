// torch's scaled_dot_product_attention on the CPU by the native kernels, while a switch is on: plain calls at once, all
// others by the rules of pyattn/adapters/sdpa, which that package registers for pyattn::sdpa_by_rules.
#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/library.h>

#include <atomic>
#include <cmath>
#include <exception>
#include <memory>
#include <type_traits>

#include "ops/operators.h"
#include "ops/options.h"
#include "ops/results.h"

namespace pyattn {
namespace {

using Key = c10::DispatchKey;

// Calls that were computed at once, and how many contexts forbid that, since they look at every call.
std::atomic<int64_t> calls_at_once{0}, forbidden{0};

// Whether the dispatcher knows t as nothing but a dense tensor on the CPU: no subclass, no wrapper, no lazy negation.
bool is_plain(const Tensor& t) {
  constexpr c10::DispatchKeySet plain =
      c10::DispatchKeySet({Key::CPU, Key::ADInplaceOrView, Key::AutogradCPU, Key::AutocastCPU});
  return t.defined() && (t.key_set() | plain) == plain && t.dim() == 4;
}

// Whether nothing sees operators but autograd, the profiler and autocast: no transform, mode, tracer or tangent.
bool is_unobserved() {
  constexpr c10::DispatchKeySet usual =
      c10::default_included_set | c10::DispatchKeySet({Key::AutocastCPU, Key::AutocastCUDA});
  const c10::DispatchKeySet included = c10::impl::tls_local_dispatch_key_set().included_;
  return (included | usual) == usual && !torch::autograd::ForwardADLevel::try_get_by_idx(0);
}

bool fits(const Tensor& q, const Tensor& k, const Tensor& v, bool enable_gqa) {
  const auto type = q.scalar_type();
  const bool supported = type == at::kFloat || type == at::kDouble || type == at::kBFloat16 || type == at::kHalf;
  const int64_t heads_q = q.size(1), heads = k.size(1);
  return supported && k.scalar_type() == type && v.scalar_type() == type && q.numel() > 0 && k.numel() > 0 &&
         k.size(0) == q.size(0) && v.size(0) == q.size(0) && v.size(1) == heads && k.size(2) == v.size(2) &&
         q.size(3) == k.size(3) && (heads_q == heads || (enable_gqa && heads_q % heads == 0));
}

// Whether attention computes such a call without a rule or an error of the adapter. It refuses some other scales.
bool is_usual(const optional<Tensor>& attn_mask, double dropout_p, optional<double> scale) {
  const double factor = std::abs(scale.value_or(1));
  return !attn_mask && dropout_p == 0 && 0x1p-100 < factor && factor < 0x1p100;
}

Tensor by_rules(const Tensor& query, const Tensor& key, const Tensor& value, const optional<Tensor>& attn_mask,
                double dropout_p, bool is_causal, optional<double> scale, bool enable_gqa) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("pyattn::sdpa_by_rules", "")
                             .typed<std::remove_pointer_t<decltype(&by_rules)>>();
  return op.call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa);
}

// The kernel of the operator, and below it the one for calls without a graph: in inference mode or inside an outer
// operator.
Tensor attend(const Tensor& query, const Tensor& key, const Tensor& value, const optional<Tensor>& attn_mask,
              double dropout_p, bool is_causal, optional<double> scale, bool enable_gqa) {
  const bool plain = is_plain(query) && is_plain(key) && is_plain(value) && fits(query, key, value, enable_gqa);
  if (!plain || forbidden || !is_unobserved() || !is_usual(attn_mask, dropout_p, scale) ||
      !at::globalContext().userEnabledFlashSDP())
    return by_rules(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa);
  using Attention = ForwardTensors(const Tensor&, const Tensor&, const Tensor&, const Options&);
  static const Dispatched<static_cast<Attention*>(nullptr)> attention("pyattn::attention");
  const bool upper_left = is_causal && query.size(2) != key.size(2);
  const Options options = few_options(scale, is_causal, upper_left ? optional<SymInt>(0) : std::nullopt);
  try {
    Tensor out = std::get<0>(attention(query, key, value, options));
    ++calls_at_once;
    return out;
  } catch (const std::exception&) {  // such as an instruction set that this CPU lacks: the rules say what follows
    return by_rules(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa);
  }
}

Tensor attend_without_graph(const Tensor& query, const Tensor& key, const Tensor& value,
                            const optional<Tensor>& attn_mask, double dropout_p, bool is_causal, optional<double> scale,
                            bool enable_gqa) {
  const at::NoGradGuard no_graph;
  return attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa);
}

// Replaces torch's kernels, or restores them. Python holds a lock meanwhile.
void sdpa_switch(bool on) {
  static std::unique_ptr<torch::Library>& kernels = *new std::unique_ptr<torch::Library>;  // outlives the dispatcher
  kernels.reset();
  if (!on) return;
  kernels = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", std::nullopt, __FILE__, __LINE__);
  kernels->impl("scaled_dot_product_attention", torch::dispatch(Key::AutogradCPU, TORCH_FN(attend)));
  kernels->impl("scaled_dot_product_attention", torch::dispatch(Key::CPU, TORCH_FN(attend_without_graph)));
}

TORCH_LIBRARY_FRAGMENT(pyattn, m) {
  m.def(
      "sdpa_by_rules(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, float dropout_p, bool is_causal, *, "
      "float? scale, bool enable_gqa) -> Tensor");
  m.def("sdpa_switch(bool on) -> ()", sdpa_switch);
  m.def("sdpa_forbid(int more) -> ()", [](int64_t more) { forbidden += more; });
  m.def("sdpa_calls() -> int", [] { return calls_at_once.load(); });
}

}  // namespace
}  // namespace pyattn
