"""FlashAttention 3's flash_attn_with_kvcache: over a cache that the caller owns, also for packed queries and tokens."""

from typing import Any

import torch
from torch import Tensor

from pyattn import attention_varlen
from pyattn.adapters.flash_attn.arguments import Window, WrongValueError, check_int32, equal_lengths, named
from pyattn.adapters.flash_attn.hopper.arguments import Descales, check_hints, check_lengths, chunk_of, prepared
from pyattn.adapters.flash_attn.hopper.cache_layout import cache_of, lengths_before, new_tokens
from pyattn.adapters.flash_attn.hopper.tokens import rotary_tables, tokens_of
from pyattn.adapters.flash_attn.rotary import turn_at
from pyattn.options import UNBOUNDED
from pyattn.options.checks import check_between, check_size, check_type


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = UNBOUNDED,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention of q over cached keys and values, after appending k and v to the cache in place.

    Sequence ``b`` holds the positions ``cache_leftpad[b] <= j < cache_seqlens[b] + new``; its last query is at the last
    of them, as in :func:`pyattn.adapters.flash_attn.flash_attn_with_kvcache`.

    Args:
        q: (B, Sq, Hq, D); with cu_seqlens_q, (total_q, Hq, D).
        k_cache, v_cache: (sequences, slots, Hkv, D) and (.., Dv), at least B sequences; with page_table (pages,
            page_size, Hkv, D or Dv), of any page_size. Pages of fewer than 16 positions are copied in each call.
        k, v: (B, new, Hkv, D) and (.., Dv), or with cu_seqlens_k_new (total_new, Hkv, ..), written to the positions
            from cache_seqlens on.
        qv: like q, with Dv columns, as for :func:`flash_attn_func`; the cache is copied.
        rotary_cos, rotary_sin: (positions, R / 2) in q's dtype, at least as many positions as slots, R at most D.
            Rotates the first R columns of new token ``i`` by position ``rotary_seqlens + i``, and of query ``i`` by the
            same, or every query by ``rotary_seqlens`` where neither causal, a window nor chunks are given.
        cache_seqlens: an int or (B,) int32, the length of each sequence before the call; default: all slots.
        cache_batch_idx: (B,) int32, the cache's sequence for each sequence of q; default: in order.
        cache_leftpad: (B,) int32, the first position in use; default: 0. Chunks are counted from there.
        page_table: (B, pages of a sequence), int32: position ``j`` is ``j % page_size`` of page
            ``page_table[b, j // page_size]``. Entries after a sequence's last page are not read.
        cu_seqlens_q, cu_seqlens_k_new: (B + 1,), int32, where the queries and the new tokens of each sequence begin.
        max_seqlen_q: an upper bound on the queries of a sequence; default: the longest.
        rotary_seqlens: (B,) int32; default: cache_seqlens.
        q_descale, k_descale, v_descale, softmax_scale, causal, window_size, attention_chunk, softcap, num_splits,
            pack_gqa, sm_margin: as for :func:`flash_attn_func`.
        rotary_interleaved: whether column 2t rotates with 2t + 1, rather than t with t + R / 2.
        scheduler_metadata: the result of :func:`get_scheduler_metadata`; it has no effect.
        return_softmax_lse: also return softmax_lse.

    Returns:
        ``out`` (B, Sq, Hq, Dv) or (total_q, Hq, Dv), or FlashAttention 3's ``(out, softmax_lse, out_accum,
        softmax_lse_accum)``: softmax_lse (B, Hq, Sq) or (Hq, total_q), -inf for a query that sees no key, and two empty
        tensors, the parts of a split of the keys. As there, no gradient is recorded.

    Raises:
        ValueError, TypeError: as for :func:`pyattn.attention_varlen`; lengths outside the cache, which is then left as
            it was; integer tensors that are not int32; k without v or cache_seqlens; a rotary embedding without k, too
            wide, or with fewer positions than the cache.
        NotImplementedError: page_table with cache_batch_idx; a rotary embedding, or qv, in float8.

    >>> k_cache, v_cache = torch.zeros(2, 2, 100, 4, 64).unbind()
    >>> q, k, v = torch.randn(3, 2, 1, 4, 64).unbind()
    >>> flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=7, causal=True).shape
    torch.Size([2, 1, 4, 64])
    """
    options = named(0.0, softmax_scale, causal, window_size, softcap, None)
    check_type("return_softmax_lse", return_softmax_lse, bool)
    check_hints(num_splits, pack_gqa, sm_margin)
    check_size("attention_chunk", attention_chunk)
    if scheduler_metadata is not None:
        check_int32("scheduler_metadata", scheduler_metadata)
    queries = tokens_of("q", q, cu_seqlens_q)
    batch = queries.batch
    cache = cache_of(k_cache, v_cache, q, batch, cache_batch_idx, page_table)
    before = lengths_before(cache_seqlens, batch, cache.capacity, q.device)
    new = (
        None if k is None and v is None else new_tokens(k, v, cu_seqlens_k_new, cache_seqlens, k_cache, v_cache, batch)
    )
    lengths = before if new is None else before + new[0].lengths
    if (lengths > cache.capacity).any():
        raise WrongValueError(
            f"pyattn: each of cache_seqlens, and the new positions, must be at most the {cache.capacity} of the cache, "
            f"got {before.tolist()} and {[] if new is None else new[0].lengths.tolist()}"
        )
    cache.check_pages(lengths)
    begin = torch.zeros_like(lengths)
    if cache_leftpad is not None:
        begin = check_lengths("cache_leftpad", cache_leftpad, before)
    most = queries.longest(max_seqlen_q)
    inputs_qv = None if qv is None else tokens_of("qv", qv, cu_seqlens_q).values
    values = queries.values
    if rotary_cos is not None or rotary_sin is not None or rotary_seqlens is not None:
        starts = (
            before if rotary_seqlens is None else check_lengths("rotary_seqlens", rotary_seqlens, before * 0 + 2**31)
        )
        cos, sin = rotary_tables(rotary_cos, rotary_sin, q, new, cache.capacity)
        check_type("rotary_interleaved", rotary_interleaved, bool)
        moving = causal or options["window"] is not UNBOUNDED or attention_chunk > 0
        assert new is not None
        turned = []
        for tokens, step in ((queries, int(moving)), (new[0], 1)):
            places = starts[tokens.rows] + tokens.places * step
            check_between("rotary_seqlens, plus i for token i,", places, 0, len(cos) - 1)
            turned.append(turn_at(places[None], tokens.values[None], cos, sin, rotary_interleaved)[0])
        values, new = turned[0], (new[0]._replace(values=turned[1]), new[1])

    descales = Descales(q_descale, k_descale, v_descale)
    # Everything is checked before anything is written, with as much of the cache as that takes.
    unwritten = prepared(values, k_cache[:0], v_cache[:0], inputs_qv, descales, batch, queries.rows)
    if new is not None:
        no_k, no_v, starts = unwritten.k.flatten(0, 1), unwritten.v.flatten(0, 1), torch.zeros_like(queries.cu_seqlens)
        attention_varlen(unwritten.q, no_k, no_v, queries.cu_seqlens, starts, most, 0, **options)
        for store, fresh in zip((k_cache, v_cache), (new[0].values, new[1]), strict=True):
            cache.write(store, before[new[0].rows] + new[0].places, new[0].rows, fresh)

    keys, others, table = cache.pages(k_cache, v_cache, lengths)
    inputs = prepared(values, keys, others, inputs_qv, descales, batch, queries.rows)
    room = table.shape[1] * keys.shape[1]
    held = lengths - begin
    options["q_offset"] = lengths - queries.lengths
    if cache_leftpad is not None or attention_chunk:
        position = queries.places + (held - queries.lengths)[queries.rows]
        ranges = chunk_of(position, attention_chunk, held[queries.rows], room + most)
        options["key_ranges"] = ranges + begin[queries.rows, None]
    packing: dict[str, Any] = {"block_table": table, "seqused_k": lengths}
    cu_seqlens_k = equal_lengths(batch, room, q.device)
    out, lse = attention_varlen(
        inputs.q,
        inputs.k,
        inputs.v,
        queries.cu_seqlens,
        cu_seqlens_k,
        most,
        room,
        return_lse=True,
        **packing,
        **options,
    )
    out = inputs.result(out)
    if cu_seqlens_q is None:
        shape = q.shape[:2]
        out, lse = out.unflatten(0, shape), lse.unflatten(1, shape).transpose(0, 1)
    return (out, lse, lse.new_empty(0), lse.new_empty(0)) if return_softmax_lse else out
