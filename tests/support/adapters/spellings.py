"""Sizes, masks and a bias that spellings of attention are written with."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

B, H, T, D = 2, 3, 6, 4
INF = math.inf
FUTURE = torch.ones(T, T).triu(1).bool()
ALL_FUTURE = torch.ones(T, T).bool().triu(0)
"""Row 0 sees no key."""

PADDED = torch.tensor([[0] * T, [0] * (T - 2) + [1] * 2]).bool()[:, None, None]
UNSEEN = FUTURE | PADDED.flip(-1)
"""Rows 0 and 1 of the second sequence see no key."""

BIAS = torch.randn(H, T, T, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
LEAST = torch.finfo(torch.float64).min


def float_mask(value: float, hidden: Tensor = FUTURE) -> Tensor:
    return torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, value)


def folded(x: Tensor) -> Tensor:
    return x.reshape(-1, *x.shape[-2:])


Code = Callable[[Tensor, Tensor, Tensor], Tensor]
