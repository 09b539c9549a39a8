// Checks of single tensors. An error is one sentence with the values in it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstdlib>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

#include "attention.h"

namespace pyattn {

using at::Tensor;
using c10::SymInt;
using std::optional;

inline DType dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kDouble: return DType::kFloat64;
    case at::kFloat: return DType::kFloat32;
    case at::kBFloat16: return DType::kBFloat16;
    case at::kHalf: return DType::kFloat16;
    default:
      TORCH_CHECK_TYPE(false, "pyattn: dtype must be float64, float32, bfloat16 or float16, got ",
                       c10::getDtypeNames(type).first);
  }
}

// dtype of lse, row_max and row_sum.
inline at::ScalarType row_dtype(at::ScalarType type) { return type == at::kDouble ? at::kDouble : at::kFloat; }

// TypeError unless t has one of the types.
inline void check_type(const char* name, const Tensor& t, std::initializer_list<at::ScalarType> types) {
  if (std::find(types.begin(), types.end(), t.scalar_type()) != types.end()) return;
  std::string names;
  for (const at::ScalarType type : types) {
    const std::string word(c10::getDtypeNames(type).first);
    if (names.find(word) == std::string::npos) names += (names.empty() ? "" : " or ") + word;
  }
  TORCH_CHECK_TYPE(false, "pyattn: ", name, " must have dtype ", names, ", got ",
                   c10::getDtypeNames(t.scalar_type()).first);
}

inline void check_device(const char* name, const Tensor& t, at::Device device) {
  TORCH_CHECK_VALUE(t.device() == device, "pyattn: ", name, " must be on q's device, got ", t.device(), " and ",
                    device);
}

inline void check_tensor(const char* name, const Tensor& t, at::Device device, at::ScalarType type,
                         c10::SymIntArrayRef sizes) {
  TORCH_CHECK_TYPE(t.defined(), "pyattn: ", name, " must be a Tensor, got None");
  check_type(name, t, {type});
  check_device(name, t, device);
  TORCH_CHECK_VALUE(t.sym_sizes() == sizes, "pyattn: ", name, " must have shape ", sizes, ", got ", t.sym_sizes());
}

// Whether the contents of indices on a GPU are read and checked like those on a CPU, which waits for the GPU:
// the environment variable PYATTN_CHECK is 1.
inline bool checks_gpu() {
  static const char* const value = std::getenv("PYATTN_CHECK");
  return value && std::string_view(value) == "1";
}

}  // namespace pyattn
