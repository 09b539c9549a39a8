// Pages: where the keys and values of a sequence lie if not one behind the other. Decoding reads them in
// place, by a table of their rows; for blocks of queries, tiles that reach into several pages are copied.
// Neither products nor softmax know of pages.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention.h"
#include "heads.h"
#include "mask.h"
#include "matrix.h"
#include "operand.h"

namespace pyattn::PYATTN_ISA {
namespace {

// Rows of a KV tensor from a position on, and how many of them lie a stride apart.
template <class S>
struct KeyRun {
  Matrix<const S> rows;
  int64_t count;
};

template <class S>
KeyRun<S> key_run(const ForwardParams& p, const Head& head, const View& view, int64_t j) {
  if (!p.pages.table) return {key_rows<const S>(head, view, j), head.seqlen_k - j};
  const int64_t page = p.pages.table[head.b * p.pages.stride + j / p.pages.size], place = j % p.pages.size;
  const S* row = static_cast<const S*>(view.data) + page * view.stride_b + head.h_kv * view.stride_h;
  return {{row + place * view.stride_s, view.stride_s}, min(p.pages.size - place, head.seqlen_k - j)};
}

// f(run, i) for each run of the keys, i being where it begins among them.
template <class S, class F>
void each_run(const ForwardParams& p, const Head& head, const View& view, Range keys, F f) {
  for (int64_t j = keys.begin; j < keys.end;) {
    KeyRun<S> run = key_run<S>(p, head, view, j);
    run.count = min(run.count, keys.end - j);
    f(run, j - keys.begin);
    j += run.count;
  }
}

// The rows of keys, and of `ahead` more that may be asked for: a Matrix, or a RowTable of them, written to
// `rows`, in which the last row of the sequence may stand in for those.
template <class Rows, class S>
Rows find_rows(const ForwardParams& p, const Head& head, const View& view, Range keys, int64_t ahead,
               [[maybe_unused]] const S** rows) {
  if constexpr (std::is_same_v<Rows, Matrix<const S>>) {
    return key_rows<const S>(head, view, keys.begin);
  } else {
    const Range known{keys.begin, min(keys.end + ahead, head.seqlen_k)};
    each_run<S>(p, head, view, known, [&](const KeyRun<S>& run, int64_t i) {
      for (int64_t k = 0; k < run.count; ++k) rows[i + k] = run.rows.at(k);
    });
    for (int64_t i = known.count(); i > 0 && i < keys.count() + ahead; ++i) rows[i] = rows[i - 1];
    return {rows};
  }
}

// The rows of keys, at least one: in place if they are one run, else copied into the buffer.
template <class S>
Matrix<const S> whole_rows(const ForwardParams& p, const Head& head, const View& view, Range keys, int64_t cols,
                           Matrix<S> buffer) {
  const KeyRun<S> first = key_run<S>(p, head, view, keys.begin);
  if (first.count >= keys.count()) return first.rows;
  each_run<S>(p, head, view, keys, [&](const KeyRun<S>& run, int64_t i) {
    for (int64_t k = 0; k < run.count; ++k) __builtin_memcpy(buffer.at(i + k), run.rows.at(k), cols * sizeof(S));
  });
  return buffer;
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
