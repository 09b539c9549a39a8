"""Products in blocks of fixed shape, and the largest scores of each row, in an order without ties."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

KEYS_AT_ONCE = 256
"""Keys of a product: a block of 256 x 128 float32 numbers stays in L2 beside the rows' scores."""

ROWS_AT_ONCE = 1024
"""Rows of a product, a query having one for each head: beside 256 keys, 1 MB of scores."""

SCORES_AT_ONCE = 2**20
"""Scores that are ranked at once: 4 MB, and 8 MB of int64."""

ROUND = 16
"""Products have a multiple of this many rows: with fewer than 8, MKL's order of sums depends on threads."""

SHIFT = 2**32
LAST = 2**31 - 1
HIDDEN = -(2**63) + 2**31
"""Below every visible key; its lower half gives key -1."""


def padded(rows: Tensor, count: int) -> Tensor:
    """``rows`` with zeros after them up to a multiple of ``count`` along the first dimension."""
    missing = -len(rows) % count
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows


def rows_at_once(heads: int, seqlen_k: int) -> int:
    """How many queries a block has."""
    return max(1, min(ROWS_AT_ONCE // max(1, heads), SCORES_AT_ONCE // max(1, seqlen_k)))


def visible_counts(first: int, rows: int, length: int, causal: bool, device: torch.device) -> Tensor:
    """int64 (rows,): how many keys each of these queries sees, the first one being at key position ``first``."""
    if not causal:
        return torch.full((rows,), length, device=device)
    return torch.arange(first + 1, first + rows + 1, device=device).clamp(0, length)


def largest(scores: Tensor, counts: Tensor, least: int, n: int, before: Sequence[Tensor] = ()) -> Tensor:
    """int32 (rows, min(n, keys)): the keys of each row's n largest scores, by descending score.

    Among equal scores the lower key comes first, so the result depends on the scores alone. NaN counts as -inf. -1
    stands where a row has fewer keys.

    Args:
        scores: (rows, keys) in float32 or float64, overwritten; whatever is beyond a row's count has no effect.
        counts: int64 (rows,), how many keys a row sees.
        least: at most the smallest count; fewer keys are compared with the counts.
        n: how many to return.
        before: int64 (rows,), keys that come before all others, in this order; those that a row does not see, none.
    """
    keys = torch.arange(scores.shape[1], device=scores.device)
    ranks = torch.add(LAST - keys, _heights(scores), alpha=SHIFT)
    ranks[:, least:].masked_fill_(keys[least:] >= counts[:, None], HIDDEN)
    for place, key in enumerate(before):
        column = key.clamp(0, max(0, scores.shape[1] - 1))[:, None]
        first = (LAST - place) * SHIFT + LAST - column
        seen = ((key >= 0) & (key < counts))[:, None]
        ranks.scatter_(1, column, torch.maximum(ranks.gather(1, column), torch.where(seen, first, HIDDEN)))
    every = n >= scores.shape[1]
    found = ranks.sort(dim=-1, descending=True).values if every else ranks.topk(n, dim=-1).values
    return (LAST - (found & (SHIFT - 1))).to(torch.int32)


def _heights(scores: Tensor) -> Tensor:
    """int32 or int64, ordered as the scores; within 32 bits without the two largest of them."""
    scores.nan_to_num_(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    if scores.dtype == torch.float64:  # its bits leave no room for the key
        return scores.sort(dim=-1, descending=True, stable=True).indices.argsort(dim=-1).neg_()
    bits = scores.add_(0.0).view(torch.int32)  # -0.0 becomes 0.0; bits of negative numbers are in reverse order
    return bits.bitwise_xor_((bits >> 31).bitwise_and_(LAST))
