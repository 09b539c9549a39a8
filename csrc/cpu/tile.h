// Tiles: blocks of rows on their way between tensors and kernels. Rows come through a function row(i) -> pointer.
#pragma once

namespace pyattn::PYATTN_ISA {
namespace {

inline constexpr int64_t kCacheLine = 64;

// Query rows of a block: 64 queries of 4 bytes are the widest register tile of AVX-512 and, with the
// head dimension, of the transposed accumulators that must stay in L2.
template <class T>
inline constexpr int64_t kBlockQ = 256 / sizeof(T);

// The first n columns, the rest zero.
template <class S>
PYATTN_INLINE vec<Compute<S>> load(const S* p, int64_t n) {
  if (n == kLanes<Compute<S>>) return load(p);
  S columns[kLanes<Compute<S>>] = {};
  __builtin_memcpy(columns, p, n * sizeof(S));
  return load(columns);
}

template <class S>
PYATTN_INLINE void store(S* p, vec<Compute<S>> x, int64_t n) {
  if (n == kLanes<Compute<S>>) return store(p, x);
  S columns[kLanes<Compute<S>>];
  store(columns, x);
  __builtin_memcpy(p, columns, n * sizeof(S));
}

// Carves one scratch buffer into arrays. With base null it only counts.
class Carver {
 public:
  explicit Carver(void* base) : base_(static_cast<char*>(base)) {}
  template <class T>
  T* take(int64_t n) {
    T* p = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    used_ += round_up(n * static_cast<int64_t>(sizeof(T)), kScratchAlign);
    return p;
  }
  int64_t bytes() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

template <class T>
void fill_zero(T* p, int64_t n) {
  __builtin_memset(p, 0, n * sizeof(T));
}

// Reading or writing a vector's worth of rows side by side, the hardware does not see the next ones coming.
template <class Row>
void prefetch_rows(int64_t i, int64_t end, int64_t cols, Row row) {
  for (; i < end; ++i)
    for (int64_t d = 0; d < cols; d += kCacheLine / sizeof(*row(i))) __builtin_prefetch(row(i) + d);
}

// row(i)[d] = scale[i] * src[d][i] for i < rows and d < cols.
template <class S, class T, class Row>
void unpack_transposed(Rows<const T> src, int64_t rows, int64_t cols, const T* scale, Row row) {
  constexpr int L = kLanes<T>;
  for (int64_t i = 0; i < rows; i += L) {
    const int64_t m = min(L, rows - i);
    prefetch_rows(i + L, min(i + 2 * L, rows), cols, row);
    for (int64_t d = 0; d < cols; d += L) {
      const int64_t n = min(L, cols - d);
      vec<T> square[L] = {};
      for (int64_t c = 0; c < n; ++c) square[c] = load(src.data + (d + c) * src.row + i) * load(scale + i);
      transpose<T>(square);
      for (int64_t r = 0; r < m; ++r) store(row(i + r) + d, square[r], n);
    }
  }
}

// dst[i][d] = row(i)[d] for d < cols, 0 up to a whole vector.
template <class S, class T, class Row>
void pack_rows(Rows<T> dst, int64_t rows, int64_t cols, Row row) {
  constexpr int L = kLanes<T>;
  for (int64_t i = 0; i < rows; ++i) {
    const S* from = row(i);
    T* to = dst.data + i * dst.row;
    int64_t d = 0;
    for (; d + L <= cols; d += L) store(to + d, load(from + d));
    if (d < cols) store(to + d, load(from + d, cols - d));
  }
}

// row(i)[d] = scale * src[i][d] for d < cols.
template <class S, class T, class Row>
void unpack_rows(Rows<const T> src, int64_t rows, int64_t cols, T scale, Row row) {
  constexpr int L = kLanes<T>;
  for (int64_t i = 0; i < rows; ++i) {
    const T* from = src.data + i * src.row;
    S* to = row(i);
    int64_t d = 0;
    for (; d + L <= cols; d += L) store(to + d, load(from + d) * scale);
    if (d < cols) store(to + d, load(from + d) * scale, cols - d);
  }
}

// Whether the kernels can read columns in place: stored in the compute type, and where whole vectors are read, a whole
// number of them.
template <class S>
constexpr bool in_place(int64_t cols, bool whole_vectors) {
  return sizeof(S) == sizeof(Compute<S>) && !(whole_vectors && cols % kLanes<Compute<S>>);
}

template <class S, class Row>
bool all_finite(int64_t rows, int64_t cols, Row row) {
  using T = Compute<S>;
  constexpr int L = kLanes<T>;
  vec<T> sum = {};
  for (int64_t i = 0; i < rows; ++i) {
    const S* from = row(i);
    int64_t d = 0;
    for (; d + L <= cols; d += L) sum += load(from + d) * T(0);
    if (d < cols) sum += load(from + d, cols - d) * T(0);
  }
  T total = 0;
  for (int i = 0; i < L; ++i) total += sum[i];
  return total == 0;
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
