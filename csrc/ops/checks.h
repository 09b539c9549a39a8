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

inline std::string name_of(at::ScalarType type) { return std::string(c10::getDtypeNames(type).first); }

inline DType dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kDouble: return DType::kFloat64;
    case at::kFloat: return DType::kFloat32;
    case at::kBFloat16: return DType::kBFloat16;
    case at::kHalf: return DType::kFloat16;
    default:
      TORCH_CHECK_TYPE(false, "pyattn: dtype must be float64, float32, bfloat16 or float16, got ", name_of(type));
  }
}

// dtype of lse, row_max and row_sum.
inline at::ScalarType row_dtype(at::ScalarType type) { return type == at::kDouble ? at::kDouble : at::kFloat; }

// TypeError unless t has one of the types.
inline void check_type(const char* name, const Tensor& t, std::initializer_list<at::ScalarType> types) {
  if (std::find(types.begin(), types.end(), t.scalar_type()) != types.end()) return;
  std::string names;
  for (const at::ScalarType type : types) {
    const std::string word = name_of(type);
    if (names.find(word) == std::string::npos) names += (names.empty() ? "" : " or ") + word;
  }
  TORCH_CHECK_TYPE(false, "pyattn: ", name, " must have dtype ", names, ", got ", name_of(t.scalar_type()));
}

inline void check_device(const char* name, const Tensor& t, at::Device device) {
  TORCH_CHECK_VALUE(t.device() == device, "pyattn: ", name, " must be on q's device, got ", t.device(), " and ",
                    device);
}

// Errors unless t is defined, has one of the types and is on the device.
inline void check_given(const char* name, const Tensor& t, at::Device device,
                        std::initializer_list<at::ScalarType> types) {
  TORCH_CHECK_TYPE(t.defined(), "pyattn: ", name, " must be a Tensor, got None");
  check_type(name, t, types);
  check_device(name, t, device);
}

inline void check_tensor(const char* name, const Tensor& t, at::Device device, at::ScalarType type,
                         c10::SymIntArrayRef sizes) {
  check_given(name, t, device, {type});
  TORCH_CHECK_VALUE(t.sym_sizes() == sizes, "pyattn: ", name, " must have shape ", sizes, ", got ", t.sym_sizes());
}

// The sizes of t, with `cols` columns.
inline c10::SymDimVector with_columns(const Tensor& t, const SymInt& cols) {
  c10::SymDimVector sizes(t.sym_sizes());
  sizes.back() = cols;
  return sizes;
}

// Whether the contents of index tensors on a GPU are read and checked as on a CPU, which waits for the GPU:
// only if the environment variable PYATTN_CHECK is 1.
inline bool checks_gpu() {
  static const char* const value = std::getenv("PYATTN_CHECK");
  return value && std::string_view(value) == "1";
}

}  // namespace pyattn
