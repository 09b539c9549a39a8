"""The keys that are visible to each query, in torch operations: for weights of chosen rows and for counting pairs.

``options`` are those of the chosen ``rows`` and heads, as :func:`pyattn.options.axes.take` gives them; ``rows`` are
their numbers. With ``listed`` of these heads, a row's pairs are those with its n listed keys, n in place of Sk.
"""

import functools
import math
import operator

import torch
from torch import Tensor

from pyattn.options.schema import Options
from pyattn.options.selected_keys import Listed, as_mask

INT64_MAX = 2**63 - 1


def offsets(options: Options, seqlen_q: int, seqlen_k: int, device: torch.device) -> Tensor:
    """int64 (B or 1, 1): the key position of query 0."""
    if options.q_offsets is not None:
        own: Tensor = options.q_offsets[:, None]
        return own
    return torch.full((1, 1), options.offset_for(seqlen_q, seqlen_k), dtype=torch.int64, device=device)


def _keys(seqlen_k: int, listed: Listed | None, device: torch.device) -> Tensor:
    """The keys of each row's pairs: (Sk,), or (B or 1, heads or 1, rows, n)."""
    return torch.arange(seqlen_k, device=device) if listed is None else listed.keys


def distances(options: Options, rows: Tensor, seqlen_q: int, seqlen_k: int, listed: Listed | None = None) -> Tensor:
    """float64 (B or 1, heads or 1, rows, Sk): the distance between each query and key."""
    position = rows + offsets(options, seqlen_q, seqlen_k, rows.device).double()  # int64 could overflow
    return (position[:, None, :, None] - _keys(seqlen_k, listed, rows.device)).abs()


def places(
    options: Options, rows: Tensor, seqlen_q: int, seqlen_k: int, reach: int, listed: Listed | None = None
) -> Tensor:
    """int64 (B or 1, heads or 1, rows, Sk): where a pair's value lies in a relative bias of 2 * reach + 1 values."""
    far = 2**40  # as in csrc, no reach exceeds it
    position = rows + offsets(options, seqlen_q, seqlen_k, rows.device).clamp(-far, far)
    keys = _keys(seqlen_k, listed, rows.device)
    places: Tensor = (keys - position[:, None, :, None]).clamp(-reach, reach) + reach
    return places


def at_places(relative: Tensor, places: Tensor) -> Tensor:
    """The values (B or 1, heads or 1, rows, Sk) of a relative bias at the places of :func:`places`."""
    relative = relative if relative.dim() == 3 else relative[None]
    batch, heads = torch.broadcast_shapes(relative.shape[:2], places.shape[:2])
    index = places.flatten(2).expand(batch, heads, -1)
    return torch.unflatten(relative.expand(batch, heads, -1).gather(-1, index), -1, places.shape[2:])


def at_keys(pairs: Tensor, listed: Listed | None) -> Tensor:
    """A mask or bias (b?) (h?) (q?) k? of all keys at the listed ones: (B or 1, heads or 1, rows or 1, n or 1).

    Elements are read, and gradients summed, without a copy of the tensor for heads or sequences that share it.
    """
    if listed is None or pairs.shape[-1] == 1:
        return pairs
    *sizes, seqlen_k = (1,) * (4 - pairs.dim()) + tuple(pairs.shape)
    index, stride = listed.keys, seqlen_k
    for dim, size in reversed(list(enumerate(sizes))):
        if size != 1:
            own = torch.arange(size, device=index.device) * stride
            index, stride = index + own.view(-1, *(1,) * (3 - dim)), stride * size
    return pairs.flatten().index_select(0, index.flatten()).view(index.shape)


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


def in_intervals(options: Options, rows: Tensor, seqlen_q: int, seqlen_k: int, listed: Listed | None = None) -> Tensor:
    """bool (B or 1, heads or 1, rows, Sk): the pairs in the intervals of :func:`keys_of`."""
    key = _keys(seqlen_k, listed, rows.device)
    bounds = (bound[:, None, :, :, None].unbind(3) for bound in keys_of(options, rows, seqlen_q, seqlen_k))
    found: Tensor = functools.reduce(
        operator.or_, ((begin <= key) & (key < end) for begin, end in zip(*bounds, strict=True))
    )
    return found


def visible(
    options: Options, rows: Tensor, seqlen_q: int, seqlen_k: int, num_heads: int, listed: Listed | None = None
) -> Tensor:
    """bool (B or 1, num_heads or 1, rows, Sk): the visible pairs."""
    pairs = in_intervals(options, rows, seqlen_q, seqlen_k, listed)
    if listed is not None:
        pairs = pairs & ~listed.none
    elif options.selected is not None:
        pairs = pairs & as_mask(options.selected, options.selected_block, seqlen_k, num_heads)
    if options.mask is not None:
        pairs = pairs & at_keys(options.mask, listed)
    if options.bias is not None:
        pairs = pairs & (at_keys(options.bias, listed) != -math.inf)
    return pairs
