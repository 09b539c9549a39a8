"""Attention weights over a cache, and sums of them, indexed by position."""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import Unpack

from pyattn.cache.attention import check_dimensions, misfit
from pyattn.cache.kv_cache import KVCache
from pyattn.cache.slots import check_ring, first_keys, masks_in_first_slots
from pyattn.options.attention_options import AttentionOptions
from pyattn.options.checks import check_tensor
from pyattn.options.parse import check_given
from pyattn.options.tensor_types import CACHES
from pyattn.weights.attention_weights import attention_weights
from pyattn.weights.checks import Reduce


def _weights(
    q: Tensor,
    cache: KVCache,
    *,
    lse: Tensor | None,
    heads: Sequence[int] | Tensor | None,
    rows: Sequence[int] | Tensor | None,
    reduce: Reduce,
    **options: Unpack[AttentionOptions],
) -> Tensor:
    """:func:`pyattn.attention_weights` over a cache."""
    check_tensor("q", q)
    check_given(attention_weights, options)
    if q.layout != torch.strided:
        raise NotImplementedError(f"pyattn: over a cache, q must be a dense tensor, got layout {q.layout}")
    check_dimensions(q)
    if (error := misfit(q, cache)) is not None:
        raise error
    check_ring(cache.window, cache.max_seqlen, q.shape[2], options)
    used = cache.lengths - cache.starts
    positions, slots = (int(n.max()) if len(n) else 0 for n in (cache.lengths, used))
    masks = masks_in_first_slots(cache, slots, q.shape[2], options)
    weights = attention_weights(q, first_keys(cache, slots), lse=lse, heads=heads, rows=rows, reduce=reduce, **masks)
    return weights if cache.window is None or reduce == "entropy" else _by_position(weights, cache.starts, positions)


def _by_position(weights: Tensor, starts: Tensor, positions: int) -> Tensor:
    """(B, .., slots of a ring buffer) -> (B, .., positions), 0 for positions that have no slot."""
    slot = torch.arange(positions, device=starts.device) - starts[:, None]
    kept = (slot >= 0) & (slot < weights.shape[-1])
    between = (slice(None), *[None] * (weights.dim() - 2))
    index = torch.where(kept, slot, 0)[between].expand(*weights.shape[:-1], -1)
    return weights.gather(-1, index).masked_fill(~kept[between], 0.0)


CACHES["attention_weights"] = _weights
