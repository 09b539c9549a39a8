"""The weights of queries over a cache."""

import torch
from torch import Tensor
from typing_extensions import Unpack

from pyattn.cache import KVCache
from pyattn.cached_attention import check_ring, masks_in_slots
from pyattn.options import AttentionOptions
from pyattn.weights import attention_weights


def weights_with_cache(q: Tensor, cache: KVCache, **options: Unpack[AttentionOptions]) -> Tensor:
    """The weights that :func:`pyattn.attention_with_cache` gives the cache's values, by position.

    The longest sequence's length is read on the host.

    Returns:
        (B, Hq, Sq, the most positions of a sequence). A ring buffer's positions that are not kept have weight 0.
    """
    lengths, used = cache.lengths, cache.lengths - cache.starts
    positions, slots = (int(n.max()) if len(n) else 0 for n in (lengths, used))
    check_ring(cache, q.shape[2], options)
    options |= masks_in_slots(cache, q.shape[2], options)
    if (key_ranges := options["key_ranges"]) is not None:
        options["key_ranges"] = key_ranges.clamp(max=slots)
    options["mask"], options["bias"] = (_first(options.get("mask"), slots), _first(options.get("bias"), slots))
    weights = attention_weights(q, _keys(cache, slots), **options)
    if cache.window is None:
        return weights
    slot = torch.arange(positions, device=lengths.device) - cache.starts[:, None]
    kept = (slot >= 0) & (slot < slots)
    index = torch.where(kept, slot, 0)[:, None, None].expand(*weights.shape[:3], -1)
    return weights.gather(-1, index).masked_fill(~kept[:, None, None], 0.0)


def _first(pairs: Tensor | None, slots: int) -> Tensor | None:
    """The columns of a mask or a bias for the first slots."""
    return pairs if pairs is None or pairs.shape[-1] == 1 else pairs[..., :slots]


def _keys(cache: KVCache, slots: int) -> Tensor:
    """(B, Hkv, slots, D): the first slots of every sequence, those in pages copied."""
    if cache.block_table is None:
        return cache.k[:, :, :slots]
    pages = cache.block_table[:, : -(-slots // cache.k.shape[1])]
    return cache.k[pages].flatten(1, 2).transpose(1, 2)[:, :, :slots]
