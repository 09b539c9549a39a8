"""Inputs for selections of keys, and the largest tensor that a call allocates."""

import math
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def grid(shape: Sequence[int], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Multiples of a half from -1 to 1: their products and sums are exact in every dtype that sums in float32."""
    return torch.randint(-2, 3, tuple(shape), generator=generator).to(dtype) / 2


def strided(t: Tensor, random: Random) -> Tensor:
    """The same values within a tensor of NaN, with other strides."""
    if random.random() < 0.3:
        return t
    order = list(range(t.dim()))
    random.shuffle(order)
    steps = [random.choice([1, 2]) for _ in order]
    shape = [t.shape[d] * steps[d] + 1 for d in order]
    wide = torch.full(shape, math.nan, dtype=t.dtype)
    view = wide.permute([order.index(d) for d in range(t.dim())])
    view = view[tuple(slice(1, 1 + size * step, step) for size, step in zip(t.shape, steps, strict=True))]
    return view.copy_(t)


class Largest(TorchDispatchMode):
    """Watches every result of an operator in the block.

    Attributes:
        bytes: of the largest storage.
    """

    bytes: int = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.bytes = max(self.bytes, leaf.untyped_storage().nbytes())
        return result
