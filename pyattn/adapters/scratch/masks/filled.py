"""Filled keys beside the others: a second attention whose results are merged, or more keys of one attention."""

from typing import Any

import torch
from torch import Tensor

from pyattn import attention
from pyattn.adapters.scratch.masks.kinds import Filled
from pyattn.adapters.scratch.recording.leading import Shape, folded
from pyattn.parts import merge

Operands = tuple[Tensor, Tensor, Tensor]
"""q (batch, heads, Sq, D), k (batch, KV heads, Sk, D) and v (batch, KV heads, Sk, Dv)."""

Folding = tuple[Shape, int]
"""The leading dimensions of a mask, and how many of them are heads."""


def merged(filled: Filled, operands: Operands, folding: Folding, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """out and lse of attention by ``options`` and of the filled keys, with one dropout for all keys.

    Exact where ``options`` have no bias, or none of the other keys a weight: in the logarithms, scores as large as a
    mask's -1e9 lose the sums of exponentials.
    """
    q, k, v = operands
    out, lse = attention(q, k, v, **options, return_lse=True)
    same = {"mask": folded(filled.keys, *folding), "softcap": 0.0, "bias": None}
    zero = q.new_zeros(1, 1, 1, 1)
    q, k = (zero.expand(*x.shape[:-1], 1) for x in (q, k))
    v = zero.expand(v.shape) if filled.cleared else v
    second, lse_of_second = attention(q, k, v, **options | same, return_lse=True)
    return merge(out, lse, second, lse_of_second + filled.scores)


def appended(
    filled: Filled, scores: Tensor, operands: Operands, folding: Folding, mask: Tensor, bias: Tensor | None
) -> tuple[Operands, Tensor, Tensor]:
    """Operands, mask and bias of twice as many keys: all, then the filled ones, with products of 0 and ``scores``.

    Queries that see no other key may be NaN.
    """
    q, k, v = operands
    size = k.shape[-2]
    q = q.masked_fill(~mask.any(-1, keepdim=True), 0)
    k = torch.cat([k, torch.zeros_like(k)], -2)
    v = torch.cat([v, torch.zeros_like(v) if filled.cleared else v], -2)
    scores = folded(scores, *folding)
    mask = _side_by_side(mask, folded(filled.keys, *folding), size)
    return (q, k, v), mask, _side_by_side(torch.zeros_like(scores) if bias is None else bias, scores, size)


def _side_by_side(a: Tensor, b: Tensor, size: int) -> Tensor:
    """Masks or biases (..., Sq, 1 or size) as one of twice as many keys."""
    return torch.cat([x.expand(*x.shape[:-1], size) for x in torch.broadcast_tensors(a, b)], -1)
