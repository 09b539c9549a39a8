"""Tensors of a graph that hold one number everywhere: ``where(mask, scores, full_like(scores, -1e9))`` is a fill."""

from typing import Any

import torch
from torch import Tensor

from pyattn.adapters.scratch.recording.deferred import Deferred

FULL: set[Any] = {torch.full, torch.full_like, Tensor.new_full}


class Constants:
    """The tensors without memory that were made by a function of :data:`FULL`, and their numbers."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Tensor, float]] = {}

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Tensor) -> None:
        """Notes ``made``, the result of ``func``, if its number is known."""
        at = 2 if func is Tensor.new_full else 1
        number = kwargs.get("fill_value") if len(args) <= at else args[at]
        if isinstance(number, int | float) and made.dtype.is_floating_point and not made.requires_grad:
            self._made[id(made)] = made, number

    def as_numbers(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of ``where``: numbers, and tensors that hold one, as tensors that torch knows to hold one."""
        scores = next((x for x in args if isinstance(x, Deferred)), None)
        return args if scores is None else tuple(self._as_number(x, scores) for x in args)

    def _as_number(self, x: Any, scores: Tensor) -> Any:
        if type(x) in (int, float):
            return torch.tensor(x, dtype=scores.dtype)
        tensor, number = self._made.get(id(x), (None, 0.0))
        fits = tensor is not None and (x.dim() == 0 or (x.shape == scores.shape and x.dtype == scores.dtype))
        return torch.tensor(number, dtype=x.dtype) if fits and x._version == 0 else x
