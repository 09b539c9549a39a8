"""Compiled code that changes a tensor between the two products: attention, which reads later, leaves it."""

from collections.abc import Callable

import pytest
import torch
from support.adapters.compiled_graphs import replacing
from torch import Tensor

from pyattn.adapters import scratch

B, H, T, D = 2, 3, 6, 4


pytestmark = pytest.mark.usefixtures("fresh")


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and a cache whose first part k is a view of."""
    generator = torch.Generator().manual_seed(1)
    q, v = torch.randn(2, B, H, T, D, generator=generator)
    cache = torch.randn(2, B, H, T, D, generator=generator)
    return q, cache[0], v, cache


def attention(change: Callable[[Tensor, Tensor], object]) -> Callable[..., Tensor]:
    def code(q: Tensor, k: Tensor, v: Tensor, cache: Tensor) -> Tensor:
        scores = q @ k.mT
        change(k, cache)
        return scores.softmax(-1) @ v

    return code


CHANGES: dict[str, tuple[Callable[[Tensor, Tensor], object], int]] = {
    "the keys": (lambda k, cache: k.zero_(), 0),
    "the cache that they are a part of": (lambda k, cache: cache.zero_(), 0),
    "their part of the cache": (lambda k, cache: cache[0].mul_(3), 0),
    "the cache, then read": (lambda k, cache: cache.add_(cache.flip(2)), 0),
    "another cache": (lambda k, cache: cache.clone().zero_(), 1),
}


@pytest.mark.parametrize("name", CHANGES)
@torch.no_grad()
def test_changes(name):
    change, taken = CHANGES[name]
    code = attention(change)
    plain = code(*inputs())
    counts: list[int] = []
    ours = torch.compile(code, backend=replacing(counts=counts), dynamic=False)(*inputs())
    torch.testing.assert_close(ours, plain)
    assert sum(counts) == scratch.counts().taken == taken
