"""Attention over a cache: queries at the newest positions, over the keys and values of all positions so far."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from pyattn import ops
from pyattn.attention import attention
from pyattn.cache import paged_attention
from pyattn.cache.call_gradients import keys_and_values
from pyattn.cache.kv_cache import KVCache
from pyattn.cache.slots import check_ring, masks_in_slots
from pyattn.derivatives.transforms import transforming
from pyattn.options.attention_options import AttentionOptions
from pyattn.options.autocast import cast
from pyattn.options.checks import check_tensor, check_type, has_values, refuse_positional
from pyattn.options.parse import check_known, parse, takes_options
from pyattn.options.polarity import warn_if_all_hidden
from pyattn.options.schema import LEARNED, PLACES
from pyattn.options.tensor_types import check_outside
from pyattn.weights.max_score import of_heads, with_largest_scores

__all__ = ["attention_with_cache"]


@takes_options
def attention_with_cache(
    q: Tensor,
    cache: KVCache,
    *positional: object,
    return_lse: bool = False,
    return_max_score: bool = False,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, ...]:
    """:func:`pyattn.attention` over a cache to which the queries' own keys have already been appended.

    Query ``i`` of sequence ``b`` is at position ``cache.lengths[b] - Sq + i``, so the last query is at the newest key.
    The result equals the last rows of one call over all tokens. ::

        cache.lengths 3, Sq 1     1 1 1 . .          cache.lengths 4, Sq 2     1 1 1 0 .
                                                                               1 1 1 1 .

    After ``cache.append(k, v, lengths)``, q is padded like k: query ``i`` is at position ``before[b] + i``, where
    ``before`` is cache.lengths before that append. Queries from ``lengths[b]`` on are padding and have out 0, lse -inf
    (with sinks, the sink) and gradient 0. If q has more rows than k had, its last rows belong to that append, and its
    other rows directly precede them. If q has fewer rows, or a sequence's length has changed since, q holds the newest
    positions, as above. Only the last append matters: after several ragged appends, either call this function after
    each of them or pass q_offset. ::

        append of 2, lengths [2, 1], Sq 2     sequence 0, before 2   1 1 1 0 .      sequence 1, before 1   1 1 0 0 .
                                                                     1 1 1 1 .                             0 0 0 0 .
    Args:
        q: (B, Hq, Sq, D) in the cache's dtype: one token to decode, or a chunk of a prompt.
        cache: a :class:`KVCache`.
        return_lse: also return lse.
        return_max_score: also return max_score, after lse.
        options: as for :func:`pyattn.attention`, with these differences. q_offset: the position of query 0, an int or a
            (B,) int32 or int64 tensor; no query is then padding. Default: as above. window, key_ranges: they count
            positions and apply in addition to the cache's own window. bias: it has max_seqlen keys. mask: the same, or
            Sq keys, which are those at the queries' own positions, as of a drafted tree (:func:`pyattn.masks.tree`);
            the keys before and after them then take part.

    Without a ring buffer, the result has the same bits as :func:`pyattn.attention` over the keys so far, with three
    exceptions, in which it agrees up to rounding. The first is a ragged append. The second is a call with all of
    these: queries before the first key, a window with a left bound, and causal=False or a q_offset. The third is shared
    pages on a CPU, without gradients: if adjacent sequences share their first pages, as many of them for each prompt,
    and at least 30 MB of keys and values need not be read again for up to 8 queries each, then shared pages are read
    once for all of them and merged with each sequence's own (:mod:`pyattn.cache.shared_pages`).

    Over a cache with a ``kv_dtype``, the result is that over the numbers which its 8 bits stand for, computed in
    float32 and rounded once. With int8, up to 8 query rows of a KV head and their weights are first rounded to 16 bits,
    by the largest column of a query and the largest weight of 128 keys: exact sums of integers, and an error of about
    5e-5 of out.

    Returns:
        As for :func:`pyattn.attention`, differentiable in q, bias, alibi_slopes, sinks and relative_bias. Over pages
        and under torch.compile, backward has a copy, without pages of the whole storage; otherwise it raises an error
        if you append or reorder before it.

    Raises:
        ValueError, TypeError: as for :func:`pyattn.attention`; more than max_seqlen - left queries over a ring buffer;
            on the CPU, lengths set beyond the cache's size, and queries that see keys which a ring buffer has dropped.
        NotImplementedError: as for :func:`pyattn.attention`; over a ring buffer, whose slots are not positions,
            key_ranges, bias, and a mask with other than Sq keys; over a cache with a ``kv_dtype``, gradients,
            transforms of torch.func and ``selected``.
    """
    if positional:
        refuse_positional(attention_with_cache, positional)
    check_outside("attention_with_cache")
    check_known(attention_with_cache, options)
    check_tensor("q", q)
    check_type("cache", cache, KVCache)
    check_dimensions(q)
    seqlen_q = q.shape[2]
    check_ring(cache.window, cache.max_seqlen, seqlen_q, options)
    in_slots: AttentionOptions = options | masks_in_slots(cache, seqlen_q, options)
    results: tuple[Tensor, ...]
    try:
        if cache.kv_dtype is None and cache.block_table is None and not (return_lse or return_max_score or options):
            return attention(q, *keys_and_values(cache, q, in_slots), **in_slots)
        if cache.kv_dtype is not None:
            results = attention_in_8_bits(q, cache, return_max_score, **in_slots)
        elif cache.block_table is None:
            stored = keys_and_values(cache, q, in_slots)
            results = tuple(attention(q, *stored, return_lse=True, return_max_score=return_max_score, **in_slots))
        else:
            table = cache.block_table, cache.lengths, cache.max_seqlen
            results = paged_attention.attention(
                q, cache.k, cache.v, *table, return_max_score=return_max_score, **in_slots
            )
    except (ValueError, TypeError) as error:  # checking beforehand would cost 1 % of a token's time
        raise (misfit(q, cache) or error) from None
    out, lse, *most = results
    if not return_lse and options.get("mask") is not None and cache.lengths.is_cpu and has_values(cache.lengths):
        warn_if_all_hidden(lse, int(cache.lengths.sum()))
    return (out, lse, *most) if return_lse else (out, *most) if most else out


def check_dimensions(q: Tensor) -> None:
    """ValueError unless q has those of a cache's rows: further leading ones would not say which query is the newest."""
    if q.dim() != 4:
        raise ValueError(
            f"pyattn: over a cache, q must have 4 dimensions (batch, num_heads, seqlen, head_dim), got {tuple(q.shape)}"
        )


def misfit(q: Tensor, cache: KVCache) -> Exception | None:
    """Returns an error that names the cache instead of k and v, or None if q fits the cache."""
    if q.dim() != 4:
        return None
    batch, num_heads_q, _, head_dim = q.shape
    k, batch_of_cache = cache.k, cache.lengths.shape[0]
    num_heads_kv = k.shape[1 if cache.block_table is None else 2]
    if batch != batch_of_cache:
        return ValueError(f"pyattn: q must have the cache's batch, got {batch} and {batch_of_cache}")
    if head_dim != k.shape[3]:
        return ValueError(f"pyattn: q must have the cache's head_dim, got {head_dim} and {k.shape[3]}")
    if num_heads_q % num_heads_kv if num_heads_kv else num_heads_q:
        return ValueError(
            f"pyattn: num_heads_q must be a multiple of the cache's num_heads_kv, got {num_heads_q} and {num_heads_kv}"
        )
    if q.device != k.device:
        return ValueError(f"pyattn: q must be on the cache's device, got {q.device} and {k.device}")
    if q.dtype != cache.dtype and not torch._C._is_any_autocast_enabled():
        return TypeError(f"pyattn: q must have the cache's dtype, got {q.dtype} and {cache.dtype}")
    return None


def check_no_gradient(q: Tensor, kv_dtype: torch.dtype, known: tuple[Any, ...]) -> None:
    """NotImplementedError for what only caches in their own dtype compute."""
    learned = [known[PLACES[name]] for name in LEARNED if PLACES[name] < len(known)]
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, *learned)):
        raise NotImplementedError(
            f"pyattn: a cache with kv_dtype={kv_dtype} has no gradients: read it under torch.no_grad(), got q or a "
            "learned option that requires them"
        )
    if not torch.compiler.is_compiling() and transforming():
        raise NotImplementedError(
            f"pyattn: a cache with kv_dtype={kv_dtype} takes no transforms of torch.func, got a call within one"
        )
    if len(known) > PLACES["selected"] and (selected := known[PLACES["selected"]]) is not None:
        raise NotImplementedError(
            f"pyattn: a cache with kv_dtype={kv_dtype} takes no selected, got one of shape {tuple(selected.shape)}"
        )


def attention_in_8_bits(q: Tensor, cache: Any, return_max_score: bool, **options: Any) -> tuple[Tensor, ...]:
    """``(out, lse)`` or ``(out, lse, max_score)`` over a cache of 8 bits; masks in ``options`` count its slots."""
    known = parse(attention_in_8_bits, options, q.device)
    check_no_gradient(q, cache.kv_dtype, known)
    if torch._C._is_any_autocast_enabled():
        q = cast(q)
    if q.dtype != cache.dtype:
        raise TypeError(f"pyattn: q must have the cache's dtype, got {q.dtype} and {cache.dtype}")
    values = list(known)
    for name in LEARNED:
        if PLACES[name] < len(values) and (t := values[PLACES[name]]) is not None:
            values[PLACES[name]] = t.to(torch.float32)
    q32 = q.to(torch.float32)
    if cache.rotation > 1 and q.shape[3] == cache.k.shape[3]:
        q32 = ops.cache_rotate(q32, cache.rotation, False)
    seqlen_k = cache.k.shape[2] if cache.block_table is None else cache.max_seqlen
    scales = cache.k_scale.squeeze(-1), cache.v_scale.squeeze(-1)
    attend = partial(_attend, q32, cache.k, cache.v, *scales, cache.block_table, seqlen_k)
    if return_max_score:
        out, lse, largest = with_largest_scores(attend, tuple(values))
        most: tuple[Tensor, ...] = (of_heads(largest),)
    else:
        out, lse, _, _ = attend(tuple(values))
        most = ()
    if cache.shared_values and cache.rotation > 1:
        out = ops.cache_rotate(out, cache.rotation, True)
    return out.to(q.dtype), lse, *most


def _attend(*tensors_and_options: Any) -> tuple[Tensor, ...]:
    *tensors, known = tensors_and_options
    return ops.attention_bytes_forward(*tensors, *known)
