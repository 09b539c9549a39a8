// Selected keys: turns a call whose queries list their keys into one over the listed keys, in which each list is sorted
// and key j of a query is the j-th key of its list. Kernels compute that call (SelectedParams); causal, window, offsets
// and key ranges become ranges of the list, and mask, bias, slopes and relative bias become a mask and a bias of the
// listed keys.
#pragma once

#include "ops/calls.h"
#include "ops/options.h"

namespace pyattn {

class SelectedCall {
 public:
  SelectedCall(const Tensor& q, const Tensor& k, const Options& options);

  // Lists positions of all pages, one page after another, where the lists name those of a sequence. k and v of the call
  // are then all pages for each sequence.
  void list_pages(const Tensor& block_table, int64_t pages, int64_t page_size);

  ForwardTensors forward(const Tensor& q, const Tensor& k, const Tensor& v) const;
  BackwardTensors backward(const Tensor& dout, const Saved& saved, const Flags& flags) const;

 private:
  const Options& whole_;     // of the call as given
  Options options_;          // of the call over the listed keys
  int64_t block_;            // keys of an entry; no more than there are
  Tensor entries_, ranges_;  // int32 (batch or 1, lists, seqlen_q, count); int64 (batch, lists, seqlen_q, ranges, 2)
  Tensor keys_;              // int64 (batch or 1, lists or heads, seqlen_q, listed keys), if options need it
  int64_t seqlen_k_;         // keys of a sequence
  int64_t listed_;           // how many keys a list has
  bool empty_;               // there are no entries, sequences, heads or keys
  bool shows_all_ = false;   // -inf in the bias is a weight of 0
  bool in_pages_ = false;    // list_pages was called

  void list_keys();
  void find_ranges(const Tensor& q, const Tensor& k);
  void take_options(const Tensor& q, const Tensor& k);
  Tensor distances(const Tensor& q, const Tensor& k, at::ScalarType type) const;
  void fill(const Options& options, ForwardParams& p, const Tensor& q, const Tensor& k, const Tensor& v,
            Kept& kept) const;
};

}  // namespace pyattn
