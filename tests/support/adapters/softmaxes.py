"""Softmax written out in several ways, code that uses it, and whether recognition takes or leaves such code."""

import math
from collections.abc import Callable

import torch
from support.adapters.gradients import of_weighted_sum
from torch import Tensor
from torch.nn import functional

from pyattn.adapters import scratch

B, H, T, D = 2, 3, 6, 4
INF = math.inf
FUTURE = torch.ones(T, T).triu(1).bool()
BLIND = torch.ones(T, T).triu(0).bool()
"""Row 0 sees no key."""

BIAS = torch.randn(H, T, T, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()


def over_sums(e: Tensor) -> Tensor:
    return e / e.sum(-1, keepdim=True)


def exponentials(x: Tensor) -> Tensor:
    return (x - x.amax(-1, keepdim=True)).exp()


def stable(x: Tensor) -> Tensor:
    return over_sums(exponentials(x))


def stable_in_place(x: Tensor) -> Tensor:
    """Without gradients alone, as in torch."""
    e = (x - x.max(dim=-1, keepdim=True)[0]).exp_()
    e /= torch.sum(e, dim=3, keepdim=True)
    return e


def stable_by_a_detached_maximum(x: Tensor) -> Tensor:
    e = torch.exp(x - torch.max(x, dim=-1, keepdim=True).values.detach())
    return torch.div(e, e.sum((-1,), True))


def unstable(x: Tensor) -> Tensor:
    return torch.exp(x) / torch.exp(x).sum(dim=-1, keepdim=True)


def unstable_once(x: Tensor) -> Tensor:
    return over_sums(x.exp())


def by_logarithms(x: Tensor) -> Tensor:
    return functional.log_softmax(x, dim=-1).exp()


SOFTMAXES = [stable, stable_by_a_detached_maximum, unstable, unstable_once, by_logarithms]
UNSTABLE = [unstable, unstable_once]
Code = Callable[[Tensor, Tensor, Tensor], Tensor]


def codes(softmax) -> dict[str, Code]:
    return {
        "plain": lambda q, k, v: softmax(q @ k.mT / 2) @ v,
        "a mask of -inf": lambda q, k, v: softmax((q @ k.mT / 2).masked_fill(FUTURE, -INF)) @ v,
        "a mask of -1e9": lambda q, k, v: softmax((q @ k.mT / 2).masked_fill(FUTURE, -1e9)) @ v,
        "a bias and a mask": lambda q, k, v: softmax((q @ k.mT + BIAS).masked_fill(FUTURE, -INF)) @ v,
        "read twice": lambda q, k, v: (lambda w: w @ v + w.mean() * 3)(softmax(q @ k.mT)),
        "read before": lambda q, k, v: (lambda w: w.pow(2).sum() + w @ v)(softmax(q @ k.mT)),
        "printed": lambda q, k, v: (lambda w: (str(w), w @ v)[1])(softmax(q @ k.mT)),
        "dropout in evaluation": lambda q, k, v: functional.dropout(softmax(q @ k.mT), 0.5, training=False) @ v,
        "folded": lambda q, k, v: torch.bmm(
            softmax(torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).view(B, H, T, T) + BIAS).view(-1, T, T),
            v.flatten(0, 1),
        ),
    }


def results(code: Code, size: float = 1.0) -> list[Tensor]:
    drawn = torch.randn(3, B, H, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    inputs = [(x * size).requires_grad_() for x in drawn]
    return of_weighted_sum(code, inputs, BIAS)


def taken(code: Code, size: float = 1.0) -> None:
    plain = results(code, size)
    with scratch.enabled():
        ours = results(code, size)
    torch.testing.assert_close(ours, plain, rtol=1e-11, atol=1e-12, equal_nan=True)
    assert scratch.counts() == (1, {})


def left(code: Code, size: float = 1.0) -> None:
    plain = results(code, size)
    with scratch.enabled():
        ours = results(code, size)
    torch.testing.assert_close(ours, plain, rtol=0, atol=0, equal_nan=True)
    assert scratch.counts().taken == 0
    assert sum(scratch.counts().left.values()) == 1
