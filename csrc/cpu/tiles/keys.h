// Keys: where the keys and values of a head lie, contiguous or in pages. Decoding reads those in
// pages in place, through a table of row addresses; blocks of queries copy the tiles that reach
// into several pages. Neither products nor softmax know of pages.
#pragma once

#include "cpu/products/matrix.h"
#include "cpu/products/operand.h"
#include "cpu/simd/simd.h"
#include "shared/heads.h"

namespace pyattn::PYATTN_ISA {
namespace {

// Rows of a KV tensor from position j on.
template <class S>
Matrix<S> key_rows(const Head& head, const View& view, int64_t j) {
  return {head.key<S>(view, j), view.stride_s};
}

// The rows [n0, n0 + keys) of a KV tensor as the left factor of a sum over columns.
template <class S>
Strided<Operand<S>> left_keys(const Head& head, const View& view, int64_t n0, int64_t keys, int64_t cols,
                              Matrix<Operand<S>> buffer) {
  return left_keys<S>(key_rows<const S>(head, view, n0), keys, cols, buffer);
}

// The same rows, for a sum over the rows: in place if that is possible and requested.
template <class S>
Matrix<const Operand<S>> summed_keys(const Head& head, const View& view, int64_t n0, int64_t keys, int64_t cols,
                                     bool in_place, Matrix<Operand<S>> buffer) {
  return summed_keys<S>(key_rows<const S>(head, view, n0), keys, cols, in_place, buffer);
}

// ---- Pages ----

// Rows of a KV tensor from some position on; the first `count` of them are evenly spaced.
template <class S>
struct KeyRun {
  Matrix<const S> rows;
  int64_t count;
};

// The run of these keys that begins at the first one: the rest of
// its page, and the pages after it that are adjacent in memory.
template <class S>
KeyRun<S> key_run(const ForwardParams& p, const Head& head, const View& view, Range keys) {
  if (!p.cpu.pages.table) return {key_rows<const S>(head, view, keys.begin), keys.count()};
  const auto [table, stride, size] = p.cpu.pages;
  const int64_t* page = table + head.b * stride + keys.begin / size;
  const int64_t place = keys.begin % size;
  const bool dense = view.stride_b == size * view.stride_s;
  const S* first = static_cast<const S*>(view.data) + *page * view.stride_b + head.h_kv * view.stride_h;
  int64_t count = size - place;
  for (; count < keys.count() && dense && page[1] == *page + 1; ++page) count += size;
  return {{first + place * view.stride_s, view.stride_s}, min(count, keys.count())};
}

// Calls f(run, i) for each run of the keys; i is the run's place among them.
template <class S, class F>
void each_run(const ForwardParams& p, const Head& head, const View& view, Range keys, F f) {
  for (int64_t j = keys.begin; j < keys.end;) {
    const KeyRun<S> run = key_run<S>(p, head, view, {j, keys.end});
    f(run, j - keys.begin);
    j += run.count;
  }
}

// Writes the addresses of the rows of keys.
template <class S>
RowTable<const S> list_rows(const ForwardParams& p, const Head& head, const View& view, Range keys, const S** rows) {
  each_run<S>(p, head, view, keys, [&](const KeyRun<S>& run, int64_t i) {
    for (int64_t k = 0; k < run.count; ++k) rows[i + k] = run.rows.at(k);
  });
  return {rows};
}

// The rows of keys, at least one: in place if they are one run, else copied into the buffer.
template <class S>
Matrix<const S> whole_rows(const ForwardParams& p, const Head& head, const View& view, Range keys, int64_t cols,
                           Matrix<S> buffer) {
  const KeyRun<S> first = key_run<S>(p, head, view, keys);
  if (first.count == keys.count()) return first.rows;
  each_run<S>(p, head, view, keys, [&](const KeyRun<S>& run, int64_t i) {
    for (int64_t k = 0; k < run.count; ++k) __builtin_memcpy(buffer.at(i + k), run.rows.at(k), cols * sizeof(S));
  });
  return buffer;
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
