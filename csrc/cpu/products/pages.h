// Pages: where the keys and values of a sequence lie if not one behind the other. Decoding reads them in
// place, by a table of their rows; for blocks of queries, tiles that reach into several pages are copied.
// Neither products nor softmax know of pages.
#pragma once

#include "cpu/products/matrix.h"
#include "cpu/products/operand.h"
#include "shared/heads.h"

namespace pyattn::PYATTN_ISA {
namespace {

// Rows of a KV tensor from a position on, and how many of them lie a stride apart.
template <class S>
struct KeyRun {
  Matrix<const S> rows;
  int64_t count;
};

// The run from the first one of keys on, as far as it has some of them: a page, or neighbours in one piece.
template <class S>
KeyRun<S> key_run(const ForwardParams& p, const Head& head, const View& view, Range keys) {
  if (!p.pages.table) return {key_rows<const S>(head, view, keys.begin), keys.count()};
  const auto [table, stride, size] = p.pages;
  const int64_t* page = table + head.b * stride + keys.begin / size;
  const int64_t place = keys.begin % size;
  const bool dense = view.stride_b == size * view.stride_s;
  const S* first = static_cast<const S*>(view.data) + *page * view.stride_b + head.h_kv * view.stride_h;
  int64_t count = size - place;
  for (; count < keys.count() && dense && page[1] == *page + 1; ++page) count += size;
  return {{first + place * view.stride_s, view.stride_s}, min(count, keys.count())};
}

// f(run, i) for each run of the keys, i being where it begins among them.
template <class S, class F>
void each_run(const ForwardParams& p, const Head& head, const View& view, Range keys, F f) {
  for (int64_t j = keys.begin; j < keys.end;) {
    const KeyRun<S> run = key_run<S>(p, head, view, {j, keys.end});
    f(run, j - keys.begin);
    j += run.count;
  }
}

// Writes where the rows of keys lie, at least one, and of `ahead` more that may be asked for, in whose place
// the last one of the sequence may stand.
template <class S>
RowTable<const S> list_rows(const ForwardParams& p, const Head& head, const View& view, Range keys, int64_t ahead,
                            const S** rows) {
  const Range known{keys.begin, min(keys.end + ahead, head.seqlen_k)};
  each_run<S>(p, head, view, known, [&](const KeyRun<S>& run, int64_t i) {
    for (int64_t k = 0; k < run.count; ++k) rows[i + k] = run.rows.at(k);
  });
  for (int64_t i = known.count(); i < keys.count() + ahead; ++i) rows[i] = rows[i - 1];
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
