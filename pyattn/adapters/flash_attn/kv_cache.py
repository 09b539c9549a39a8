"""Attention over a cache that the caller owns: flash_attn_with_kvcache."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from pyattn import attention, ops
from pyattn.adapters.flash_attn.arguments import (
    Window,
    WrongValueError,
    check_dimensions,
    check_int32,
    check_together,
    named,
    with_inf,
)
from pyattn.cache import paged_attention, pages
from pyattn.nn.rotary import turn
from pyattn.options import UNBOUNDED
from pyattn.options.checks import check_between, check_size, check_tensor, check_type, has_values
from pyattn.options.tensor_types import check_outside


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNBOUNDED,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of q over cached keys and values, after appending k and v to the cache in place.

    Sequence ``b`` holds the positions ``cache_leftpad[b] <= j < cache_seqlens[b] + new``; its last query is at the last
    of them. ``q`` of Sq 2, slots 6, cache_seqlens 3, new 2, cache_leftpad 1, causal::

        k_cache     .  k1 k2 n0 n1 .
        query 0     0  1  1  1  0  0
        query 1     0  1  1  1  1  0

    Args:
        q: (B, Sq, Hq, D).
        k_cache, v_cache: (sequences, slots, Hkv, D) and (.., Dv), at least B sequences; with block_table (pages,
            page_size, Hkv, D or Dv), page_size at least 16.
        k, v: (B, new, Hkv, D) and (.., Dv), written to the positions from cache_seqlens on.
        rotary_cos, rotary_sin: (positions, R / 2) in q's dtype, at least as many positions as slots, R at most D.
            Rotates the first R columns of k by its positions, and of query ``i`` by position ``cache_seqlens + i``, or
            every query by ``cache_seqlens`` where neither causal nor a window is given.
        cache_seqlens: an int or (B,) int32, the length of each sequence before the call; default: all slots.
        cache_batch_idx: (B,) int32, the cache's sequence for each sequence of q; default: in order.
        cache_leftpad: (B,) int32, the first position in use; default: 0.
        block_table: (B, pages of a sequence), int32: position ``j`` is ``j % page_size`` of page
            ``block_table[b, j // page_size]``. Entries after a sequence's last page are not read.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as for :func:`flash_attn_func`.
        rotary_interleaved: whether column 2t rotates with 2t + 1, rather than t with t + R / 2.
        num_splits: into how many parts a GPU splits the keys; the results do not depend on it.
        return_softmax_lse: also return softmax_lse.

    Returns:
        ``out`` (B, Sq, Hq, Dv), or ``(out, softmax_lse)`` with softmax_lse (B, Hq, Sq), +inf for a query that sees no
        key. As in flash-attn, no gradient is recorded.

    Raises:
        ValueError, TypeError: as for :func:`pyattn.attention`; lengths outside the cache, which is then left as it was;
            integer tensors that are not int32; k without v or cache_seqlens; a rotary embedding without k, too wide, or
            with fewer positions than the cache; block_table together with cache_batch_idx or cache_leftpad.

    >>> k_cache, v_cache = torch.zeros(2, 2, 100, 4, 64).unbind()
    >>> q, k, v = torch.randn(3, 2, 1, 4, 64).unbind()
    >>> flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=7, causal=True).shape
    torch.Size([2, 1, 4, 64])
    """
    check_outside("flash_attn_with_kvcache")
    options = named(0.0, softmax_scale, causal, window_size, softcap, alibi_slopes)
    check_size("num_splits", num_splits)
    _check_shapes(q, k_cache, v_cache)
    if k is not None or v is not None:
        _check_new(q, k_cache, v_cache, k, v, cache_seqlens)
    batch, seqlen_q, page_size = q.shape[0], q.shape[1], k_cache.shape[1]
    table = _table(k_cache, batch, cache_batch_idx, cache_leftpad, block_table)
    capacity = table.shape[1] * page_size
    before = _lengths(cache_seqlens, batch, capacity, q.device)
    new = torch.arange(0 if k is None else k.shape[1], device=q.device)
    lengths = before + len(new)
    _check_lengths(before, len(new), capacity, block_table)
    if block_table is not None:
        starts = capacity * torch.arange(batch + 1, device=q.device)
        table, _ = ops.pages_in_use(block_table, starts, capacity, lengths, k_cache.shape[0], page_size)
    options["causal"] = causal or seqlen_q == 1  # the last position sees every key
    options["q_offset"] = lengths - seqlen_q
    if cache_leftpad is not None or not options["causal"]:
        options["key_ranges"] = _ranges(cache_leftpad, lengths, seqlen_q)

    if rotary_cos is not None or rotary_sin is not None:
        check_type("rotary_interleaved", rotary_interleaved, bool)
        _check_rotary(rotary_cos, rotary_sin, q, k, capacity)
        assert rotary_cos is not None and rotary_sin is not None and k is not None  # noqa: PT018
        moving = causal or options["window"] is not UNBOUNDED
        steps = torch.arange(seqlen_q, device=q.device) * int(moving)
        check_between("cache_seqlens, plus i for query i,", (before[:, None] + steps).flatten(), 0, len(rotary_cos) - 1)
        q, k = (
            turn(x, rotary_cos[places, None], rotary_sin[places, None], rotary_interleaved)
            for x, places in ((q, before[:, None] + steps), (k, before[:, None] + new))
        )
    if k is not None and v is not None:
        places = before[:, None] + new
        where = table.gather(1, places // page_size), places % page_size
        k_cache.index_put_(where, k)
        v_cache.index_put_(where, v)

    if block_table is None and cache_batch_idx is None:
        keys, values = (cache[:batch].transpose(1, 2) for cache in (k_cache, v_cache))
        out, lse = attention(q.transpose(1, 2), keys, values, return_lse=True, **options)
    else:
        if page_size < pages.LEAST and block_table is None:  # a copy this small costs nothing
            k_cache, v_cache = (pad(cache, (0, 0, 0, 0, 0, pages.LEAST)) for cache in (k_cache, v_cache))
        out, lse = paged_attention.attention(q.transpose(1, 2), k_cache, v_cache, table, lengths, capacity, **options)
    return (out.transpose(1, 2), with_inf(lse)) if return_softmax_lse else out.transpose(1, 2)


def _check_shapes(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Raises what attention would raise, before anything is written to the cache."""
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_dimensions(name, tensor, "batch, seqlen, num_heads, head_dim")
        if tensor.dtype != q.dtype:
            raise TypeError(f"pyattn: {name} must have q's dtype, {q.dtype}, got {tensor.dtype}")
    heads = k_cache.shape[2]
    if k_cache.shape[:3] != v_cache.shape[:3] or q.shape[3] != k_cache.shape[3] or q.shape[2] % max(1, heads):
        raise WrongValueError(
            "pyattn: q, k_cache and v_cache must have shapes (B, Sq, Hq, D), (sequences, slots, Hkv, D) and "
            "(sequences, slots, Hkv, Dv), Hq a multiple of Hkv, "
            f"got {tuple(q.shape)}, {tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )


def _check_new(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None, cache_seqlens: object
) -> None:
    check_together(k=k, v=v, cache_seqlens=cache_seqlens)
    assert k is not None and v is not None  # noqa: PT018
    for name, tensor, cache in (("k", k, k_cache), ("v", v, v_cache)):
        check_tensor(name, tensor)
        if tensor.dtype != cache.dtype:
            raise TypeError(f"pyattn: {name} must have the cache's dtype, {cache.dtype}, got {tensor.dtype}")
        if tensor.dim() != 4 or tensor.shape[:2] != (q.shape[0], k.shape[1]) or tensor.shape[2:] != cache.shape[2:]:
            raise WrongValueError(
                f"pyattn: {name} must have shape (batch, new, num_heads_kv, head_dim), for q {tuple(q.shape)} and a "
                f"cache {tuple(cache.shape)}, got {tuple(tensor.shape)}"
            )


def _table(
    k_cache: Tensor,
    batch: int,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    block_table: Tensor | None,
) -> Tensor:
    """(B, pages of a sequence), the pages of each sequence; without a block_table, a row of the cache is one page."""
    for name, tensor in (("cache_batch_idx", cache_batch_idx), ("cache_leftpad", cache_leftpad)):
        if tensor is not None:
            check_int32(name, tensor, (batch,))
            if block_table is not None:
                raise NotImplementedError(f"pyattn: a block_table takes no {name}, got both")
    if block_table is not None:
        check_int32("block_table", block_table)
        check_dimensions("block_table", block_table, "batch, pages")
        check_size("page_size", k_cache.shape[1], least=pages.LEAST)
        return block_table
    if cache_batch_idx is not None:
        check_between("cache_batch_idx", cache_batch_idx, 0, k_cache.shape[0] - 1)
        return cache_batch_idx[:, None].long()
    if k_cache.shape[0] < batch:
        raise WrongValueError(f"pyattn: k_cache must have q's {batch} sequences, got {k_cache.shape[0]}")
    return torch.arange(batch, device=k_cache.device)[:, None]


def _lengths(cache_seqlens: int | Tensor | None, batch: int, capacity: int, device: torch.device) -> Tensor:
    """Lengths before the call, (B,) int64."""
    if isinstance(cache_seqlens, Tensor):
        check_int32("cache_seqlens", cache_seqlens, (batch,))
        return cache_seqlens.long()
    length = capacity if cache_seqlens is None else cache_seqlens
    check_size("cache_seqlens", length)
    return torch.full((batch,), length, device=device)


def _check_lengths(before: Tensor, new: int, capacity: int, block_table: Tensor | None) -> None:
    if has_values(before) and ((before < 0) | (before > capacity - new)).any():
        whose = "of the cache" if block_table is None else "that block_table lists"
        raise WrongValueError(
            f"pyattn: each of cache_seqlens must be at least 0, and with {new} new positions at most the {capacity} "
            f"{whose}, got {before.tolist()}"
        )


def _check_rotary(cos: Tensor | None, sin: Tensor | None, q: Tensor, k: Tensor | None, capacity: int) -> None:
    check_together(rotary_cos=cos, rotary_sin=sin, k=k)
    assert cos is not None and sin is not None  # noqa: PT018
    for name, tensor in (("rotary_cos", cos), ("rotary_sin", sin)):
        check_dimensions(name, tensor, "positions, rotary_dim / 2")
        if tensor.dtype != q.dtype:
            raise TypeError(f"pyattn: {name} must have q's dtype, {q.dtype}, got {tensor.dtype}")
    if cos.shape != sin.shape or 2 * cos.shape[1] > q.shape[3] or cos.shape[0] < capacity:
        raise WrongValueError(
            f"pyattn: rotary_cos and rotary_sin must have at least the cache's {capacity} positions and at most "
            f"head_dim / 2 = {q.shape[3] // 2} columns, got {tuple(cos.shape)} and {tuple(sin.shape)}"
        )


def _ranges(cache_leftpad: Tensor | None, lengths: Tensor, seqlen_q: int) -> Tensor:
    """The keys [begin, end) of each query, (B, Sq, 2)."""
    begin = torch.zeros_like(lengths) if cache_leftpad is None else cache_leftpad.long()
    if cache_leftpad is not None and has_values(begin) and ((begin < 0) | (begin > lengths)).any():
        raise WrongValueError(
            f"pyattn: each of cache_leftpad must be between 0 and its sequence's length, {lengths.tolist()}, "
            f"got {begin.tolist()}"
        )
    return torch.stack([begin, lengths], -1)[:, None].expand(-1, seqlen_q, -1)
