// Huge pages for large tensors on a CPU, where the system grants them on request.
#pragma once

#include <ATen/core/Tensor.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#include <cstdint>

namespace pyattn {

// glibc gets larger blocks from the system each time, and gives smaller ones to several tensors in turn.
inline constexpr size_t kMappedAnew = size_t{32} << 20;

// To be called before t is first written: the memory of a large tensor is fresh from the system, and a page fault for
// each small page takes five times as long as writing it. A hint, which the system may ignore.
inline void prefer_huge_pages([[maybe_unused]] const at::Tensor& t) {
#ifdef MADV_HUGEPAGE
  if (!t.is_cpu()) return;
  constexpr uintptr_t kHugePage = uintptr_t{1} << 21;
  const auto first = reinterpret_cast<uintptr_t>(t.mutable_data_ptr());
  const uintptr_t begin = (first + kHugePage - 1) / kHugePage * kHugePage,
                  end = (first + t.nbytes()) / kHugePage * kHugePage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace pyattn
