"""Rings: caches that keep the last positions of text without end, for windows."""

import torch
from torch import Tensor

from pyattn import ops
from pyattn.arguments import check_64_bits, check_size, check_type, check_window

SLACK = 4
"""A ring has 1 / SLACK more slots than positions it keeps. Where they end, the positions move to the front: each
appended token moves SLACK others, once on average, while a query reads the whole window: under 1 % for windows of
1,024 and more, for a quarter more memory."""


def slots_of(window: int, max_seqlen: int) -> int:
    """How many slots a ring has that keeps ``max_seqlen`` positions."""
    check_size("window", window, least=1)
    if window > max_seqlen:
        raise ValueError(f"pyattn: window must not exceed max_seqlen, got {window} and {max_seqlen}")
    return max_seqlen + -(-max_seqlen // SLACK)


def narrowed(window: tuple[int, int], kept: int, max_seqlen: int, seqlen_q: int) -> tuple[int, int]:
    """``window`` within that of a ring, ``kept`` keys wide; ValueError for more queries than find their keys there."""
    if seqlen_q > max_seqlen - kept + 1:
        raise ValueError(
            f"pyattn: over a cache with window={kept}, seqlen_q must not exceed max_seqlen - window + 1 = "
            f"{max_seqlen - kept + 1}, got {seqlen_q}"
        )
    check_window(window)
    left, right = window
    return kept - 1 if left < 0 else min(left, kept - 1), right


def in_slots(q_offset: int | Tensor, lengths: Tensor, starts: Tensor, left: int, max_seqlen: int) -> Tensor:
    """``q_offset`` in slots, for queries that see ``left`` keys before their own; those must still be there."""
    check_type("q_offset", q_offset, int, torch.SymInt, Tensor)
    check_64_bits("q_offset", q_offset)
    offsets = q_offset if isinstance(q_offset, Tensor) else torch.full_like(lengths, q_offset)
    slots: Tensor = ops.cache_slots(lengths, starts, offsets, left + 1, max_seqlen)
    return slots
