"""The keys that are visible to each query, in torch operations: for weights of chosen rows and for counting pairs.

``options`` are those of the chosen ``rows`` and heads, as :func:`pyattn.options.axes.take` gives them; ``rows`` are
their numbers.
"""

import functools
import math
import operator

import torch
from torch import Tensor

from pyattn.options.schema import Options
from pyattn.options.selected_keys import as_mask

INT64_MAX = 2**63 - 1


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
    return torch.unflatten(relative.expand(batch, -1, -1).gather(-1, index), -1, places.shape[1:])


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


def visible(options: Options, rows: Tensor, seqlen_q: int, seqlen_k: int, num_heads: int) -> Tensor:
    """bool (B or 1, num_heads or 1, rows, Sk): the visible pairs."""
    pairs = in_intervals(options, rows, seqlen_q, seqlen_k)
    if options.selected is not None:
        pairs = pairs & as_mask(options.selected, options.selected_block, seqlen_k, num_heads)
    if options.mask is not None:
        pairs = pairs & options.mask
    if options.bias is not None:
        pairs = pairs & (options.bias != -math.inf)
    return pairs
