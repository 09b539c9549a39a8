"""Attention whose keys and values are repeated for groups of heads, for the tests of pyattn.adapters.scratch."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pyattn.adapters import scratch
from pyattn.adapters.scratch import grouped

B, G, SIZE, T, D = 2, 2, 3, 5, 4
H = G * SIZE
FUTURE = torch.ones(T, T).triu(1).bool()


class Counting:
    """How often heads were taken back to groups, and how often the gradients of all heads were computed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken = self.whole = 0
        attend, gradients = grouped.attend, grouped.Whole.gradients

        def counted(*args: Any) -> Tensor:
            self.taken += 1
            return attend(*args)

        def computed(*args: Any, **kwargs: Any) -> list[Tensor | None]:
            self.whole += 1
            return gradients(*args, **kwargs)

        monkeypatch.setattr(grouped, "attend", counted)
        monkeypatch.setattr(grouped.Whole, "gradients", computed)


def inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q (B, H, T, D), k and v (B, G, T, D)."""
    generator = torch.Generator().manual_seed(1)
    drawn = (torch.randn(B, n, T, D, dtype=dtype, generator=generator) for n in (H, G, G))
    return [x.requires_grad_() for x in drawn]


def repeated(x: Tensor) -> Tensor:
    """(B, G, T, D) to (B, H, T, D)."""
    return x.repeat_interleave(SIZE, 1)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of (B, H, T, D)."""
    return (q @ k.mT / 2).masked_fill(FUTURE, -math.inf).softmax(-1) @ v


def results(repeat: Callable[[Tensor], Tensor], code: Callable[..., Tensor] = attention, dtype=torch.float64):
    """The result, and the gradients of a weighted sum of it."""
    q, k, v = inputs(dtype)
    out = code(q, repeat(k), repeat(v))
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [out.detach() + 0, *torch.autograd.grad((out * weights).sum(), (q, k, v))]


def both(function: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """Results with recognition, and without."""
    plain = function(*args)
    with scratch.enabled():
        return function(*args), plain


def assert_same(ours: Any, plain: Any) -> None:
    """Asserts that float64 results are equal but for rounding."""
    torch.testing.assert_close(ours, plain, rtol=1e-11, atol=1e-12)
