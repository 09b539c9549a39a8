"""A rank's part of the keys that several ranks' caches hold: attention over them, forward and backward."""

from typing import NamedTuple

import torch
from torch import Tensor

from pyattn import ops
from pyattn.cache import KVCache, paged_attention
from pyattn.cache.slots import masks_in_slots, over_slots
from pyattn.distributed.partial_results import BackwardInputs, PartialResults
from pyattn.masks.key_ranges import INTEGERS, are_ranges, check_ranges
from pyattn.options.attention_options import AttentionOptions
from pyattn.options.autocast import cast
from pyattn.options.checks import has_values
from pyattn.options.positions import explicit, shift
from pyattn.options.schema import LEARNED, Options


class SequenceLengths(NamedTuple):
    """The sequences of a call, as all ranks know them.

    Attributes:
        lengths: (ranks, B), the keys that each rank has of each sequence.
        rank: the number of this rank.
        own_keys: whether the mask's columns are the queries' own keys, not the slots of a rank's cache.
    """

    lengths: Tensor
    rank: int
    own_keys: bool

    @property
    def before(self) -> Tensor:
        """(B,): the keys on earlier ranks."""
        return self.lengths[: self.rank].sum(0)


Pages = tuple[Tensor, int] | None
"""The block table of k and v in pages, and how many slots a sequence has; None: no pages."""


def keys_of(q: Tensor, cache: KVCache, copied: bool) -> tuple[Tensor, Tensor, Pages]:
    """k (B, Hkv, slots, D), v (B, Hkv, slots, Dv) and None, or pages; ``copied`` and on a GPU, pages are copied."""
    k, v, table, slots = cast(cache.k), cast(cache.v), cache.block_table, cache.max_seqlen
    if table is None:
        return k, v, None
    if copied or q.is_cuda:
        return *paged_attention.copied(k, v, table, cache.lengths, slots), None
    return k, v, (table, slots)


class CachePart(NamedTuple):
    """The options of attention over this rank's keys, from the first of which their positions count.

    Attributes:
        options: the operators' options.
        first: whether this is rank 0, to which the gradient of sinks belongs.
    """

    options: Options
    first: bool

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pages: Pages) -> PartialResults:
        """The results over these keys alone, without the sinks."""
        options = self.options
        if options.sinks is not None:  # the operator checks their shape; -inf is none
            options = options._replace(sinks=torch.full_like(options.sinks, -torch.inf))
        if pages is None:
            return PartialResults.of(*ops.attention_forward(q, k, v, *options))
        return PartialResults.of(*ops.attention_paged_forward(q, k, v, *pages, *options))

    def backward(self, inputs: BackwardInputs, k: Tensor, v: Tensor) -> list[Tensor | None]:
        """The gradients of q and of LEARNED from these keys, given the results over all keys and the sinks."""
        dout, dlse, q, results, wanted, deterministic = inputs
        options = self.options if self.first else self.options._replace(sinks=None)
        mask = [want and (self.first or name != "sinks") for name, want in zip(LEARNED, wanted, strict=True)]
        rows = dout, dlse, q, k, v, *results
        dq, _, _, *found = ops.attention_backward(*rows, *options, deterministic, mask, True)
        return [dq, *(gradient if own else None for gradient, own in zip(found, mask, strict=True))]


def part_of(q: Tensor, cache: KVCache, whole: SequenceLengths, options: Options) -> CachePart:
    """The part that a cache holds; ``options`` are the whole call's, with this cache's columns of mask and bias."""
    before, length, total, seqlen_q = whole.before, cache.lengths, whole.lengths.sum(0), q.shape[2]
    mask, ranges = options.mask, options.key_ranges
    if ranges is not None and not are_ranges(ranges, len(total), seqlen_q):
        options = options._replace(key_ranges=None)  # the operator refuses them
    elif ranges is not None and ranges.dtype in INTEGERS and has_values(ranges) and not ranges.is_cuda:
        check_ranges(ranges, int(total.max()) if len(total) else 0)
    own = shift(explicit(options, len(total), q.shape[1], total - seqlen_q, q.device), 0, before, length)
    if mask is not None and whole.own_keys:
        mask = over_slots(mask, own.q_offsets, cache)
    elif mask is not None and mask.shape[-1:] == (seqlen_q,) and 1 < seqlen_q != cache.max_seqlen:
        raise ValueError(
            f"pyattn: mask must have {cache.max_seqlen} columns, the cache's slots, or {seqlen_q} on all ranks, the "
            f"queries' own keys, got {seqlen_q} on rank {whole.rank} but not on all"
        )
    masks: AttentionOptions = {
        "causal": own.causal,
        "q_offset": own.q_offsets,
        "window": own.window,
        "key_ranges": ranges if own.key_ranges is None else own.key_ranges,
        "mask": mask,
    }
    slots = masks_in_slots(cache, seqlen_q, masks)
    over_part = own._replace(q_offsets=slots["q_offset"], key_ranges=slots["key_ranges"], mask=slots["mask"])
    return CachePart(over_part, whole.rank == 0)
