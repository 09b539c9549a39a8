"""Attention over a cache: queries of the newest positions, keys and values of all so far."""

from typing import Any, Literal, overload

import torch
from torch import Tensor

from pyattn import pages
from pyattn.arguments import check_tensor, check_type, hide_catch_all, int64_of, refuse
from pyattn.cache import KVCache
from pyattn.functional import attention
from pyattn.options import UNBOUNDED
from pyattn.ring import in_slots
from pyattn.visible import check_ranges

__all__ = ["attention_with_cache"]


@overload
def attention_with_cache(
    q: Tensor,
    cache: KVCache,
    *,
    causal: bool = True,
    q_offset: int | Tensor | None = None,
    window: tuple[int, int] | None = (-1, -1),
    key_ranges: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = 0.0,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float | None = 0.0,
    dropout_seed: int | Tensor | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def attention_with_cache(
    q: Tensor,
    cache: KVCache,
    *,
    causal: bool = True,
    q_offset: int | Tensor | None = None,
    window: tuple[int, int] | None = (-1, -1),
    key_ranges: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = 0.0,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float | None = 0.0,
    dropout_seed: int | Tensor | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


@hide_catch_all
def attention_with_cache(
    q: Tensor,
    cache: KVCache,
    *positional: object,
    causal: bool = True,
    q_offset: int | Tensor | None = None,
    window: tuple[int, int] | None = UNBOUNDED,
    key_ranges: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = 0.0,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float | None = 0.0,
    dropout_seed: int | Tensor | None = None,
    return_lse: bool = False,
    **named: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`pyattn.attention` of queries over the keys in a cache, the queries' own appended before.

    Query ``i`` of sequence ``b`` stands at position ``cache.lengths[b] - Sq + i``: the last query is the newest key's.
    The result is that of the last rows of one call over all tokens. ::

        cache.lengths 3, Sq 1     1 1 1 . .          cache.lengths 4, Sq 2     1 1 1 0 .
                                                                               1 1 1 1 .
    Args:
        q: (B, Hq, Sq, D) in the cache's dtype: one token to decode, or a chunk of a prompt.
        cache: a :class:`KVCache`.
        q_offset: position of query 0, an int or (B,) int64. After an append with lengths of its own, pass what
            cache.lengths held before it (a clone); queries that do not count then see no more than the others.
        window, key_ranges: in positions, on top of the cache's own window.
        bias: as for :func:`pyattn.attention`, with max_seqlen keys.
        causal, softmax_scale, softcap, alibi_slopes, sinks, dropout_p, dropout_seed, return_lse: as there.

    Returns:
        As :func:`pyattn.attention`, differentiable in q, bias, alibi_slopes and sinks. An append or reorder between
        forward and backward makes backward raise, unless the cache has pages, of which backward has a copy.

    Raises:
        ValueError, TypeError: as :func:`pyattn.attention`; more than max_seqlen - W + 1 queries over a ring; on the
            CPU, a q_offset where query 0 sees keys that the ring may have dropped.
        NotImplementedError: as there; key_ranges or bias over a ring, whose slots are not positions.
    """
    if positional or named:
        refuse(attention_with_cache, positional, named)
    window = UNBOUNDED if window is None else window
    q_offset = int64_of(q_offset) if isinstance(q_offset, Tensor) else q_offset
    check_tensor("q", q)
    check_type("cache", cache, KVCache)
    seqlen_q = q.shape[2] if q.dim() == 4 else 0  # attention refuses q of other dimensions
    newest = q_offset is None
    if cache.window is not None:
        if key_ranges is not None or bias is not None:
            wrong = "bias" if key_ranges is None else "key_ranges"
            raise NotImplementedError(f"pyattn: a cache with a window takes no {wrong}, got window={cache.window}")
        state = cache.lengths, cache.starts, cache.window, cache.max_seqlen
        window, q_offset = in_slots(*state, window=window, q_offset=q_offset, seqlen_q=seqlen_q)
    elif q_offset is None:
        q_offset = cache.lengths - seqlen_q
    if not (causal and newest):
        key_ranges = _used(key_ranges, cache, seqlen_q)
    options: dict[str, Any] = {
        "causal": causal,
        "q_offset": q_offset,
        "window": window,
        "key_ranges": key_ranges,
        "softmax_scale": softmax_scale,
        "softcap": softcap,
        "bias": bias,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "dropout_p": dropout_p,
        "dropout_seed": dropout_seed,
    }
    if cache.block_table is None:
        out, lse = attention(q, cache.k, cache.v, return_lse=True, **options)
    else:
        where = cache.block_table, cache.lengths, cache.max_seqlen
        out, lse = pages.attention(q, cache.k, cache.v, *where, **options)
    return (out, lse) if return_lse else out


def _used(key_ranges: Tensor | None, cache: KVCache, seqlen_q: int) -> Tensor:
    """The slots in use, [0, length), in these ranges; a causal mask of the newest queries hides the rest itself."""
    end = (cache.lengths - cache.starts).unsqueeze(1).expand(-1, seqlen_q)
    if key_ranges is None:
        return torch.stack([torch.zeros_like(end), end], -1)
    check_tensor("key_ranges", key_ranges)
    if key_ranges.shape not in ((1, seqlen_q, 2), (*end.shape, 2)):
        return key_ranges  # which attention refuses
    if not key_ranges.is_cuda:  # whose kernels clamp them, for nobody reads them here
        check_ranges(key_ranges, cache.max_seqlen)
    first, behind_last = key_ranges.unbind(-1)
    end = torch.minimum(behind_last, end)
    return torch.stack([torch.minimum(first, end), end], -1)
