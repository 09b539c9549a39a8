"""Ring buffers: caches that keep the last positions of endless text, for windowed attention.

They are unrelated to ring attention, which passes keys around several devices and builds on :mod:`pyattn.parts`.
"""

import torch
from torch import Tensor

from pyattn import ops
from pyattn.options.checks import check_64_bits, check_type, check_window
from pyattn.options.schema import UNBOUNDED

SLACK = 4
"""A ring buffer has 1 / SLACK more slots than positions it keeps. When the slots run out, the kept positions move to
the front: on average, each appended token moves SLACK others, while a query reads the whole window. That is under 1 %
for windows of 1,024 and more, for a quarter more memory."""


def window_of(window: tuple[int, int] | None, max_seqlen: int) -> tuple[int, int] | None:
    """The window of a ring buffer that keeps ``max_seqlen`` positions; None without one, as with (-1, -1)."""
    if window is None:
        return None
    check_window(window)
    left, right = window
    if (left, right) == UNBOUNDED:
        return None
    if not 0 <= left < max_seqlen:
        raise ValueError(
            "pyattn: a cache's window must have a left bound between 0 and max_seqlen - 1, got "
            f"window={(left, right)} and max_seqlen={max_seqlen}"
        )
    return left, right


def slots_of(max_seqlen: int) -> int:
    """How many slots a ring buffer needs to keep ``max_seqlen`` positions."""
    return max_seqlen + -(-max_seqlen // SLACK)


def narrowed(window: tuple[int, int], own: tuple[int, int], max_seqlen: int, seqlen_q: int) -> tuple[int, int]:
    """``window`` within the cache's ``own``; ValueError for more queries than the cache keeps keys for."""
    most = max_seqlen - own[0]
    if seqlen_q > most:
        raise ValueError(
            f"pyattn: over a cache with window={own}, seqlen_q must not exceed max_seqlen - left = {most}, "
            f"got {seqlen_q}"
        )
    check_window(window)
    left, right = (max(pair) if -1 in pair else min(pair) for pair in zip(window, own, strict=True))
    return left, right


def in_slots(q_offset: int | Tensor, lengths: Tensor, starts: Tensor, left: int, max_seqlen: int) -> Tensor:
    """``q_offset`` in slots, for queries that see ``left`` keys before their own; these must still be kept."""
    check_type("q_offset", q_offset, int, torch.SymInt, Tensor)
    check_64_bits("q_offset", q_offset)
    offsets = q_offset if isinstance(q_offset, Tensor) else torch.full_like(lengths, q_offset)
    return ops.cache_slots(lengths, starts, offsets, left + 1, max_seqlen)
