"""Calls whose scores or sinks are infinite or NaN in places, in float64."""

import math
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

RARE = (math.inf, math.nan)


class Infinite(NamedTuple):
    """A call with small sizes.

    Attributes:
        qkv: (2, 2, Sq, 4), (2, 1 or 2, Sk, 4), (2, 1 or 2, Sk, 3).
        options: of the call; the learned ones hold -inf, and at times inf or NaN.
        into: gradients of out and lse.
    """

    qkv: tuple[Tensor, Tensor, Tensor]
    options: dict[str, Any]
    into: tuple[Tensor, Tensor]


def poisoned(draw: Random, tensor: Tensor) -> Tensor:
    """The tensor with runs of -inf along its last dimension, and at times one inf or NaN."""
    last = tensor.shape[-1]
    for row in tensor.view(-1, last).unbind():
        if draw.random() < 0.7:
            begin = draw.randrange(last)
            row[begin : begin + draw.randint(1, last)] = -math.inf
        if draw.random() < 0.06:
            row[draw.randrange(last)] = draw.choice(RARE)
    return tensor


def infinite(draw: Random, seqlen_q: int, seqlen_k: int, names: tuple[str, ...]) -> Infinite:
    """A call with some of the learned options that ``names`` lists, and a mask of positions or none."""
    torch.manual_seed(draw.getrandbits(32))
    heads_kv = draw.choice((1, 2))
    shapes = (2, 2, seqlen_q, 4), (2, heads_kv, seqlen_k, 4), (2, heads_kv, seqlen_k, 3)
    q, k, v, dout = (torch.randn(shape).double() for shape in (*shapes, (2, 2, seqlen_q, 3)))
    options: dict[str, Any] = {"causal": draw.random() < 0.4, "q_offset": draw.randint(-2, seqlen_k)}
    if draw.random() < 0.3:
        options["window"] = draw.choice((-1, 1, 4)), draw.choice((-1, 0, 3))
    reach = draw.choice((1, 3, seqlen_k))
    learned = {
        "relative_bias": lambda: poisoned(draw, torch.randn(2, 2 * reach + 1).double()),
        "bias": lambda: poisoned(draw, torch.randn(2, seqlen_q, seqlen_k).double()),
        "sinks": lambda: poisoned(draw, torch.randn(2).double()),
        "alibi_slopes": lambda: torch.tensor([0.1, draw.choice((0.2, 0.2, 0.2, math.inf, -math.inf))]).double(),
    }
    chosen = draw.sample(names, draw.randint(1, min(3, len(names))))
    options |= {name: learned[name]() for name in chosen}
    dlse = torch.randn(dout.shape[:3]).double() * draw.choice((0, 1, 1))
    return Infinite((q, k, v), options, (dout, dlse))
