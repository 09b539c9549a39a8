// Elements of masks and biases at listed keys, and the sums of their gradients.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <vector>

#include "ops/checks.h"

namespace pyattn {

// t with four dimensions, the first of which may be new.
inline Tensor four_dims(Tensor t) {
  while (t.dim() < 4) t = t.unsqueeze(0);
  return t;
}

// (batch or 1, lists, ...) -> (batch or 1, heads, ...), each list for the heads that share it.
inline Tensor of_heads(const Tensor& lists, int64_t heads) {
  auto sizes = lists.sizes().vec();
  if (sizes[1] == heads) return lists;
  sizes.insert(sizes.begin() + 2, heads / sizes[1]);
  return lists.unsqueeze(2).expand(sizes).flatten(1, 2);
}

// Elements of t, which broadcasts to (batch, heads, seqlen_q, n), at indices (batch or 1, heads or 1, seqlen_q, listed).
inline Tensor listed_elements(const Tensor& given, const Tensor& indices) {
  const Tensor t = four_dims(given);
  if (t.size(3) == 1) return t;
  std::array<int64_t, 4> sizes;
  for (size_t d = 0; d < 3; ++d) sizes[d] = std::max(t.size(d), indices.size(d));
  sizes[3] = t.size(3);
  const Tensor elements = t.expand(sizes);
  sizes[3] = indices.size(3);
  return at::gather(elements, 3, indices.expand(sizes));
}

// The sum over dims. at::sum shares out the terms of a single result among threads, so its bits depend on their number;
// of two results it computes each in one thread.
inline Tensor sum_in_order(const Tensor& t, at::IntArrayRef dims, bool keep, optional<at::ScalarType> type = {}) {
  int64_t summed = 1;
  for (const int64_t d : dims) summed *= t.size(d);
  if (t.numel() == 0 || summed < t.numel()) return t.sum(dims, keep, type);
  auto sizes = t.sizes().vec();
  sizes.insert(sizes.begin(), 2);
  std::vector<int64_t> after;
  for (const int64_t d : dims) after.push_back(d + 1);
  return t.unsqueeze(0).expand(sizes).sum(after, keep, type).select(0, 0);
}

// The transpose of listed_elements: sums values (batch, heads, seqlen_q, listed) for each element of a tensor of these
// sizes. Dimensions that the tensor does not have are added up in order, so sums don't depend on threads.
inline Tensor sum_elements(const Tensor& values, const Tensor& indices, at::IntArrayRef given) {
  std::vector<int64_t> sizes(4 - given.size(), 1);
  sizes.insert(sizes.end(), given.begin(), given.end());
  std::vector<int64_t> kept, summed, at_once;
  for (int64_t d = 0; d < 4; ++d) {
    if (d < 3 && sizes[d] > 1)
      kept.push_back(d);
    else if (values.size(d) > 1 && (sizes[3] == 1 || (d < 3 && indices.size(d) == 1)))
      at_once.push_back(d);
    else
      summed.push_back(d);
  }
  Tensor sums = values, places = indices;
  if (!at_once.empty()) sums = sum_in_order(sums, at_once, true);
  if (sizes[3] == 1) return sums.sum_to_size(sizes).reshape(given);
  places = places.expand(sums.sizes());
  std::vector<int64_t> order = kept, shape;
  order.insert(order.end(), at_once.begin(), at_once.end());
  order.insert(order.end(), summed.begin(), summed.end());
  for (const int64_t d : kept) shape.push_back(sizes[d]);
  const auto flat = [&](const Tensor& t) {
    auto flattened = shape;
    flattened.push_back(-1);
    return t.permute(order).reshape(flattened);
  };
  shape.push_back(sizes[3]);
  Tensor result = at::zeros(shape, values.options());
  shape.pop_back();
  return result.scatter_add_(-1, flat(places), flat(sums)).reshape(given);
}

}  // namespace pyattn
