// Rows of a head that products prefetch for the work that follows (products/lines_ahead.h).
#pragma once

#include "cpu/products/lines_ahead.h"
#include "cpu/tiles/keys.h"

namespace pyattn::PYATTN_ISA {
namespace {

// Rows [r0, r0 + rows) of a tensor with query heads, all heads of a group for each query.
template <class S>
void add_query_rows(LinesAhead& lines, const Head& head, const View& view, int64_t r0, int64_t rows, int64_t cols) {
  if (rows <= 0 || cols == 0) return;  // data may be null
  const int64_t query = head.query(r0), past = head.query(r0 + rows - 1) + 1;
  const S* first = head.row<const S>(view, query * head.group);
  lines.add(Matrix<const S>{first, view.stride_s}, past - query, cols, head.group, view.stride_h);
}

// Positions [j, j + keys) of a tensor with KV heads.
template <class S>
void add_key_rows(LinesAhead& lines, const Head& head, const View& view, int64_t j, int64_t keys, int64_t cols) {
  if (keys > 0 && cols > 0) lines.add(key_rows<const S>(head, view, j), keys, cols);
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
