// Autograd: attention as one differentiable operator over its operators forward and backward. Only first derivatives
// outside of transforms and compiled graphs run here; all others are the Functions of pyattn/derivatives.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/forward_grad.h>

#include <atomic>
#include <cstring>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "ops/calls.h"
#include "ops/operators.h"
#include "ops/options.h"
#include "ops/results.h"

namespace pyattn {

using Tensors = torch::autograd::variable_list;

// Whether backward on CUDA gives the same bits from run to run; read when a backward runs.
inline std::atomic<bool> is_deterministic{true};

// The arguments of a call as its graph node keeps them: tensors as saved variables, so hooks see them and changes in
// place raise, everything else as scalars. Added and read in one order.
class SavedArguments {
 public:
  SavedArguments(Tensors tensors, std::vector<c10::IValue> scalars = {})
      : tensors(std::move(tensors)), scalars(std::move(scalars)) {}
  Tensors tensors;
  std::vector<c10::IValue> scalars;

  template <class Struct>
  void add(const Struct& fields) {
    std::apply([this](const auto&... x) { (this->add_one(x), ...); }, fields.passed());
  }

  Tensor next() { return tensors[tensor_++]; }

  // The struct's list lives as long as this object.
  template <class Struct>
  Struct read() {
    return read_fields<Struct>(std::type_identity<typename Struct::Fields>());
  }

 private:
  void add_one(const Tensor& t) { tensors.push_back(t); }
  void add_one(const optional<Tensor>& t) {
    scalars.emplace_back(t.has_value());
    if (t) tensors.push_back(*t);
  }
  void add_one(c10::SymIntArrayRef list) {
    scalars.emplace_back(static_cast<int64_t>(list.size()));
    scalars.insert(scalars.end(), list.begin(), list.end());
  }
  template <class T>
  void add_one(const T& scalar) {
    scalars.emplace_back(scalar);
  }

  template <class Struct, class... Types>
  Struct read_fields(std::type_identity<std::tuple<Types...>>) {
    return Struct{read_one(std::type_identity<std::remove_cvref_t<Types>>())...};  // braces: from left to right
  }
  Tensor read_one(std::type_identity<Tensor>) { return next(); }
  optional<Tensor> read_one(std::type_identity<optional<Tensor>>) {
    return scalars[scalar_++].toBool() ? optional(next()) : std::nullopt;
  }
  c10::SymIntArrayRef read_one(std::type_identity<c10::SymIntArrayRef>) {
    list_.resize(scalars[scalar_++].toInt());
    for (SymInt& n : list_) n = scalars[scalar_++].toSymInt();
    return list_;
  }
  template <class T>
  T read_one(std::type_identity<T>) {
    return scalars[scalar_++].to<T>();
  }

  size_t tensor_ = 0, scalar_ = 0;
  std::vector<SymInt> list_;
};

// Whether a backward that runs now may itself be differentiated or mapped.
inline bool is_recorded() {
  return at::GradMode::is_enabled() ||
         c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
         torch::autograd::ForwardADLevel::try_get_by_idx(0);
}

// Whether derivatives follow t, in the two modes.
inline bool has_gradient(const Tensor& t) { return t.requires_grad(); }
inline bool has_tangent(const Tensor& t) { return t.defined() && t._fw_grad(0).defined(); }

// The graph node of one kind of attention, a class derived from this one with its operators' common name, kName.
// Structs are the arguments after q, k and v, the options last.
template <class Kind, auto forward_function, auto backward_function,
          class Forward = std::remove_const_t<decltype(forward_function)>>
struct AttentionNode;
template <class Kind, auto forward_function, auto backward_function, class... Structs>
struct AttentionNode<Kind, forward_function, backward_function,
                     ForwardTensors (*)(const Tensor&, const Tensor&, const Tensor&, const Structs&...)>
    : torch::autograd::Function<Kind> {
  using Context = torch::autograd::AutogradContext;

  // (out, lse, row_max, row_sum); out and lse are differentiable in q, k, v and the options of LEARNED.
  static ForwardTensors attend(const Tensor& q, const Tensor& k, const Tensor& v, const Structs&... structs) {
    const Options& options = std::get<sizeof...(Structs) - 1>(std::tie(structs...));
    const auto any = [&](auto holds) {
      const auto given = [&](const optional<Tensor>& t) { return t && holds(*t); };
      return holds(q) || holds(k) || holds(v) || given(options.bias) || given(options.alibi_slopes) ||
             given(options.sinks) || given(options.relative_bias);
    };
    if (any(has_tangent)) return run_forward(q, k, v, structs...);  // which raises
    ForwardTensors results;
    if (at::GradMode::is_enabled() && any(has_gradient)) {
      const Tensors outputs = Kind::apply(q, k, v, options.bias, options.alibi_slopes, options.sinks,
                                          options.relative_bias, &results, std::tie(structs...));
      std::get<0>(results) = outputs[0], std::get<1>(results) = outputs[1];
    } else {
      const at::AutoDispatchBelowADInplaceOrView no_derivatives;
      results = run_forward(q, k, v, structs...);
    }
    return results;
  }

  // Tensors with gradients are arguments, where autograd looks for them. Row statistics are no outputs of the node:
  // they have no gradient.
  static Tensors forward(Context* context, const Tensor& q, const Tensor& k, const Tensor& v, const optional<Tensor>&,
                         const optional<Tensor>&, const optional<Tensor>&, const optional<Tensor>&,
                         ForwardTensors* results, const std::tuple<const Structs&...>& structs) {
    const at::AutoDispatchBelowADInplaceOrView no_derivatives;
    const bool row_invariant = is_row_invariant;
    std::apply([&](const Structs&... all) { *results = run_forward(q, k, v, all...); }, structs);
    const auto& [out, lse, row_max, row_sum] = *results;
    SavedArguments saved({q, k, v, out, row_max, row_sum});
    std::apply([&](const Structs&... all) { (saved.add(all), ...); }, structs);
    context->saved_data["row_invariant"] = row_invariant;
    context->saved_data["scalars"] = c10::ivalue::Tuple::create(std::move(saved.scalars));
    context->save_for_backward(std::move(saved.tensors));
    context->set_materialize_grads(false);
    return {out, lse};
  }

  static Tensors backward(Context* context, const Tensors& gradients) {
    constexpr size_t kLearned = std::tuple_size_v<Wanted>, kOthers = 2;  // results and structs
    Tensors found(3 + kLearned + kOthers);
    if (!gradients[0].defined() && !gradients[1].defined()) return found;
    SavedArguments saved(context->get_saved_variables(), context->saved_data["scalars"].toTupleRef().elements().vec());
    const Tensor q = saved.next(), k = saved.next(), v = saved.next(), out = saved.next(), row_max = saved.next(),
                 row_sum = saved.next();
    const std::tuple<Structs...> structs{saved.read<Structs>()...};
    const Options& options = std::get<Options>(structs);
    const Tensor dout = gradients[0].defined() ? gradients[0] : at::zeros_like(out);
    const Saved rows{gradients[1].defined() ? optional(gradients[1]) : std::nullopt, q, k, v, out, row_max, row_sum};
    Flags flags{is_deterministic, {}, false, context->saved_data["row_invariant"].toBool()};
    size_t edge = 3;
    const bool given[kLearned] = {options.bias.has_value(), options.alibi_slopes.has_value(), options.sinks.has_value(),
                                  options.relative_bias.has_value()};
    for (size_t i = 0; i < kLearned; ++i) flags.output_mask[i] = given[i] && context->needs_input_grad(edge++);
    const auto run = [&](const Structs&... all) { return run_backward(dout, rows, all..., flags); };
    BackwardTensors results = std::apply(run, structs);
    std::apply([&](auto&... t) { found = {std::move(t)...}; }, results);
    found.resize(3 + kLearned + kOthers);
    return found;
  }

 private:
  static ForwardTensors run_forward(const Tensor& q, const Tensor& k, const Tensor& v, const Structs&... structs) {
    static const Dispatched<forward_function> op(Kind::kName + std::string("_forward"));
    return op(q, k, v, structs...);
  }

  static BackwardTensors run_backward(const Tensor& dout, const Saved& saved, const Structs&... structs,
                                      const Flags& flags) {
    static const std::string name = Kind::kName;
    static const Dispatched<backward_function> op(name + "_backward"), recorded(name + "_recorded_backward");
    if (is_recorded()) return recorded(dout, saved, structs..., flags);
    const at::AutoDispatchBelowADInplaceOrView no_derivatives;
    return op(dout, saved, structs..., flags);
  }
};

// Defines a differentiable operator, such as attend of a kind, for all backends: the operators that it calls run the
// checks.
template <auto attend>
void define_differentiable(torch::Library& m, const char* schema) {
  using Key = c10::DispatchKey;
  const std::string name(schema, std::strcspn(schema, "("));
  m.def(schema);
  for (const Key key : {Key::CompositeImplicitAutograd, Key::CompositeImplicitAutogradNestedTensor})
    m.impl(name.c_str(), torch::dispatch(key, TORCH_FN(Adapter<attend>::call)));
}

}  // namespace pyattn
