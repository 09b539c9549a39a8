"""The weights of queries over a cache."""

from typing import Any

import torch
from torch import Tensor

from pyattn.cache import KVCache
from pyattn.cached_attention import check_ring, in_slots_of
from pyattn.options import UNBOUNDED
from pyattn.weights import attention_weights


def weights_with_cache(
    q: Tensor,
    cache: KVCache,
    *,
    causal: bool = True,
    window: tuple[int, int] = UNBOUNDED,
    key_ranges: Tensor | None = None,
    bias: Tensor | None = None,
    **scores: Any,
) -> Tensor:
    """The weights that :func:`pyattn.attention_with_cache` gives the cache's values, by position.

    ``scores`` are its other arguments. The longest sequence's length is read on the host.

    Returns:
        (B, Hq, Sq, the most positions of a sequence). A ring buffer's positions that are not kept have weight 0.
    """
    lengths, used = cache.lengths, cache.lengths - cache.starts
    positions, slots = (int(n.max()) if len(n) else 0 for n in (lengths, used))
    check_ring(cache, q.shape[2], key_ranges, bias)
    masks = in_slots_of(cache, q.shape[2], causal=causal, q_offset=None, window=window, key_ranges=key_ranges)
    if masks["key_ranges"] is not None:
        masks["key_ranges"] = masks["key_ranges"].clamp(max=slots)
    if bias is not None and bias.shape[-1] != 1:
        bias = bias[..., :slots]
    weights = attention_weights(q, _keys(cache, slots), **masks, bias=bias, **scores)
    if cache.window is None:
        return weights
    slot = torch.arange(positions, device=lengths.device) - cache.starts[:, None]
    kept = (slot >= 0) & (slot < slots)
    index = torch.where(kept, slot, 0)[:, None, None].expand(*weights.shape[:3], -1)
    return weights.gather(-1, index).masked_fill(~kept[:, None, None], 0.0)


def _keys(cache: KVCache, slots: int) -> Tensor:
    """(B, Hkv, slots, D): the first slots of every sequence, those in pages copied."""
    if cache.block_table is None:
        return cache.k[:, :, :slots]
    pages = cache.block_table[:, : -(-slots // cache.k.shape[1])]
    return cache.k[pages].flatten(1, 2).transpose(1, 2)[:, :, :slots]
