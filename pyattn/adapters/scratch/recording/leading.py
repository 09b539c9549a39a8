"""Leading dimensions of scores, however a caller folds them: batch, heads, windows, groups of heads.

Scores (*lead, Sq, Sk) keep their order in memory when a view folds or unfolds ``lead``. All views of one product are
coarsenings of one finest shape, ``fine``: (6, 5, 5) viewed as (2, 3, 5, 5) has fine (2, 3), in which a mask of either
shape is written.
"""

import math
from collections.abc import Iterable
from itertools import pairwise

from torch import Tensor

Shape = tuple[int, ...]


def broadcast(a: Shape, b: Shape) -> Shape | None:
    """The shape that both broadcast to; None if there is none. torch.broadcast_shapes takes ten times as long."""
    if a == b:
        return a
    short, long = (a, b) if len(a) < len(b) else (b, a)
    short = (1,) * (len(long) - len(short)) + short
    if any(x != y and 1 not in (x, y) for x, y in zip(short, long, strict=True)):
        return None
    return tuple(y if x == 1 else x for x, y in zip(short, long, strict=True))


def arranged(tensor: Tensor, order: Shape | None) -> Tensor:
    """``tensor``, which broadcasts to one whose dimension i is dimension order[i] of scores, as it does to the scores.

    None is the scores' own order.
    """
    if order is None:
        return tensor
    full = tensor.reshape((1,) * (len(order) - tensor.dim()) + tuple(tensor.shape))
    return full.permute(sorted(range(len(order)), key=order.__getitem__))


def exchanged(order: Shape | None, dims: int) -> Shape | None:
    """``order`` of scores of ``dims`` dimensions whose last two are exchanged."""
    turned = (*range(dims - 2), dims - 1, dims - 2)
    return ordered(turned if order is None else tuple(turned[at] for at in order))


def ordered(order: Shape) -> Shape | None:
    """``order``, or None if it is the scores' own."""
    return None if order == tuple(range(len(order))) else order


def fine_shape(leads: Iterable[Shape]) -> Shape | None:
    """The coarsest shape that all ``leads`` are foldings of; None if there is none.

    If they differ, it has no dimensions of size 1.
    """
    leads = list(leads)
    if all(lead == leads[0] for lead in leads):
        return leads[0]
    ends = {1}
    for lead in leads:
        size = 1
        for n in reversed(lead):
            size *= n
            ends.add(size)
    ordered = sorted(ends)
    if any(large % small for small, large in pairwise(ordered)):
        return None
    return tuple(large // small for small, large in pairwise(ordered))[::-1]


def refined(tensor: Tensor, lead: Shape, fine: Shape) -> Tensor:
    """``tensor`` (broadcasts to (*lead, a, b)) as (*fine, a, b), each leading dimension 1 or full."""
    if lead == fine and tensor.dim() == len(fine) + 2:
        return tensor
    own = (1,) * (len(lead) + 2 - tensor.dim()) + tuple(tensor.shape)
    if lead == fine:
        return tensor.reshape(own)
    shape: list[int] = []
    rest = list(fine)
    for size, given in zip(lead, own, strict=False):
        group: list[int] = []
        while math.prod(group) != size:
            group.append(rest.pop(0))
        shape += group if given != 1 else [1] * len(group)
    return tensor.reshape(*shape, *own[-2:])


def folded(tensor: Tensor, fine: Shape, heads: int) -> Tensor:
    """``tensor`` (1 or full of *fine, a, b) as (batch, heads, a, b): the last ``heads`` dimensions become heads.

    A part of which only some dimensions broadcast is expanded, which copies it.
    """
    at = len(fine) - heads
    if at == heads == 1:
        return tensor
    wanted: list[int] = []
    lead = []
    for own, full in ((tensor.shape[:at], fine[:at]), (tensor.shape[at:-2], fine[at:])):
        broadcasts = math.prod(own) == 1
        wanted += own if broadcasts else full
        lead.append(1 if broadcasts else math.prod(full))
    return tensor.expand(*wanted, *tensor.shape[-2:]).reshape(*lead, *tensor.shape[-2:])


def shared_heads(k: Shape, v: Shape, fine: Shape) -> int:
    """How many of the last dimensions of ``fine`` both k and v, (1 or full of fine), have once: heads in one group."""
    shared = 0
    while shared < len(fine) and k[-1 - shared] == v[-1 - shared] == 1:
        shared += 1
    return shared


def grouped(lead: Shape, size: int) -> Shape:
    """``lead`` with its heads as groups of ``size`` after one another; the same for groups of one."""
    return lead if size == 1 else (*lead[:-1], lead[-1] // size, size)


def fine_shape_of(leads: tuple[Shape, ...], size: int) -> Shape | None:
    """:func:`fine_shape` of ``leads``, the first and the last of which also as groups of ``size`` heads.

    Without views the sizes may be symbols, which a set can't hold.
    """
    if size > 1 and all(lead == leads[0] for lead in leads):
        return grouped(leads[0], size)
    return fine_shape((*leads, grouped(leads[0], size), grouped(leads[-1], size)))
