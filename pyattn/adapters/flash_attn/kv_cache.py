"""Attention over a cache that the caller owns: flash_attn_with_kvcache."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from pyattn import attention, ops
from pyattn.adapters.flash_attn.arguments import Window, named, with_inf, without_gradient
from pyattn.adapters.flash_attn.cache import checks, eight_bits
from pyattn.adapters.flash_attn.cache.layout import layout_of, places_of, ranges_of, sequences_of
from pyattn.adapters.flash_attn.rotary import turn_at
from pyattn.cache import paged_attention, pages
from pyattn.options import UNBOUNDED
from pyattn.options.checks import check_between, check_size, check_type
from pyattn.options.tensor_types import check_outside


@without_gradient
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
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
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
        k_descale, v_descale: as in FlashAttention-3, float32 (B, Hkv): factors of a cache of int8 or float8_e4m3fn,
            which holds k / k_descale and v / v_descale, as new k and v do; default: 1. On the CPU.

    Returns:
        ``out`` (B, Sq, Hq, Dv), or ``(out, softmax_lse)`` with softmax_lse (B, Hq, Sq), +inf for a query that sees no
        key. As in flash-attn, no gradient is recorded.

    Raises:
        ValueError, TypeError: as for :func:`pyattn.attention`; lengths outside the cache, which is then left as it was;
            integer tensors that are not int32; k without v or cache_seqlens; a rotary embedding without k, too wide, or
            with fewer positions than the cache; k_descale for a cache of q's dtype; block_table together with
            cache_batch_idx or cache_leftpad.
        NotImplementedError: 8 bits on a GPU, with q in float64, or with a rotary embedding of k.

    >>> k_cache, v_cache = torch.zeros(2, 2, 100, 4, 64).unbind()
    >>> q, k, v = torch.randn(3, 2, 1, 4, 64).unbind()
    >>> flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=7, causal=True).shape
    torch.Size([2, 1, 4, 64])
    """
    check_outside("flash_attn_with_kvcache")
    options: dict[str, Any] = {"causal": causal}
    plain = softmax_scale is None and alibi_slopes is None and type(softcap) is float and softcap == 0.0
    if not plain or window_size is not UNBOUNDED:
        options = named(0.0, softmax_scale, causal, window_size, softcap, alibi_slopes)
    moving = causal or options.get("window", UNBOUNDED) is not UNBOUNDED
    check_size("num_splits", num_splits)
    checks.check_shapes(q, k_cache, v_cache)
    kv_dtype = k_cache.dtype if k_cache.dtype in eight_bits.DTYPES else None
    if kv_dtype is not None or k_descale is not None or v_descale is not None:
        descale = {"k_descale": k_descale, "v_descale": v_descale}
        eight_bits.check_descale(q, k_cache, k, rotary_cos is not None, **descale)
    if k is not None or v is not None:
        checks.check_new(q, k_cache, v_cache, k, v, cache_seqlens)
    batch, seqlen_q = q.shape[:2]
    layout = layout_of(k_cache, batch, cache_batch_idx, cache_leftpad, block_table)
    capacity = k_cache.shape[1] if layout is None else layout.capacity
    new = 0 if k is None else k.shape[1]
    options["causal"] = causal or seqlen_q == 1  # the last position sees every key
    if k is not None:
        checks.check_options(q, options)
    length = checks.equal_length(cache_seqlens, batch, capacity, new)
    in_order = layout is None and kv_dtype is None and cache_leftpad is rotary_cos is rotary_sin is None and q.is_cpu
    if length is not None and in_order and options["causal"]:
        options["q_offset"] = length + new - seqlen_q
        stored = sequences_of(k_cache, batch), sequences_of(v_cache, batch)
        if k is not None and v is not None:
            dense = k.is_cpu and v.is_cpu and k.layout is v.layout is torch.strided
            if dense and k_cache.is_contiguous() and v_cache.is_contiguous():  # costs 5 us less than the operator
                k_cache[:batch, length : length + new] = k
                v_cache[:batch, length : length + new] = v
            else:
                _append(stored, torch.full((batch,), length, device=q.device), k, v, capacity)
        if not return_softmax_lse:
            out: Tensor = attention(q.transpose(1, 2), *stored, **options)
            return out.transpose(1, 2)
        return _results(*attention(q.transpose(1, 2), *stored, return_lse=True, **options))
    before = checks.lengths_before(cache_seqlens, batch, capacity, q.device)
    checks.check_lengths(before, new, capacity, block_table)
    lengths = before + new if new else before
    if layout is not None:
        layout = layout.in_use(lengths, k_cache.shape[0])
    options["q_offset"] = lengths - seqlen_q
    if cache_leftpad is not None or not options["causal"]:
        options["key_ranges"] = ranges_of(cache_leftpad, lengths, seqlen_q)

    if rotary_cos is not None or rotary_sin is not None:
        check_type("rotary_interleaved", rotary_interleaved, bool)
        cos, sin, k = checks.check_rotary(rotary_cos, rotary_sin, q, k, capacity)
        places_q = before[:, None] + torch.arange(seqlen_q, device=q.device) * int(moving)
        check_between("cache_seqlens, plus i for query i,", places_q.flatten(), 0, len(cos) - 1)
        q = turn_at(places_q, q, cos, sin, rotary_interleaved)
        k = turn_at(places_of(before, new), k, cos, sin, rotary_interleaved)
    if kv_dtype is not None:  # torch copies no rows of float8
        k_cache, v_cache = (t.view(torch.int8) for t in (k_cache, v_cache))
        k, v = (None if t is None else t.view(torch.int8) for t in (k, v))
    heads, sequences = q.transpose(1, 2), None
    if block_table is None and cache_batch_idx is None:
        sequences = sequences_of(k_cache, batch), sequences_of(v_cache, batch)
    if k is not None and v is not None:
        if layout is None:  # also adds new to before
            assert sequences is not None
            _append(sequences, before, k, v, capacity)
        else:
            rows = layout.rows(places_of(before, new))
            k_cache.index_put_(rows, k)
            v_cache.index_put_(rows, v)

    if kv_dtype is not None:
        factors = k_descale, v_descale
        table = None if sequences is not None or layout is None else layout.table
        more = pages.LEAST if layout is not None and layout.page_size < pages.LEAST else 0
        stored = sequences or (pad(k_cache, (0, 0, 0, 0, 0, more)), pad(v_cache, (0, 0, 0, 0, 0, more)))
        of_k, of_v = (t.view(kv_dtype) for t in stored)
        out, lse = eight_bits.attention_in_8_bits(heads, of_k, of_v, factors, table, capacity, **options)
    elif sequences is not None:
        out, lse = attention(heads, *sequences, return_lse=True, **options)
    else:
        assert layout is not None
        if layout.page_size < pages.LEAST:  # a copy this small costs nothing
            k_cache, v_cache = (pad(cache, (0, 0, 0, 0, 0, pages.LEAST)) for cache in (k_cache, v_cache))
        out, lse = paged_attention.attention(heads, k_cache, v_cache, layout.table, lengths, capacity, **options)
    return _results(out, lse) if return_softmax_lse else out.transpose(1, 2)


def _append(sequences: tuple[Tensor, Tensor], before: Tensor, k: Tensor, v: Tensor, capacity: int) -> None:
    """Writes k and v at the positions from ``before`` on, to which it adds their number."""
    ops.cache_append(*sequences, before, torch.zeros_like(before), k.transpose(1, 2), v.transpose(1, 2), None, capacity)


def _results(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return out.transpose(1, 2), with_inf(lse)
