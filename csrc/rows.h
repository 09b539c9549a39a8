// The names of before heads.h and mask.h, for files that have not moved there yet.
#pragma once

#include "heads.h"
#include "mask.h"

namespace pyattn::PYATTN_ISA {
namespace {

struct HeadRows : Head {
  Mask mask;

  constexpr HeadRows(const ForwardParams& p, int64_t head) : Head(p, head), mask(p, *this) {}

  constexpr int64_t visible_keys(int64_t r) const { return mask.keys_of(r).end; }
  constexpr int64_t first_row(int64_t j) const { return mask.rows_of_any(j, 1).begin; }
};

}  // namespace
}  // namespace pyattn::PYATTN_ISA
