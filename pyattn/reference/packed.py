"""Packed sequences by the formula: computed as a padded batch, from which only the sequences are kept."""

import math
from typing import Any

import torch
from torch import Tensor

from pyattn.reference.formula import attention


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    q_offset: int | Tensor | None = None,
    key_ranges: Tensor | None = None,
    selected: Tensor | None = None,
    block_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    return_lse: bool = False,
    return_max_score: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, ...]:
    """:func:`attention` of each sequence b: queries [cu_seqlens_q[b], cu_seqlens_q[b + 1]), and keys by cu_seqlens_k.

    Args:
        q, k, v: (tokens, heads, head_dim).
        cu_seqlens_q, cu_seqlens_k: (B + 1,).
        max_seqlen_q, max_seqlen_k: no sequence is longer.
        q_offset: an int or (B,); default: each sequence's last query is at its last key.
        key_ranges: (tokens, 2) or (tokens, n, 2), counted within the sequence.
        selected: (lists, tokens, n), counted within the sequence.
        block_table: (B, pages of a sequence): k and v are (pages, page_size, heads, head_dim).
        seqused_k: (B,), how many keys of each sequence take part.
        return_lse: also return lse.
        return_max_score: also return the largest score of each head, (B, Hq).
        options: as for :func:`attention`; dropout drops the same weights as in sequence b of a batch.

    Returns:
        ``out`` (tokens, Hq, Dv), with ``return_lse`` also lse (Hq, tokens): 0 and -inf after the last sequence.
    """
    lengths_q, lengths_k = cu_seqlens_q.long().diff(), cu_seqlens_k.long().diff()
    batch, used = len(lengths_q), lengths_k if seqused_k is None else seqused_k.long()
    queries, keys = _places(lengths_q), _places(lengths_k)
    if block_table is not None:
        sequence, place = keys = _places(used)
        where = block_table.long()[sequence, place // k.shape[1]], place % k.shape[1]
        k, v = k[where], v[where]

    def padded(x: Tensor, places: tuple[Tensor, Tensor], seqlen: int) -> Tensor:
        """(tokens, ...) -> (B, seqlen, ...)."""
        return x.new_zeros(batch, seqlen, *x.shape[1:]).index_put(places, x[: len(places[0])])

    if q_offset is None:
        q_offset = used - lengths_q
    ranges = torch.stack([torch.zeros_like(used), used], -1)[:, None].expand(batch, max_seqlen_q, 2)
    ranges = ranges.masked_fill((torch.arange(max_seqlen_q) >= lengths_q[:, None])[..., None], 0)
    if key_ranges is not None:
        ranges = padded(key_ranges.long(), queries, max_seqlen_q)
    inputs = padded(q, queries, max_seqlen_q), padded(k, keys, max_seqlen_k), padded(v, keys, max_seqlen_k)
    named: dict[str, Any] = {"return_lse": True, "return_max_score": return_max_score} | options
    if selected is not None:
        named["selected"] = padded(selected.transpose(0, 1), queries, max_seqlen_q).transpose(1, 2)
    out, lse, *more = attention(*(x.transpose(1, 2) for x in inputs), q_offset=q_offset, key_ranges=ranges, **named)
    count = len(queries[0])
    rest = len(q) - count
    out = torch.cat([out.transpose(1, 2)[queries], out.new_zeros(rest, *out.shape[1::2])])
    if return_lse:
        tail = lse.new_full((lse.shape[1], rest), -math.inf)
        more.insert(0, torch.cat([lse.transpose(1, 2)[queries].mT, tail], -1))
    return (out, *more) if more else out


def _places(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """The sequence of each token and its position in it."""
    sequence = torch.arange(len(lengths)).repeat_interleave(lengths)
    return sequence, torch.arange(len(sequence)) - (lengths.cumsum(0) - lengths)[sequence]
