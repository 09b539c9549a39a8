// Operators: registers functions that take structs of arguments. One list generates each struct and its schema.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <initializer_list>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "ops/checks.h"

namespace pyattn {

// A list is a macro with one line X(type, name, "schema type", "=schema default") per argument. It generates
//   struct Options { PYATTN_FIELDS(Options, PYATTN_OPTIONS) };  // the fields; passed(): all as they are passed, a Fields
//   "(Tensor q" PYATTN_SCHEMA(PYATTN_OPTIONS) ")"               // the arguments in a schema, after others
#define PYATTN_FIELDS(name, list)                                                     \
  list(PYATTN_FIELD) using Fields = pyattn::FieldTypes<name list(PYATTN_FIELD_TYPE)>; \
  Fields passed() const { return std::tuple_cat(list(PYATTN_FIELD_PASSED) std::tuple<>()); }
#define PYATTN_FIELD(type, name, schema_type, value) type name;
#define PYATTN_FIELD_TYPE(type, name, schema_type, value) , type
#define PYATTN_FIELD_PASSED(type, name, schema_type, value) std::tuple<pyattn::PassedAs<type>>(name),
#define PYATTN_SCHEMA(list) list(PYATTN_SCHEMA_ARGUMENT)
#define PYATTN_SCHEMA_ARGUMENT(type, name, schema_type, value) ", " schema_type " " #name value

// Tensors are passed by reference: moving an optional one through every layer of the dispatcher costs time.
template <class T>
using PassedAs = std::conditional_t<std::is_same_v<T, Tensor> || std::is_same_v<T, optional<Tensor>>, const T&, T>;

template <class Struct, class... Types>
using FieldTypes = std::tuple<PassedAs<Types>...>;

// A struct generated from a list.
template <class P>
concept Listed = requires { typename std::remove_cvref_t<P>::Fields; };

// The operator's arguments for one parameter of f: the parameter itself, or the fields of its struct.
template <class P>
struct Passed {
  using Types = std::tuple<P>;
};
template <Listed P>
struct Passed<P> {
  using Types = typename std::remove_cvref_t<P>::Fields;
};

template <class Function>
struct Flat;
template <class Result, class... Parameters>
struct Flat<Result (*)(Parameters...)> {
  using Arguments = decltype(std::tuple_cat(std::declval<typename Passed<Parameters>::Types>()...));
};

// Adapter<f>::call takes the flat arguments that the dispatcher passes, and calls f with structs of them.
template <auto f, class Function = decltype(f), class Arguments = typename Flat<Function>::Arguments>
struct Adapter;
template <auto f, class Result, class... Parameters, class... Arguments>
struct Adapter<f, Result (*)(Parameters...), std::tuple<Arguments...>> {
  static Result call(Arguments... arguments) {
    return with(std::forward_as_tuple(std::forward<Arguments>(arguments)...), std::index_sequence_for<Parameters...>());
  }

 private:
  template <class P>
  static constexpr size_t kCount = std::tuple_size_v<typename Passed<P>::Types>;

  // The index of each parameter's first argument.
  static constexpr auto kFirst = [] {
    std::array<size_t, sizeof...(Parameters)> first{};
    size_t i = 0, index = 0;
    ((first[i++] = index, index += kCount<Parameters>), ...);
    return first;
  }();

  template <size_t... i>
  static Result with(std::tuple<Arguments&&...> all, std::index_sequence<i...>) {
    return f(parameter<Parameters, kFirst[i]>(all, std::make_index_sequence<kCount<Parameters>>())...);
  }

  template <class P, size_t first, size_t... i>
  static decltype(auto) parameter(std::tuple<Arguments&&...>& all, std::index_sequence<i...>) {
    if constexpr (Listed<P>)
      return std::remove_cvref_t<P>{std::get<first + i>(std::move(all))...};
    else
      return std::get<first>(std::move(all));
  }
};

// Calls the operator of this name, which f computes, through the dispatcher with f's arguments.
template <auto f, class Function = std::remove_const_t<decltype(f)>,
          class Arguments = typename Flat<Function>::Arguments>
class Dispatched;
template <auto f, class Result, class... Parameters, class... Arguments>
class Dispatched<f, Result (*)(Parameters...), std::tuple<Arguments...>> {
 public:
  explicit Dispatched(const std::string& name)
      : op_(c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "").typed<Result(Arguments...)>()) {}

  Result operator()(const std::remove_cvref_t<Parameters>&... parameters) const {
    return std::apply([this](auto&&... x) { return op_.call(x...); }, std::tuple_cat(flat(parameters)...));
  }

 private:
  template <class P>
  static auto flat(const P& parameter) {
    if constexpr (Listed<P>)
      return parameter.passed();
    else
      return std::tuple<const P&>(parameter);
  }

  c10::TypedOperatorHandle<Result(Arguments...)> op_;
};

// The kernel of every backend without kernels (sparse, nested and quantized tensors, other devices):
// an error that names the tensor.
inline void refuse(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto values = torch::jit::last(*stack, arguments.size());
  for (size_t i = 0; i < values.size(); ++i) {
    if (!values[i].isTensor()) continue;
    const Tensor& t = values[i].toTensor();
    TORCH_CHECK_TYPE(t.defined(), "pyattn: ", arguments[i].name(), " must be a Tensor, got None");
    const bool plain = t.layout() == at::kStrided && !t.is_nested() && !t.is_quantized();
    TORCH_CHECK_NOT_IMPLEMENTED(plain && (t.is_cpu() || t.is_cuda() || t.is_meta()), "pyattn: ", arguments[i].name(),
                                " must be a dense tensor on the CPU or a CUDA device, got layout ", t.layout(),
                                t.is_nested() ? " (nested)" : "", ", dtype ", name_of(t.scalar_type()), ", device ",
                                t.device());
  }
  TORCH_CHECK_NOT_IMPLEMENTED(false, "pyattn: ", op.schema().name(), " has no kernels for tensors of this kind");
}

// One function serves all backends of an operator; for Meta it stops before it reads their contents.
using Backends = std::initializer_list<c10::DispatchKey>;
inline constexpr Backends kOnCPU = {c10::DispatchKey::CPU, c10::DispatchKey::Meta};
inline constexpr Backends kOnCPUAndCUDA = {c10::DispatchKey::CPU, c10::DispatchKey::CUDA, c10::DispatchKey::Meta};

// Defines an operator that f computes on these backends; backends that no file registers refuse it.
// CompositeExplicitAutograd does not cover nested tensors. Returns its name.
template <auto f>
std::string define(torch::Library& m, Backends backends, const char* schema) {
  using Key = c10::DispatchKey;
  constexpr auto* call = Adapter<f>::call;
  std::string name(schema, std::strcspn(schema, "("));
  m.def(schema);
  for (const Key key : backends) m.impl(name.c_str(), torch::dispatch(key, TORCH_FN(call)));
  for (const Key key : {Key::CompositeExplicitAutograd, Key::NestedTensorCPU, Key::NestedTensorCUDA})
    if (std::find(backends.begin(), backends.end(), key) == backends.end())
      m.impl(name.c_str(), torch::dispatch(key, torch::CppFunction::makeFromBoxedFunction<&refuse>()));
  return name;
}

// The same for a cache operator, which has a separate function for GPUs.
template <auto on_cpu, auto on_gpu>
void define_cache(torch::Library& m, const char* schema) {
  const std::string name = define<on_cpu>(m, kOnCPU, schema);
  m.impl(name.c_str(), torch::dispatch(c10::DispatchKey::CUDA, TORCH_FN(on_gpu)));
}

// The same for an attention operator. Its derivatives are in pyattn/derivatives; differentiating the raw operator
// raises, because without the fallback double backward and forward mode would silently be zero.
template <auto f>
void define_attention(torch::Library& m, Backends backends, const char* schema) {
  const std::string name = define<f>(m, backends, schema);
  m.impl(name.c_str(), torch::dispatch(c10::DispatchKey::Autograd, torch::autograd::autogradNotImplementedFallback()));
}

}  // namespace pyattn
