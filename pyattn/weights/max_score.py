"""The largest score of each head, from the row statistics of forward: no other pass over the keys."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyattn.derivatives.merge import merge
from pyattn.options.schema import Options


def largest_scores(lse: Tensor, row_sum: Tensor) -> Tensor:
    """Each query's largest score, shaped like lse; -inf where it sees no key, NaN where one of its scores is NaN.

    The operators' own row_max is in units of the kernels. This has the rounding error of lse.
    """
    return (lse - torch.log(row_sum)).masked_fill(row_sum == 0, -math.inf)


def with_largest_scores(
    attend: Callable[[tuple[Any, ...]], tuple[Tensor, ...]], known: Sequence[Any], cu_seqlens_q: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """``(out, lse, largest)`` of ``attend(values of Options)``; :func:`largest_scores` carries no gradient.

    A sink above all scores of a row would hide the largest one: the operator gets sinks of -inf, which are none, and
    the sinks are merged afterwards. With ``cu_seqlens_q``, queries after the last sequence have none.
    """
    options = Options(*known)
    sinks = options.sinks
    if sinks is not None:
        options = options._replace(sinks=torch.full_like(sinks, -math.inf))
    out, lse, _, row_sum = attend(options)
    largest = largest_scores(lse.detach(), row_sum.detach())
    if sinks is not None:
        scores = sinks.to(lse.dtype)[:, None].expand_as(lse)
        if cu_seqlens_q is not None and len(cu_seqlens_q):
            token = torch.arange(lse.shape[-1], device=lse.device)
            scores = scores.masked_fill(token >= cu_seqlens_q[-1], -math.inf)
        out, lse = merge(out, lse, torch.zeros_like(out), scores)
    return out, lse, largest


def of_heads(largest: Tensor) -> Tensor:
    """(B, Hq, Sq) -> (B, Hq); -inf without queries."""
    return largest.amax(-1) if largest.shape[-1] else largest.new_full(largest.shape[:-1], -math.inf)


def of_sequences(largest: Tensor, cu_seqlens_q: Tensor, token: Tensor | None = None) -> Tensor:
    """(Hq, total_q) -> (sequences, Hq); -inf for a sequence without queries. ``token``: some of them, by number."""
    heads, total = largest.shape
    count = len(cu_seqlens_q) - 1
    if token is None:
        token = torch.arange(total, dtype=cu_seqlens_q.dtype, device=cu_seqlens_q.device)
    # Tokens of no sequence get the number `count`. A GPU does not check cu_seqlens first, so indices are bounded.
    sequence = (torch.searchsorted(cu_seqlens_q.contiguous(), token, right=True) - 1).clamp(0, count)
    lowest = largest.new_full((heads, count + 1), -math.inf)
    return lowest.scatter_reduce(1, sequence.expand(heads, total), largest, "amax")[:, :count].mT
