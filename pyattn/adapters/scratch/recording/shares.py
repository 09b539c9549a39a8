"""The gradient of repeated keys or values, of which usually nobody reads more than its sum over each group of heads.

The code that repeats them sums that gradient over groups again. Native code computes the sums alone, so they are
handed on as a tensor that stands for all heads. A hook that reads it, or any other operation, computes it.
"""

import math
from typing import Any

import torch
from torch import Tensor

from pyattn.adapters.scratch.recording.deferred import Cell, Deferred, computed
from pyattn.adapters.scratch.recording.expressions import Expression

aten: Any = torch.ops.aten

_VIEWS = {aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default}
_ALIASES = {aten.detach.default, aten.alias.default}
_ORDERS = {aten.transpose.int, aten.permute.default}


class Shares(Deferred):
    """A gradient (..., groups * size, ...) whose sums over each ``size`` after one another are known.

    Attributes:
        sums: (..., groups, ...).
        at: the dimension of the groups.
    """

    sums: Tensor
    at: int

    @staticmethod
    def of(expression: Expression, sums: Tensor, size: int, at: int) -> "Shares":
        """A contiguous gradient with the values of ``expression``."""
        shape = (*sums.shape[:at], sums.shape[at] * size, *sums.shape[at + 1 :])
        return _made(Cell(expression, None), shape, None, sums, at)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        x = args[0] if args else None
        with torch._C.DisableTorchFunctionSubclass():
            out = _known(func, x, args) if isinstance(x, Shares) and not (kwargs or x.cell.memory.changed) else None
            return computed(func, args, kwargs) if out is None else out


def _made(cell: Cell, shape: Any, stride: Any, sums: Tensor, at: int) -> Shares:
    made = Shares(cell, shape, stride, sums)
    made.sums, made.at = sums, at
    return made


def _known(func: Any, x: Shares, args: tuple[Any, ...]) -> Tensor | None:
    """The result of ``func`` if the sums give it, or its own."""
    if func is aten.sum.dim_IntList:
        dims = [] if args[1] is None else [at % x.dim() for at in args[1]]
        summed: Tensor | None = func(x.sums, *args[1:]) if x.at in dims and x.sums.shape[x.at] == 1 else None
        return summed
    sums, at = x.sums, x.at
    if func in _VIEWS:
        found = _viewed(x, tuple(args[1]))
        if found is None:
            return None
        sums, at = found
    elif func in _ORDERS:
        sums = func(sums, *args[1:])
        at = func(torch.empty([int(n == at) for n in range(x.dim())], device="meta"), *args[1:]).shape.index(1)
    elif func not in _ALIASES:
        return None
    seen = func(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"), *args[1:])
    cell = Cell(Expression(func, (x.cell.expression, *args[1:])), None, memory=x.cell.memory)
    return _made(cell, seen.shape, seen.stride(), sums, at)


def _viewed(x: Shares, shape: tuple[int, ...]) -> tuple[Tensor, int] | None:
    """The sums of a view of ``x`` and their dimension, if a dimension of ``shape`` holds whole groups."""
    size, after = x.shape[x.at] // x.sums.shape[x.at], math.prod(x.shape[x.at + 1 :])
    for at, n in enumerate(shape):
        if n % size == 0 and math.prod(shape[at + 1 :]) == after:
            return x.sums.reshape(*shape[:at], n // size, *shape[at + 1 :]), at
    return None
