// The only file that names every instruction set. The best one that the CPU has is active, unless
// the environment variable PYATTN_ISA or set_isa names another.
#ifdef __x86_64__
#include <cpuid.h>
#endif
#ifdef PYATTN_HAS_amx
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string_view>

#include "library.h"

namespace pyattn {

// The kernels of an instruction set, by dtype.
#define PYATTN_KERNELS(isa, count)          \
  namespace isa {                           \
  extern const DTypeKernels kernels[count]; \
  }
PYATTN_KERNELS(amx, 1)
PYATTN_KERNELS(avx512_bf16, 1)
PYATTN_KERNELS(avx512, kNumDTypes)
PYATTN_KERNELS(avx2, kNumDTypes)
PYATTN_KERNELS(neon, kNumDTypes)
PYATTN_KERNELS(scalar, kNumDTypes)
#undef PYATTN_KERNELS

namespace {

struct Isa {
  const char* name;
  bool (*available)();
  const DTypeKernels* kernels;
  const DTypeKernels* bf16 = nullptr;  // bfloat16's, of a set that has kernels for it alone; `kernels` are AVX-512's
};

#ifdef __x86_64__

// x86-64-v3 and v4, as -march= defines them. clang 16's __builtin_cpu_supports knows neither these
// names nor F16C, MOVBE and LZCNT, so cpuid answers for the last three. __builtin_cpu_supports
// also checks that the system saves the registers; those three need none beyond AVX's. The
// answer is kept, because a virtual machine takes 20 us for each cpuid.
[[maybe_unused]] bool has_v3() {
  static const bool has = [] {
    unsigned a, b, c, d;
    const bool f16c_movbe = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) && (c & bit_MOVBE);
    const bool lzcnt = __get_cpuid(0x80000001, &a, &b, &c, &d) && (c & bit_LZCNT);
    return f16c_movbe && lzcnt && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  }();
  return has;
}

[[maybe_unused]] bool has_v4() {
  return has_v3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

[[maybe_unused]] bool has_v4_bf16() {
  return has_v4() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
}

#ifdef PYATTN_HAS_amx

// Linux lets a process use the tile registers once it has asked for them; it says no if the CPU has none.
bool has_amx() {
  constexpr unsigned kBf16 = 1 << 22, kTiles = 1 << 24;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool has = [] {
    unsigned a, b, c, d;
    return has_v4_bf16() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kBf16) && (d & kTiles) &&
           syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return has;
}

#endif

#endif

const Isa kIsas[] = {
#ifdef PYATTN_HAS_amx
    {"amx", has_amx, avx512::kernels, amx::kernels},
#endif
#ifdef PYATTN_HAS_avx512_bf16
    {"avx512_bf16", has_v4_bf16, avx512::kernels, avx512_bf16::kernels},
#endif
#ifdef PYATTN_HAS_avx512
    {"avx512", has_v4, avx512::kernels},
#endif
#ifdef PYATTN_HAS_avx2
    {"avx2", has_v3, avx2::kernels},
#endif
#ifdef PYATTN_HAS_neon
    {"neon", [] { return true; }, neon::kernels},
#endif
    {"scalar", [] { return true; }, scalar::kernels},
};

// The instruction sets that this CPU has, best first. Intel's processors multiply half as much in a cycle with
// VDPBF16PS as with FMA, and AMD's twice as much: on a Xeon bfloat16 takes 1.3 to 1.7 times as long with AVX512_BF16.
std::vector<const Isa*> best_first() {
  std::vector<const Isa*> found;
  for (const Isa& isa : kIsas)
    if (isa.available()) found.push_back(&isa);
#ifdef __x86_64__
  const auto multiplies_slowly = [](const Isa* isa) { return std::string_view("avx512_bf16") == isa->name; };
  const auto slow = std::find_if(found.begin(), found.end(), multiplies_slowly);
  if (__builtin_cpu_is("intel") && slow != found.end()) std::swap(slow[0], slow[1]);  // AVX-512 comes after it
#endif
  return found;
}

std::string join(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

// `what` names the setting in the error message.
const Isa& find(const std::string& what, const std::string& name) {
  for (const Isa& isa : kIsas)
    if (name == isa.name && isa.available()) return isa;
  throw std::invalid_argument("pyattn: " + what + " must be one of " + join(available_isas()) + ", got '" + name + "'");
}

std::atomic<const Isa*>& active() {
  static std::atomic<const Isa*> isa = [] {
    const char* name = std::getenv("PYATTN_ISA");
    return &find("PYATTN_ISA in the environment", name && *name ? name : available_isas().front());
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
  for (const Isa* isa : best_first()) names.push_back(isa->name);
  return names;
}

std::string active_isa() { return active().load()->name; }
void set_isa(const std::string& name) { active() = &find("instruction set", name); }

Kernels kernels(DType dtype, bool plain) {
  const Isa& isa = *active().load();
  const auto of_score = [&](const DTypeKernels& both) -> const Kernels& { return plain ? both.plain : both.general; };
  if (dtype == DType::kBFloat16 && isa.bf16) return of_score(*isa.bf16);
  Kernels found = of_score(isa.kernels[static_cast<int>(dtype)]);
  if (dtype == DType::kFloat32 && isa.bf16) {  // a set that multiplies pairs of bfloat16 may multiply bytes, too
    const Pass<ForwardParams>& by_bytes = of_score(*isa.bf16).forward_int8;
    if (by_bytes.run) found.forward_int8 = by_bytes;
  }
  return found;
}

bool prefetches_to_l2() {
#ifdef __x86_64__
  static const bool to_l2 = __builtin_cpu_is("intel") || [] {
    for (const unsigned leaf : {4u, 0x8000001du}) {  // Intel's, AMD's
      unsigned a, b, c, d;
      for (unsigned cache = 0; cache < 8 && __get_cpuid_count(leaf, cache, &a, &b, &c, &d) && a & 0x1f; ++cache)
        if ((a & 0xff) == (1 << 5 | 1))  // level 1, data: ways, partitions, bytes of a line and sets, each less 1
          return ((b >> 22) + 1) * ((b >> 12 & 0x3ff) + 1) * ((b & 0xfff) + 1) * (c + 1) < 48 * 1024;
    }
    return false;
  }();
  return to_l2;
#else
  return false;
#endif
}

double peak(DType type, int64_t rounds) { return kernels(type, true).peak(rounds); }

}  // namespace pyattn
