"""The calls of one comparison: one of each side, and the work that they do."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pyattn.cli.bench.table import Call
from pyattn.cli.options import DTYPES

LARGEST_SCORES = 2**30
"""Bytes of a score matrix beyond which plain torch, which stores one, is left out."""

Sizes = tuple[int, ...]
Peaks = dict[tuple[str, str], float]
"""FLOP/s by dtype and instruction set."""


class Run(NamedTuple):
    """The name of a comparison and how to run it, with FlexAttention if ``flex``."""

    what: str
    dtype: str
    device: str
    flex: bool = False
    peaks: Peaks = {}  # noqa: RUF012  (nobody writes to it)

    @property
    def place(self) -> tuple[torch.dtype, str]:
        """dtype and device of the tensors."""
        return DTYPES[self.dtype], self.device

    def random(self, *shape: int) -> Tensor:
        """A random leaf of this shape."""
        return torch.randn(shape, dtype=DTYPES[self.dtype], device=self.device, requires_grad=True)


@dataclass(frozen=True)
class Side:
    """One side of a comparison: a function or a module, its inputs and options; each that can gets a gradient.

    Attributes:
        dout: the gradient of the output.
    """

    function: Callable[..., Any]
    inputs: Sequence[Tensor]
    dout: Tensor
    options: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def _detached(self) -> list[Tensor]:
        return [t.detach() for t in self.inputs]

    def forward(self) -> Any:
        """The output."""
        return self.function(*self._detached, **self.options)

    def gradients(self) -> tuple[Tensor, ...]:
        """The gradients of inputs, options and parameters."""
        weights = self.function.parameters() if isinstance(self.function, nn.Module) else ()
        leaves = [t for t in (*self.inputs, *self.options.values(), *weights) if getattr(t, "requires_grad", False)]
        return torch.autograd.grad(self.function(*self.inputs, **self.options), leaves, self.dout)


class Calls(NamedTuple):
    """One call of each side of a comparison.

    Attributes:
        forwards: by side.
        trainings: forward and backward, by side; a side without a backward has none.
        done: the operations, bytes or tokens of a forward; 0 if they are not counted.
        peak_bytes: memory of the sides that other processes compute.
    """

    forwards: Mapping[str, Call]
    trainings: Mapping[str, Call] = {}
    done: float = 0
    peak_bytes: Mapping[str, int | None] = {}


def both(sides: Mapping[str, Side], done: float = 0, others: Mapping[str, Call] = {}) -> Calls:
    """The calls of ``sides``, and of ``others``, which have no backward."""
    forwards = {name: side.forward for name, side in sides.items()} | dict(others)
    return Calls(forwards, {name: side.gradients for name, side in sides.items()}, done)
