// Keys: where the keys and values of a head lie: contiguous, in pages, or in blocks that a query selects.
// Decoding reads pages and blocks in place, through a table of row addresses; blocks of queries copy the
// tiles that reach into several. Neither products nor softmax know of them.
#pragma once

#include "cpu/products/matrix.h"
#include "cpu/products/pack.h"
#include "cpu/simd/simd.h"
#include "shared/selected_keys.h"

namespace pyattn::PYATTN_ISA {
namespace {

// Rows of a KV tensor from position j on.
template <class S>
Matrix<S> key_rows(const Head& head, const View& view, int64_t j) {
  return {head.key<S>(view, j), view.stride_s};
}

// ---- Pages and selected blocks ----

// Whether neighbouring keys may lie apart.
inline bool keys_apart(const ForwardParams& p) { return p.cpu.pages.table || is_selected(p); }

// Whether blocks of queries read tiles of keys from a copy: keys may lie apart, or are stored in 8 bits.
inline bool keys_copied(const ForwardParams& p) { return keys_apart(p) || p.cpu.bytes.type != ByteType::kNone; }

// Rows of a KV tensor from some position on; the first `count` of them are evenly spaced.
template <class S>
struct KeyRun {
  Matrix<const S> rows;
  int64_t count;
};

// A row of k or v; with lists for each query head, several of these read one head.
template <class S>
const S* selected_row(const ForwardParams& p, const Head& head, const View& view, int64_t key) {
  return static_cast<const S*>(view.data) + head.b * view.stride_b +
         head.h_kv / p.cpu.selected.sharing * view.stride_h + key * view.stride_s;
}

// The run of these keys that begins at the first one: the rest of its page or block, and
// the pages or blocks after it that are adjacent in memory.
template <class S>
KeyRun<S> key_run(const ForwardParams& p, const Head& head, const View& view, Range keys) {
  if (is_selected(p)) {
    SelectedKeys listed(p, head, keys.begin);
    const S* const first = selected_row<S>(p, head, view, listed.key());
    return {{first, view.stride_s}, listed.take_neighbours(keys.count())};
  }
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

// Calls f(row, i) for each of the keys; i is its place among them.
template <class S, class F>
void each_row(const ForwardParams& p, const Head& head, const View& view, Range keys, F f) {
  if (is_selected(p)) {
    SelectedKeys listed(p, head, keys.begin);
    const S* const rows = selected_row<S>(p, head, view, 0);
    for (int64_t i = 0; i < keys.count(); ++i, listed.next()) f(rows + listed.key() * view.stride_s, i);
    return;
  }
  const S* const first = static_cast<const S*>(view.data) + head.h_kv * view.stride_h;
  if (!p.cpu.pages.table) {
    const Matrix<const S> rows = key_rows<const S>(head, view, keys.begin);
    for (int64_t i = 0; i < keys.count(); ++i) f(rows.at(i), i);
    return;
  }
  const auto [table, stride, size] = p.cpu.pages;
  const int64_t* page = table + keys.begin / size + head.b * stride;  // the only division: it takes as long as a row
  for (int64_t i = 0, place = keys.begin % size; i < keys.count(); ++page, place = 0) {
    const S* row = first + *page * view.stride_b + place * view.stride_s;
    for (const int64_t end = min(i + size - place, keys.count()); i < end; ++i, row += view.stride_s) f(row, i);
  }
}

// Writes the addresses of the rows of keys.
template <class S>
RowTable<const S> list_rows(const ForwardParams& p, const Head& head, const View& view, Range keys, const S** rows) {
  each_row<S>(p, head, view, keys, [&](const S* row, int64_t i) { rows[i] = row; });
  return {rows};
}

// The rows of keys, at least one: in place if they are one run, else copied into the buffer.
template <class S>
Matrix<const S> whole_rows(const ForwardParams& p, const Head& head, const View& view, Range keys, int64_t cols,
                           Matrix<S> buffer) {
  const KeyRun<S> first = key_run<S>(p, head, view, keys);
  if (first.count == keys.count()) return first.rows;
  constexpr int64_t kAhead = 8;  // rows that are prefetched: they lie anywhere
  const S* rows[kAhead] = {};
  each_row<S>(p, head, view, keys, [&](const S* row, int64_t i) {
    for (int64_t d = 0; d < cols; d += kCacheLine / sizeof(S)) __builtin_prefetch(row + d);
    if (i >= kAhead) __builtin_memcpy(buffer.at(i - kAhead), rows[i % kAhead], cols * sizeof(S));
    rows[i % kAhead] = row;
  });
  for (int64_t i = max(0, keys.count() - kAhead); i < keys.count(); ++i)
    __builtin_memcpy(buffer.at(i), rows[i % kAhead], cols * sizeof(S));
  return buffer;
}

// ---- 8 bits ----

// The scales of keys -> scales[keys], for rows as loads widen them.
template <class KV>
void list_scales(const ForwardParams& p, const Head& head, const ScaleView& view, Range keys, float* scales) {
  constexpr int L = kLanes<float>;
  const auto [table, stride, size] = p.cpu.pages;
  const float* const first = view.data + head.h_kv * view.stride_h;
  for (int64_t j = keys.begin, end; j < keys.end; j = end) {
    const float* from = first + head.b * view.stride_b + j * view.stride_s;
    end = keys.end;
    if (table) {
      end = min(keys.end, (j / size + 1) * size);
      from = first + table[head.b * stride + j / size] * view.stride_b + j % size * view.stride_s;
    }
    int64_t k = j;
    if (view.stride_s == 1)
      for (; k + L <= end; k += L, scales += L) {
        store(scales, load(from + (k - j)) * kLoadedUnit<KV>);
        __builtin_prefetch(from + (k - j) + keys.count());  // of the next block
      }
    for (; k < end; ++k) *scales++ = from[(k - j) * view.stride_s] * kLoadedUnit<KV>;
  }
}

// whole_rows of keys stored in 8 bits: copied, widened and scaled.
template <class S, class KV>
Matrix<const S> scaled_rows(const ForwardParams& p, const Head& head, const View& view, const ScaleView& scale,
                            Range keys, int64_t cols, Matrix<S> buffer) {
  constexpr int64_t kMost = 128;
  constexpr int L = kLanes<Compute<S>>;
  float scales[kMost];
  for (Range some = keys; !some.empty(); some.begin = some.end, some.end = keys.end) {
    some.end = min(some.end, some.begin + kMost);
    list_scales<KV>(p, head, scale, some, scales);
    each_row<KV>(p, head, view, some, [&](const KV* row, int64_t i) {
      S* to = buffer.at(some.begin - keys.begin + i);
      int64_t d = 0;
      for (; d + L <= cols; d += L) store(to + d, load(row + d) * scales[i]);
      if (d < cols) store(to + d, load(row + d, cols - d) * scales[i], cols - d);
    });
  }
  return buffer;
}

// whole_rows of k or v, stored as KV, whose rows have these scales.
template <class S, class KV>
Matrix<const S> tile_rows(const ForwardParams& p, const Head& head, const View& view, const ScaleView& scale,
                          Range keys, int64_t cols, Matrix<S> buffer) {
  if constexpr (std::is_same_v<S, KV>)
    return whole_rows<S>(p, head, view, keys, cols, buffer);
  else
    return scaled_rows<S, KV>(p, head, view, scale, keys, cols, buffer);
}

// P[rows][keys] *= scales[keys] * factor(row). A weight of 0 stays 0 if `select`, whatever its scale.
template <class T, class Factor>
void scale_keys(Matrix<T> P, int64_t rows, int64_t keys, const T* scales, bool select, Factor factor) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t k = 0; k < keys; k += kLanes<T>) {
      T* const weights = P.at(r) + k;
      const vec<T> p = load(weights), scaled = p * (factor(r) * load(scales + k));
      store(weights, select ? (p == 0 ? p : scaled) : scaled);
    }
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
