// The only file that names every instruction set. The best that the CPU runs is active, unless the environment variable
// PYATTN_ISA or set_isa names another.
#include "dispatch.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include "attention.h"

namespace pyattn {
namespace avx512_bf16 {
extern const Kernels kernels[kNumDTypes];
}
namespace avx512 {
extern const Kernels kernels[kNumDTypes];
}
namespace avx2 {
extern const Kernels kernels[kNumDTypes];
}
namespace neon {
extern const Kernels kernels[kNumDTypes];
}
namespace scalar {
extern const Kernels kernels[kNumDTypes];
}

namespace {

struct Isa {
  const char* name;
  bool (*available)();
  const Kernels* kernels;
};

const Isa kIsas[] = {
#ifdef __x86_64__
    {"avx512_bf16", [] { return __builtin_cpu_supports("x86-64-v4") > 0 && __builtin_cpu_supports("avx512bf16") > 0; },
     avx512_bf16::kernels},
    {"avx512", [] { return __builtin_cpu_supports("x86-64-v4") > 0; }, avx512::kernels},
    {"avx2", [] { return __builtin_cpu_supports("x86-64-v3") > 0; }, avx2::kernels},
#elif defined(__aarch64__)
    {"neon", [] { return true; }, neon::kernels},
#endif
    {"scalar", [] { return true; }, scalar::kernels},
};

std::string join(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

const Isa& find(const std::string& name) {
  for (const Isa& isa : kIsas)
    if (name == isa.name && isa.available()) return isa;
  throw std::invalid_argument("pyattn: instruction set must be one of " + join(available_isas()) + ", got '" + name +
                              "'");
}

std::atomic<const Isa*>& active() {
  static std::atomic<const Isa*> isa = [] {
    const char* name = std::getenv("PYATTN_ISA");
    return &find(name && *name ? name : available_isas().front());
  }();
  return isa;
}

}  // namespace

std::vector<std::string> compiled_isas() {
  std::vector<std::string> names;
  for (const Isa& isa : kIsas) names.push_back(isa.name);
  return names;
}

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Isa& isa : kIsas)
    if (isa.available()) names.push_back(isa.name);
  return names;
}

std::string active_isa() { return active().load()->name; }
void set_isa(const std::string& name) { active() = &find(name); }
const Kernels& kernels(DType dtype) { return active().load()->kernels[static_cast<int>(dtype)]; }

}  // namespace pyattn
