"""The keys that each query sees, in torch operations: for weights of chosen rows and for counting pairs."""

import functools
import math
import operator
from collections.abc import Iterator

import torch
from torch import Tensor

from pyattn.options.checks import has_values
from pyattn.options.schema import Options, Packing

INT64_MAX = 2**63 - 1

PAIRS_AT_ONCE = 2**24
"""Pairs that are counted at a time if a mask or bias is read for each: about 100 MB of temporaries."""


def offsets(options: Options, seqlen_q: int, seqlen_k: int, device: torch.device) -> Tensor:
    """int64 (B or 1, 1): the key position of query 0."""
    if options.q_offsets is not None:
        own: Tensor = options.q_offsets[:, None]
        return own
    return torch.full((1, 1), options.offset_for(seqlen_q, seqlen_k), dtype=torch.int64, device=device)


def distances(options: Options, rows: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor:
    """float64 (B or 1, 1, rows, Sk): the distance between each query and key."""
    position = rows + offsets(options, seqlen_q, seqlen_k, rows.device).double()  # int64 could overflow
    return (position[:, None, :, None] - torch.arange(seqlen_k, device=rows.device)).abs()


def places(options: Options, rows: Tensor, seqlen_q: int, seqlen_k: int, reach: int) -> Tensor:
    """int64 (B or 1, rows, Sk): where each pair's value lies in a relative bias of 2 * reach + 1 values."""
    far = 2**40  # as in csrc, no reach exceeds it
    position = rows + offsets(options, seqlen_q, seqlen_k, rows.device).clamp(-far, far)
    places: Tensor = (torch.arange(seqlen_k, device=rows.device) - position[..., None]).clamp(-reach, reach) + reach
    return places


def at_places(relative: Tensor, places: Tensor) -> Tensor:
    """The values (B or 1, heads or 1, rows, Sk) of a relative bias at the places of :func:`places`."""
    relative = relative if relative.dim() == 3 else relative[None]
    batch = max(relative.shape[0], places.shape[0])
    index = places.flatten(1)[:, None].expand(batch, relative.shape[1], -1)
    values: Tensor = relative.expand(batch, -1, -1).gather(-1, index).unflatten(-1, places.shape[1:])
    return values


def keys_of(options: Options, rows: Tensor, seqlen_q: int, seqlen_k: int) -> tuple[Tensor, Tensor]:
    """int64 (B or 1, rows, n), twice: causal, window and key_ranges leave a query the keys [begin, end) of n intervals.

    begin may exceed end. The bounds saturate, whatever q_offset and window are.
    """
    offset = offsets(options, seqlen_q, seqlen_k, rows.device)
    left, right = options.window
    around = -seqlen_q - 1, seqlen_k  # beyond these, the bound of query 0 makes no difference to any query
    begin, end = torch.zeros_like(rows)[None], torch.full_like(rows, seqlen_k)[None]
    if left >= 0:
        begin = rows + (offset.clamp(min=left - INT64_MAX) - left).clamp(*around)
    if options.causal or right >= 0:
        ahead = 0 if options.causal else right
        end = rows + (offset.clamp(max=INT64_MAX - ahead) + ahead).clamp(*around) + 1
    begin, end = begin[..., None], end[..., None]
    if options.key_ranges is not None:
        ranges = options.key_ranges if options.key_ranges.dim() == 4 else options.key_ranges[:, :, None]
        ranges = ranges if ranges.shape[1] == 1 else ranges.index_select(1, rows)
        first, after_last = ranges.to(torch.int64).unbind(-1)
        begin, end = torch.maximum(begin, first), torch.minimum(end, after_last)
    return begin.clamp(0, seqlen_k), end.clamp(0, seqlen_k)


def in_intervals(options: Options, rows: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor:
    """bool (B or 1, 1, rows, Sk): the pairs in the intervals of :func:`keys_of`."""
    key = torch.arange(seqlen_k, device=rows.device)
    bounds = (bound[:, None, :, :, None].unbind(3) for bound in keys_of(options, rows, seqlen_q, seqlen_k))
    found: Tensor = functools.reduce(
        operator.or_, ((begin <= key) & (key < end) for begin, end in zip(*bounds, strict=True))
    )
    return found


def filters(options: Options, rows: Tensor, heads: Tensor) -> Iterator[Tensor]:
    """Masks that may hide keys between a row's first and last: bool, True = takes part, as (B, heads, rows, Sk)."""
    if options.mask is not None:
        yield picked(options.mask, heads, rows)
    if options.bias is not None:
        yield picked(options.bias, heads, rows) != -math.inf


def seen(options: Options, rows: Tensor, heads: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor:
    """bool (B or 1, heads or 1, rows, Sk): the visible pairs."""
    allowed = in_intervals(options, rows, seqlen_q, seqlen_k)
    for shown in filters(options, rows, heads):
        allowed = allowed & shown
    return allowed


def picked(pairs: Tensor, heads: Tensor, rows: Tensor) -> Tensor:
    """A mask or bias with four dimensions, reduced to these heads and rows where it does not broadcast."""
    pairs = pairs[(None,) * (4 - pairs.dim())]
    pairs = pairs if pairs.shape[2] == 1 else pairs.index_select(2, rows)
    return pairs if pairs.shape[1] == 1 else pairs.index_select(1, heads)


def visible_pairs(seqlen_q: int, seqlen_k: int, q_offset: int) -> int:
    """The number of pairs visible under a causal mask: the sum over i of ``i + q_offset + 1`` within [0, seqlen_k]."""
    first = min(max(-q_offset, 0), seqlen_q)
    full = min(max(seqlen_k - q_offset, first), seqlen_q)  # from here on, rows see all keys
    return (full - first) * (first + full + 1 + 2 * q_offset) // 2 + (seqlen_q - full) * seqlen_k


def _pairs_of_formulas(options: Options, batch: int, seqlen_q: int, seqlen_k: int) -> int:
    """Pairs that causal and window leave in the batch: keys up to each query's last, less those before its first."""
    left, right = options.window
    total, shared = 0, options.offset_for(seqlen_q, seqlen_k)
    for q_offset in [shared] * batch if options.q_offsets is None else options.q_offsets.tolist():
        last = q_offset if options.causal else q_offset + right if right >= 0 else seqlen_k
        total += visible_pairs(seqlen_q, seqlen_k, last)
        total -= visible_pairs(seqlen_q, seqlen_k, q_offset - left - 1) if left >= 0 else 0
    return total


def _count(options: Options, batch: int, num_heads: int, seqlen_q: int, seqlen_k: int, device: torch.device) -> int:
    """The number of visible pairs, over batch and query heads."""
    rows, hidden = torch.arange(seqlen_q, device=device), not options.mask is options.bias is None
    if options.key_ranges is None and not hidden:
        return num_heads * _pairs_of_formulas(options, batch, seqlen_q, seqlen_k)
    if not hidden:
        begin, end = keys_of(options, rows, seqlen_q, seqlen_k)
        return num_heads * batch * int((end - begin).clamp(min=0).sum()) // begin.shape[0]
    heads, total = torch.arange(num_heads, device=device), 0
    for some in rows.split(max(1, PAIRS_AT_ONCE // max(1, batch * num_heads * seqlen_k))):
        here = seen(options, some, heads, seqlen_q, seqlen_k)
        total += int(here.sum()) * (batch * num_heads // max(1, here.shape[0] * here.shape[1]))
    return total


def pairs(q: Tensor, k: Tensor, options: Options) -> int:
    """The number of visible pairs, over batch and query heads; all pairs if tensors have no values to read."""
    batch, num_heads, seqlen_q = q.shape[:3]
    seqlen_k = k.shape[2]
    sources = (options.q_offsets, options.key_ranges, options.mask, options.bias)
    if not all(t is None or has_values(t) for t in sources):
        return batch * num_heads * seqlen_q * seqlen_k
    return _count(options, batch, num_heads, seqlen_q, seqlen_k, q.device)


def packed_pairs(q: Tensor, k: Tensor, packing: Packing, options: Options) -> int:
    """:func:`pairs` of packed sequences; of one sequence with all tokens if lengths have no values to read."""
    num_heads = q.shape[1]
    lengths = packing.cu_seqlens_q, packing.cu_seqlens_k, packing.seqused_k
    sources = (*lengths, options.q_offsets, options.key_ranges)
    if not all(t is None or has_values(t) for t in sources):
        return num_heads * q.shape[0] * k.shape[0]
    total = 0
    for _, queries, keys, _, own in packing.sequences(options, num_heads):
        total += _count(own, 1, num_heads, queries.stop - queries.start, keys.stop - keys.start, q.device)
    return total
