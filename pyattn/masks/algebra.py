"""Interval masks as sets of keys: what two share, what any has, and the intervals of a bool mask."""

from collections.abc import Iterable

import torch
from torch import Tensor

from pyattn.masks.key_ranges import MOST_RANGES, KeyRanges, bare, by_interval, known
from pyattn.options.checks import check_names, check_size, check_type, has_values


@check_names
def from_bool(mask: Tensor, *, intervals: int = 1) -> KeyRanges | None:
    """The ranges equivalent to a bool mask, if there are any.

    ``attention(..., mask=mask)`` finds the ranges itself, at each call, if rows are single intervals. Use this function
    for a mask that serves many calls, for rows of several intervals, or to learn whether a mask consists of ranges. ::

        1 1 1 0    [0, 3)        1 0 1 1    None: a hole; with intervals=2    [0, 1) [2, 4)
        0 1 1 1    [1, 4)        1 1 1 1                                      [0, 4) [4, 4)
        0 0 0 0    [0, 0)        0 0 1 1                                      [2, 4) [4, 4)

    Args:
        mask: bool, True = takes part, 1 to 4 dimensions, which broadcast from the right: (B or 1, Hq or 1, Sq, Sk).
        intervals: the most intervals of a row, from 1 to 4.

    Returns:
        (B or 1, Sq, 2), for ``causal=False`` because they are the whole mask; (B or 1, Sq, n, 2) if the row with the
        most intervals has n > 1; None where a row has more than ``intervals``, or heads differ. A mask with one row for
        all queries, (B, 1, 1, Sk), gives one row: apply ``expand(-1, seqlen_q, -1)``. If the mask only hides padding,
        ``KeyRanges(from_bool(mask))`` goes on top of ``causal=True``.

    Raises:
        ValueError: the wrong number of dimensions, intervals outside 1 to 4.
        TypeError: a mask that is not a bool tensor.

    >>> from_bool(torch.ones(3, 3, dtype=torch.bool).tril()).tolist()
    [[[0, 1], [0, 2], [0, 3]]]
    """
    check_type("mask", mask, Tensor)
    check_size("intervals", intervals, least=1)
    if intervals > MOST_RANGES:
        raise ValueError(f"pyattn: intervals must be at most {MOST_RANGES}, got {intervals}")
    if mask.dtype != torch.bool:
        raise TypeError(f"pyattn: mask must be bool, True = takes part, got {mask.dtype}")
    if not 1 <= mask.dim() <= 4:
        raise ValueError(f"pyattn: mask must have 1 to 4 dimensions, got shape {tuple(mask.shape)}")
    wide = mask[(None,) * (4 - mask.dim())]
    seqlen_k, heads = wide.shape[3], wide.shape[1]
    if seqlen_k == 0 or heads == 0:
        return known(torch.zeros(wide.shape[0], wide.shape[2], 2, dtype=torch.int64, device=mask.device), whole=True)
    ranges = _only_interval(wide)
    if ranges is None and intervals > 1:
        ranges = _intervals(wide, intervals)
    if ranges is None or (ranges != ranges[:, :1]).any():
        return None
    return known(ranges[:, 0], whole=True)


def from_blocks(
    blocks: Iterable[Tensor], batch: int, seqlen_q: int, device: torch.device | str | None = None
) -> Tensor | None:
    """The ranges of a mask that comes some rows at a time, so queries x keys are never held.

    Args:
        blocks: the rows in order, each block bool (B, H or 1, rows, Sk).
        batch, seqlen_q: B, and the number of rows of all blocks; without a block, no query sees a key.

    Returns:
        (B, Sq, 2); (B, Sq, n, 2) if the row with the most intervals has n > 1; None where a row has more than 4
        intervals, or heads differ.
    """
    # One tensor for all blocks: separate ones would pin the heap between the masks that are freed.
    found = torch.zeros(batch, seqlen_q, MOST_RANGES, 2, dtype=torch.int64, device=device)
    first, most = 0, 1
    for block in blocks:
        ranges = from_bool(block, intervals=MOST_RANGES)
        if ranges is None:
            return None
        part = by_interval(bare(ranges))
        count = part.shape[2]
        rows = found[:, first : first + part.shape[1]]
        rows[:, :, :count] = part
        rows[:, :, count:] = part[:, :, -1:, 1:]  # empty ones lie at the end of the last one
        first, most = first + part.shape[1], max(most, count)
    return found[:, :, 0] if most == 1 else found[:, :, :most]


def from_first_to_last(mask: Tensor) -> Tensor:
    """(..., 2): the smallest interval that holds every key of a row; bool (..., Sk), Sk at least 1."""
    keys = mask.to(torch.uint8)
    none = ~mask.any(-1)
    begin = keys.argmax(-1).masked_fill(none, 0)  # argmax gives the first maximum
    end = (mask.shape[-1] - keys.flip(-1).argmax(-1)).masked_fill(none, 0)
    return torch.stack([begin, end], -1)


def _only_interval(wide: Tensor) -> Tensor | None:
    """(B, H, Sq, 2): the interval of each row of a mask, or None where a row has several."""
    ranges = from_first_to_last(wide)
    return None if (ranges[..., 1] - ranges[..., 0] != wide.sum(-1)).any() else ranges


def _intervals(wide: Tensor, most: int) -> Tensor | None:
    """(B, H, Sq, n, 2): the intervals of each row of a mask, or None where a row has more than ``most``."""
    edges = torch.nn.functional.pad(wide, (1, 0)) ^ torch.nn.functional.pad(wide, (0, 1))  # begins and ends, in turn
    count = edges.sum(-1)
    width = int(count.max()) if count.numel() else 0
    if width > 2 * most:
        return None
    row, key = edges.flatten(0, 2).nonzero().unbind(-1)
    before = count.flatten().cumsum(0) - count.flatten()
    ends = torch.zeros(count.numel(), width, dtype=torch.int64, device=wide.device)
    ends[row, torch.arange(len(row), device=wide.device) - before[row]] = key
    return ends.cummax(-1).values.view(*count.shape, width // 2, 2)  # empty ones lie at the end of the last one


def within(ranges: Tensor, others: Tensor) -> Tensor:
    """The keys that two ranges share: documents with padding, a prefix in each document, ... ::

        documents [2, 2]     prefix_lm 3     within both
        1 1 0 0              1 1 1 0         1 1 0 0
        1 1 0 0              1 1 1 0         1 1 0 0
        0 0 1 1              1 1 1 0         0 0 1 0
        0 0 1 1              1 1 1 1         0 0 1 1

    Args:
        ranges, others: KeyRanges or bare tensors, (B or 1, Sq or 1, 2) or (B or 1, Sq or 1, n, 2) each.

    Returns:
        KeyRanges, whole if either one is; a bare tensor if both are bare. (B or 1, Sq, 2); if either has several
        intervals, (B or 1, Sq, n, 2) where the query with the most has n > 1.

    Raises:
        ValueError: more than 4 intervals.
        TypeError: an argument that is not a tensor.

    >>> from pyattn.masks import documents, prefix_lm, within
    >>> within(documents([2, 2]), prefix_lm(3, seqlen=4))
    KeyRanges(tensor([[[0, 2],
                       [0, 2],
                       [2, 3],
                       [2, 4]]]), whole=True)
    """
    check_type("ranges", ranges, Tensor)
    check_type("others", others, Tensor)
    one, other = bare(ranges), bare(others)
    several = one.dim() == 4 or other.dim() == 4
    if several:
        one, other = by_interval(one).unsqueeze(3), by_interval(other).unsqueeze(2)  # every pair of intervals
    begin = torch.maximum(one[..., 0], other[..., 0])
    both = torch.stack([begin, torch.maximum(begin, torch.minimum(one[..., 1], other[..., 1]))], -1)
    if several:
        both = _joined(both.flatten(2, 3), most=one.shape[2] + other.shape[3] - 1)
    return _typed(both, ranges, others)


@check_names
def union(*ranges: Tensor) -> Tensor:
    """The keys in any of several ranges, as sorted, disjoint intervals: a document in pieces, text and figures, ... ::

        chunked(4, chunk=2)     [0, 1) for all     union of both
        1 1 0 0                 1 0 0 0            1 1 0 0
        1 1 0 0                 1 0 0 0            1 1 0 0
        0 0 1 1                 1 0 0 0            1 0 1 1
        0 0 1 1                 1 0 0 0            1 0 1 1

    Args:
        ranges: KeyRanges or bare tensors, (B or 1, Sq or 1, 2) or (B or 1, Sq or 1, n, 2) each.

    Returns:
        KeyRanges, whole if any is; a bare tensor if all are bare. Intervals that overlap or touch are one: (B or 1, Sq,
        n, 2), n the most of any query, and (B or 1, Sq, 2) if n is 1.

    Raises:
        ValueError: no ranges, a query with more than 4 intervals.
        TypeError: an argument that is not a tensor.

    >>> from pyattn.masks import chunked, union
    >>> union(chunked(4, chunk=2), torch.tensor([[[0, 1]]]))[0].tolist()
    [[[0, 2], [2, 2]], [[0, 2], [2, 2]], [[0, 1], [2, 4]], [[0, 1], [2, 4]]]
    """
    if not ranges:
        raise ValueError("pyattn: union must be of at least one range, got none")
    for one in ranges:
        check_type("ranges", one, Tensor)
    parts = [by_interval(bare(one)) for one in ranges]
    rows = torch.broadcast_shapes(*(part.shape[:2] for part in parts))
    found = torch.cat([part.expand(*rows, -1, 2) for part in parts], 2)
    return _typed(_joined(found, most=found.shape[2]), *ranges)


def _typed(result: Tensor, *given: Tensor) -> Tensor:
    typed = [one for one in given if isinstance(one, KeyRanges)]
    return known(result, any(one.whole for one in typed)) if typed else result


def _joined(ranges: Tensor, most: int) -> Tensor:
    """The union of the intervals (B, Sq, n, 2) of each query, in any order: sorted, disjoint, no more than needed.

    ``most``: no query has more of them.
    """
    begin, end = ranges.unbind(-1)
    far = torch.iinfo(ranges.dtype).max
    empty = begin >= end
    begin, order = begin.masked_fill(empty, far).sort(-1)
    reach = end.masked_fill(empty, 0).gather(-1, order).cummax(-1).values  # where all intervals up to this one end
    before = torch.nn.functional.pad(reach[..., :-1], (1, 0), value=-1)
    first = (begin > before) & (begin != far)  # no interval before it touches it
    count = first.sum(-1, keepdim=True)
    begins = begin.masked_fill(~first, far).sort(-1).values
    ends = before.masked_fill(~first | (before < 0), far).sort(-1).values  # of all but the last one
    joined = torch.minimum(torch.stack([begins, ends], -1), reach[..., -1:, None])  # empty ones lie at the last end
    width = _most(count) if has_values(count) else most
    if width > MOST_RANGES:
        raise NotImplementedError(
            f"pyattn: in compiled code and transforms ranges must have at most {MOST_RANGES} intervals together, got "
            f"{width}"
        )
    return joined[:, :, 0] if width == 1 else joined[:, :, :width]


def _most(count: Tensor) -> int:
    """The largest count, at least 1; ValueError if it is more than MOST_RANGES."""
    width = max(1, int(count.max())) if count.numel() else 1
    if width > MOST_RANGES:
        sequence, query = divmod(int(count.flatten().argmax()), count.shape[1])
        raise ValueError(
            f"pyattn: a query must see at most {MOST_RANGES} intervals of keys, got {width} for query {query} of "
            f"sequence {sequence}"
        )
    return width
