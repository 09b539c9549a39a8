// Forward computes out = softmax(S) V: few query rows of a KV head are decoded, others run in blocks of rows.
#pragma once

#include "cpu/passes/decode/decode.h"
#include "cpu/passes/decode/invariant_item.h"
#include "cpu/passes/decode/item.h"
#include "cpu/passes/forward_item.h"
#include "cpu/plan/units.h"
#include "cpu/plan/work.h"

namespace pyattn::PYATTN_ISA {
namespace {

template <class S, class KV>
Plan plan_forward(const ForwardParams& p) {
  const int64_t blocks = few_rows<S>(p, most_rows(p)) ? 0 : ForwardScratch<S>(p, nullptr).bytes;
  return {work_of<S>(p, Unit::kForward).count(), kScratchAlign + max(blocks, DecodeScratch<S, KV>(p, nullptr).bytes),
          DecodeParts<S>::bytes(p), decodes_together<S>(p) ? p.num_heads_kv : 1};
}

// Computes `heads` items of decoding, in the order of sums that the params want.
template <class S, template <class> class Score, class KV>
void decode(const ForwardParams& p, int64_t first, int64_t heads, int64_t split, const DecodeScratch<S, KV>& s) {
  using Item = DecodeItem<S, Score, KV>;
  if constexpr (std::is_same_v<S, KV> && !kTileRegisters<Operand<S>>)
    if (p.cpu.row_invariant) return decode_keys<InvariantItem<Item>>(p, first, heads, split, s);
  decode_keys<Item>(p, first, heads, split, s);
}

// Decodes the item at `place`, or with enough items left all heads of a range of keys, and returns the number of items.
// Here the items of a sequence are all heads of its first range of keys, then those of the next.
template <class S, template <class> class Score, class KV>
int64_t decode_together(const ForwardParams& p, const Place& place, int64_t items, const DecodeScratch<S, KV>& s) {
  const int64_t heads = p.num_heads_kv, first = round_down(place.head, heads);
  const int64_t i = (place.head - first) * place.count + place.n, h = i % heads;
  const int64_t count = h == 0 && items >= heads ? heads : 1;
  decode<S, Score, KV>(p, first + h, count, i / heads, s);
  return count;
}

// A KV head with at most one block of query rows is divided into work items by ranges of keys, any other head by
// blocks of query rows. The last block runs first, because a causal mask makes it the longest.
template <class S, template <class> class Score, class KV>
void forward(const ForwardParams& p, int64_t begin, int64_t end, void* scratch) {
  const Work work = work_of<S>(p, Unit::kForward);
  const auto first_row = [&](const Head& head, const Place& place) {
    return splits_keys<S>(p, head.count, head.seqlen_k) ? 0 : (place.count - 1 - place.n) * kBlockQ<Compute<S>>;
  };
  HeadKeys& keys = *static_cast<HeadKeys*>(scratch);
  void* const item_scratch = static_cast<char*>(scratch) + kScratchAlign;
  const ForwardScratch<S> s(p, item_scratch);
  Place place = work.at(begin);
  for (int64_t item = begin; item < end; ++item) {
    const Head head(p, place.head);
    Place next = work.at(min(item + 1, work.count() - 1));
    keys.enter(place.head);
    if (decodes_together<S>(p)) {
      item += decode_together<S, Score, KV>(p, place, end - item, DecodeScratch<S, KV>(p, item_scratch)) - 1;
      next = work.at(min(item + 1, work.count() - 1));
    } else if (few_rows<S>(p, head.count)) {
      decode<S, Score, KV>(p, place.head, 1, place.n, DecodeScratch<S, KV>(p, item_scratch));
    } else {
      ForwardItem<S, Score<S>, KV> block(p, head, first_row(head, place), s, keys);
      const Head next_head(p, next.head);
      block.prefetch(next_head, first_row(next_head, next));
      if (splits_keys<S>(p, head.count, head.seqlen_k))
        block.run_part(split_keys(p, head, place.n), DecodeParts<S>(p, head).of(place.n));
      else
        block.run();
    }
    place = next;
  }
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA
