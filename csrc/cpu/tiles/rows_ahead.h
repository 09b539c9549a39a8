// Rows of a head that products prefetch for the work that follows (products/lines_ahead.h).
#pragma once

#include "cpu/products/lines_ahead.h"
#include "cpu/simd/simd.h"
#include "cpu/tiles/keys.h"
#include "cpu/tiles/strips.h"
#include "shared/mask.h"

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

// One vector of queries multiplies a line of K for each term of a tile, as fast as memory delivers lines. From rows of
// this many bytes on, products prefetch at each term: with 576 columns they take 0.7 of the time. The hardware
// prefetcher follows the tile's 16 rows if they are shorter; then they would take up to 7 % longer.
inline constexpr int64_t kLongRow = 512;

// Bytes of the keys, and of the values, of the next head that products prefetch: all of a short head's. Batches of 128 to 256
// tokens of 64 columns take 0.91 to 0.97 of the time that they take with the first tile's alone. More would not fit L2 beside
// the current head's.
inline constexpr int64_t kNextHeadBytes = 128 * 1024;

// Bytes of K and V, read in place, that stay in L2 from one block of queries to the next. Where they do, prefetching them again
// takes 2 to 6 % longer; where they do not, it takes 0.75 to 0.85 of the time. Rows in 16 bits are prefetched once: packed
// ones are kept, and the faster products leave no time for more (2 to 4 % longer).
inline constexpr int64_t kCachedBytes = 1024 * 1024;

// Multiply-adds for each line that products prefetch: so many that a head's rows of queries and keys have arrived when it is
// done, and at most 384, which take about as long as a line takes to arrive. With 384 always, 16 queries over 4,096 keys take
// 1.15 times as long, 1,024 x 8 heads of 16 tokens 1.1 to 1.2 times.
template <class S>
int64_t pace(int64_t rows, int64_t keys) {
  constexpr int64_t kEach = kCacheLine / (sizeof(S) * kColumns<S>);
  return clamp(kEach * rows * keys / max(1, rows + keys), 1, 384);
}

// The keys of a KV head that a task has read or prefetched, and those whose rows of K and of V are packed in its scratch. The
// blocks of query rows of a head run one after another and read the same keys. This lies before the scratch of a work item,
// and is 0 as a task begins.
struct HeadKeys {
  int64_t past_head;  // the number of the head plus 1; 0: none
  Range read, packed_k, packed_v;
  int64_t prefetched;  // of the next head: the end of its prefetched keys

  // Goes on to a head, if it is another one.
  void enter(int64_t head) {
    if (past_head != head + 1) *this = {head + 1, {0, prefetched}, {}, {}, 0};
  }

  void add_read(Range keys) {
    read = read.empty() ? keys : Range{min(read.begin, keys.begin), max(read.end, keys.end)};
  }
};
static_assert(sizeof(HeadKeys) <= kScratchAlign);

// The rows that a work item of forward lets its products prefetch: those of out that it writes, those of its later tiles of
// keys, and those that the next item reads. The item has the query rows [r0, r0 + rows) of a head.
template <class S>
class ForwardAhead {
 public:
  ForwardAhead(const ForwardParams& p, const Head& head, int64_t r0, int64_t rows, HeadKeys& head_keys)
      : at_terms(rows <= kLanes<Compute<S>> && !keys_copied(p) && p.head_dim * int64_t{sizeof(S)} >= kLongRow),
        lines(p.cpu.prefetch_to_l2 && !at_terms, pace<S>(round_up(rows, kLanes<Compute<S>>), head.seqlen_k)),
        p_(p),
        head_(head),
        r0_(r0),
        rows_(rows),
        keys_(head_keys) {}

  // Whether products prefetch at each term: into L1, because lines are read soon. L2 takes 1.06 to 1.09 of the time.
  const bool at_terms;
  LinesAhead lines;

  void add_out() { add_query_rows<S>(lines, head_, p_.out, r0_, rows_, p_.head_dim_v); }

  // The rows of q that the next item reads, and if it is of another head, later those of k and v.
  void add_next(const Head& next, int64_t next_r0) {
    const int64_t next_rows = min(kBlockQ<Compute<S>>, next.count - next_r0);
    const bool same = next.b == head_.b && next.h_kv == head_.h_kv;
    if (next_rows <= 0 || (same && next_r0 == r0_)) return;
    add_query_rows<S>(lines, next, p_.q, next_r0, next_rows, p_.head_dim);
    if (keys_copied(p_) || same) return;
    next_head_ = &next;
    next_keys_ = Mask(p_, next).keys_of_any(next_r0, next_rows);
  }

  // Before the tiles of the keys `some`, which are some of all that the item reads.
  void begin(Range all, Range some) {
    first_ = some.begin, past_ = all.end;
    cached_ = !kInPlace<S> || all.count() * (p_.head_dim + p_.head_dim_v) * int64_t{sizeof(S)} <= kCachedBytes;
    if (!reads_memory(some))
      add_next_head(kNextHeadBytes / max(1, max(p_.head_dim, p_.head_dim_v) * int64_t{sizeof(S)}));
  }

  // Before a tile, the keys of the tile after it, at most this many.
  void add_tile(int64_t begin, int64_t keys) {
    const Range tile{begin, min(begin + keys, past_)};
    if (tile.empty()) return add_next_head(keys);
    if (keys_copied(p_) || !(at_terms || reads_memory(tile))) return;
    if (begin > first_ + keys) lines.clear();  // those of the current tile are late
    if (!tile.lies_in(keys_.packed_k)) add_key_rows<S>(lines, head_, p_.k, begin, tile.count(), p_.head_dim);
    if (p_.v.data != p_.k.data && !tile.lies_in(keys_.packed_v))
      add_key_rows<S>(lines, head_, p_.v, begin, tile.count(), p_.head_dim_v);
  }

 private:
  const ForwardParams& p_;
  const Head& head_;
  const int64_t r0_, rows_;
  HeadKeys& keys_;
  const Head* next_head_ = nullptr;  // whose keys are to be prefetched
  Range next_keys_;
  int64_t first_ = 0, past_ = 0;  // the first key of the tiles; the end of all keys that the rows see
  bool cached_ = false;           // whether keys that were read are in L2

  // Whether some of the keys come from memory or L3.
  bool reads_memory(Range keys) const { return !cached_ || !keys.lies_in(keys_.read); }

  // At most this many of the next head's keys, once.
  void add_next_head(int64_t most) {
    if (!next_head_) return;
    const int64_t begin = next_keys_.begin, count = min(next_keys_.count(), most);
    add_key_rows<S>(lines, *next_head_, p_.k, begin, count, p_.head_dim);
    add_key_rows<S>(lines, *next_head_, p_.v, begin, count, p_.head_dim_v);
    keys_.prefetched = begin == 0 ? count : 0;  // enter() takes them for the keys from 0 on
    next_head_ = nullptr;
  }
};

}  // namespace
}  // namespace pyattn::PYATTN_ISA
