// Compares the answers of csrc/shared/mask.h with those of a loop over every pair, for small masks of every kind.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "shared/mask.h"

namespace pyattn::PYATTN_ISA {
namespace {

int failures = 0;

struct Case {
  ForwardParams p{};
  std::vector<int64_t> ranges;
  std::vector<uint8_t> shown;
  std::vector<float> bias;
  std::vector<RowKeys> mask_rows, bias_rows;
  std::vector<BlockKeys> blocks;
  std::vector<uint8_t> seen;  // [rows][keys]

  bool sees(int64_t r, int64_t j) const { return seen[r * p.seqlen_k + j]; }

  // By the definition in attention.h, in numbers that can't overflow.
  bool is_visible(const Head& head, int64_t r, int64_t j) const {
    const int64_t i = head.query(r);
    const __int128 position = static_cast<__int128>(i) + p.mask.q_offset, left = p.mask.window_left,
                   right = p.mask.window_right;
    if (p.mask.causal && j > position) return false;
    if (left >= 0 && j < position - left) return false;
    if (right >= 0 && j > position + right) return false;
    bool in = ranges.empty();
    for (int64_t n = 0; !in && n < p.mask.num_ranges; ++n) {
      const int64_t* range = ranges.data() + 2 * (i * p.mask.num_ranges + n);
      in = range[0] <= j && j < range[1];
    }
    if (!in) return false;
    return shown_by(shown, p.mask.shown, head, r, j) && shown_by(bias, p.score.bias, head, r, j);
  }

  // Whether the tensor shows the row the key; true if there is no tensor.
  template <class E>
  static bool shown_by(const std::vector<E>& elements, const BroadcastView& view, const Head& head, int64_t r,
                       int64_t j) {
    return elements.empty() || allows(elements[offset_of_row(view, head, r) + j * view.stride_k]);
  }

  // The keys that a tensor shows each of its rows, as the passes find them.
  template <class E>
  std::vector<RowKeys> scan(const std::vector<E>& elements, const BroadcastView& view) const {
    const Head head(p, 0);
    const OwnRows own(p, view);
    std::vector<RowKeys> rows(own.count());
    for (int64_t r = 0; r < head.count; ++r) {
      RowKeys row{p.seqlen_k, 0, false};
      int64_t count = 0;
      const Range keys = keys_to_scan(p, own, own.index(head, r));
      for (int64_t j = keys.begin; j < keys.end; ++j)
        if (shown_by(elements, view, head, r, j)) row = {min(row.begin, j), j + 1, false}, ++count;
      row.holes = count < row.end - row.begin;
      rows[own.index(head, r)] = row;
    }
    return rows;
  }

  void expect(bool good, const char* what, int64_t a, int64_t b) const {
    if (good || ++failures > 10) return;
    std::printf(
        "%s: %ld %ld; %ld x %ld, group %ld, causal %d, q_offset %ld, window %ld %ld, ranges %ld, mask %d, bias %d\n",
        what, a, b, p.seqlen_q, p.seqlen_k, p.num_heads_q, p.mask.causal, p.mask.q_offset, p.mask.window_left,
        p.mask.window_right, ranges.empty() ? 0 : p.mask.num_ranges, !shown.empty(), !bias.empty());
  }

  void check_rows(const Mask& mask, int64_t r0, int64_t rows) const {
    Range any{p.seqlen_k, 0};
    for (int64_t j = 0; j < p.seqlen_k; ++j)
      for (int64_t r = r0; r < r0 + rows; ++r)
        if (sees(r, j)) any = {min(any.begin, j), j + 1};
    const Range said = mask.keys_of_any(r0, rows);
    expect(any.empty() || (said.begin <= any.begin && any.end <= said.end), "keys_of_any", r0, rows);
    if (p.mask.blocks && r0 % kBlockRows == 0 && (rows % kBlockRows == 0 || r0 + rows == mask.head.count))
      expect(any.empty() ? said.empty() : said.begin == any.begin && said.end == any.end, "keys_of_any exactly", r0,
             rows);
    for (int64_t n0 = 0; n0 < p.seqlen_k; n0 += 3)
      for (int64_t keys : {1, 3, 7}) {
        if (n0 + keys > p.seqlen_k) continue;
        int64_t count = 0;
        for (int64_t r = r0; r < r0 + rows; ++r)
          for (int64_t j = n0; j < n0 + keys; ++j) count += sees(r, j);
        const bool all = mask.sees_all(r0, rows, n0, keys);
        expect(!all || count == rows * keys, "sees_all", r0, n0);
        if (!p.mask.blocks) expect(all == (count == rows * keys), "sees_all by formula", r0, n0);
        expect(mask.in_any(r0, rows, n0, keys) || count == 0, "in_any", r0, n0);
      }
  }

  void check_keys(const Mask& mask, int64_t n0, int64_t keys) const {
    const Head& head = mask.head;
    for (const Range within : {Range{0, head.count}, Range{kBlockRows, min(3 * kBlockRows, head.count)}}) {
      if (within.empty()) continue;
      const Range any = mask.rows_of_any(n0, keys, within), all = mask.rows_of_all(n0, keys);
      Range exact{within.end, within.begin};
      for (int64_t r = within.begin; r < within.end; ++r) {
        int64_t count = 0;
        for (int64_t j = n0; j < n0 + keys; ++j) count += sees(r, j);
        if (count > 0) exact = {min(exact.begin, r), r + 1};
        expect(count == 0 || any.contains(r), "rows_of_any", n0, r);
        expect(count == keys || !all.contains(r), "rows_of_all", n0, r);
        if (!p.mask.blocks) expect(count < keys || all.contains(r), "all rows_of_all", n0, r);
      }
      if (!p.mask.blocks)
        expect(exact.empty() ? any.empty() : any.begin == exact.begin && any.end == exact.end, "rows_of_any exactly",
               n0, keys);
    }
  }

  void check() {
    const Head head(p, 0);
    if (!ranges.empty()) p.mask.key_ranges = ranges.data();
    if (!shown.empty()) {
      p.mask.shown.data = shown.data();
      mask_rows = scan(shown, p.mask.shown), p.mask.mask_rows = mask_rows.data();
    }
    if (!bias.empty()) {
      p.score.bias.type = BiasType::kFloat32, p.score.bias.data = bias.data();
      bias_rows = scan(bias, p.score.bias), p.mask.bias_rows = bias_rows.data();
    }
    for (int64_t r = 0; r < head.count; ++r)
      for (int64_t j = 0; j < p.seqlen_k; ++j) seen.push_back(is_visible(head, r, j));
    const Mask mask(p, head);
    if (needs_blocks(p)) {
      blocks.resize(Mask::count_summaries(p));
      p.mask.blocks = blocks.data();
      for (int64_t r0 = 0; r0 < head.count; r0 += kBlockRows)
        mask.summarize<float>(r0, min(kBlockRows, head.count - r0));
    }
    for (int64_t r = 0; r < head.count; ++r) {
      Range exact{0, 0};
      for (int64_t j = 0; j < p.seqlen_k; ++j) {
        if (sees(r, j)) exact = {exact.empty() ? j : exact.begin, j + 1};
        expect(mask.sees<float>(r, j) == sees(r, j), "sees", r, j);
        if (!mask.any_holes(r, 1)) expect(mask.sees<float>(r, j) == sees(r, j), "no holes", r, j);
      }
      const Range said = mask.exact_keys_of<float>(r);
      expect(exact.empty() ? said.empty() : said.begin == exact.begin && said.end == exact.end, "keys_of", r,
             exact.end);
    }
    for (int64_t r0 = 0; r0 < head.count; r0 += p.mask.blocks ? kBlockRows : 5)
      for (int64_t rows : {int64_t{1}, int64_t{9}, 2 * kBlockRows, head.count})
        check_rows(mask, r0, min(rows, head.count - r0));
    for (int64_t n0 = 0; n0 < p.seqlen_k; n0 += 3)
      for (int64_t keys : {1, 5, 20}) check_keys(mask, n0, min(keys, p.seqlen_k - n0));
  }
};

uint64_t state = 1;
int64_t below(int64_t n) {
  state = state * 6364136223846793005 + 1442695040888963407;
  return static_cast<int64_t>((state >> 33) % static_cast<uint64_t>(n));
}

// Draws a shape that broadcasts. Returns how many of five elements are to show a key.
int64_t draw_strides(const ForwardParams& p, BroadcastView& view) {
  const bool heads = below(2), queries = below(4) > 0, keys = below(8) > 0;
  view.stride_k = keys, view.stride_q = queries ? p.seqlen_k : 0;
  view.stride_h = heads ? p.seqlen_q * p.seqlen_k : 0;
  return 1 + below(4);
}

// Draws the sorted, disjoint intervals of a query; some touch, and some are empty.
void draw_ranges(int64_t seqlen_k, int64_t count, std::vector<int64_t>& ranges) {
  std::vector<int64_t> ends;
  for (int64_t n = 0; n < 2 * count; ++n) ends.push_back(below(seqlen_k + 1));
  std::sort(ends.begin(), ends.end());
  ranges.insert(ranges.end(), ends.begin(), ends.end());
}

void check_all() {
  constexpr int64_t kFar = INT64_MAX;
  for (int64_t group : {1, 3})
    for (int64_t seqlen_q : {1, 6, 37})
      for (int64_t seqlen_k : {1, 9, 41})
        for (bool causal : {false, true})
          for (int64_t q_offset :
               {seqlen_k - seqlen_q, int64_t{0}, int64_t{5}, int64_t{-7}, int64_t{60}, -kFar - 1, kFar})
            for (int64_t left : {int64_t{-1}, int64_t{0}, int64_t{4}, int64_t{1} << 62, kFar})
              for (int64_t right : {int64_t{-1}, int64_t{0}, int64_t{6}, kFar})
                for (int kind = 0; kind < 8; ++kind) {
                  Case one;
                  ForwardParams& p = one.p;
                  p.batch = p.num_heads_kv = 1, p.num_heads_q = group, p.seqlen_q = seqlen_q, p.seqlen_k = seqlen_k;
                  p.mask = {causal, q_offset, nullptr, left, right, nullptr, 0, 1, {}, nullptr, nullptr, nullptr};
                  if (kind & 1) {
                    p.mask.num_ranges = 1 + below(kMostRanges);
                    for (int64_t i = 0; i < seqlen_q; ++i) draw_ranges(seqlen_k, p.mask.num_ranges, one.ranges);
                  }
                  const int64_t elements = group * seqlen_q * seqlen_k;
                  if (kind & 2) {
                    const int64_t density = draw_strides(p, p.mask.shown);
                    for (int64_t i = 0; i < elements; ++i) one.shown.push_back(below(5) < density);
                  }
                  if (kind & 4) {
                    const int64_t density = draw_strides(p, p.score.bias);
                    for (int64_t i = 0; i < elements; ++i)
                      one.bias.push_back(below(5) < density ? 0 : -__builtin_inff());
                  }
                  one.check();
                }
}

}  // namespace
}  // namespace pyattn::PYATTN_ISA

int main() {
  pyattn::PYATTN_ISA::check_all();
  if (pyattn::PYATTN_ISA::failures == 0) std::puts("ok");
  return pyattn::PYATTN_ISA::failures != 0;
}
