"""A score_mod recorded while dynamo traces it: its calls are constants, what it captures are values of the graph.

dynamo inlines the score_mod for one pair, under a mode that it traces as well. So it guards on all that the score_mod
reads, also inside closures and modules, and the score_mod may be defined, and its tensors computed, in the graph.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyattn.adapters.flex.evaluation import Lookups

Encoded = tuple[str, Any]
"""One of ``("argument" or "captured" or "number" or "result", its number)``, ``("part", (result, place))``,
``("constant", x)``, ``("tuple" or "list" or "slice", parts)`` and ``("dict", ((name, part), ...))``."""

Call = tuple[Any, Encoded, Encoded]
"""A function with its arguments, encoded, and its named ones."""


FROM_ARRAYS = torch.as_tensor, torch.asarray, torch.tensor


class Recording(Lookups):
    """The calls of functions of torch while it is active.

    Attributes:
        calls: in order.
        captured: the tensors that come from elsewhere.
        numbers: ints and floats, which may be symbolic.
    """

    def __init__(self, arguments: Sequence[Tensor]) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.captured: list[Tensor] = []
        self.numbers: list[float] = []
        self._tensors = list(arguments)
        self._codes: list[Encoded] = [("argument", number) for number in range(len(arguments))]

    def encoded(self, x: Any) -> Encoded:
        """``x`` as a constant, apart from tensors and numbers."""
        if isinstance(x, Tensor):
            for tensor, code in zip(self._tensors, self._codes, strict=True):
                if tensor is x:  # dynamo can't trace id
                    return code
            self.captured.append(x)
            return self._named(x, ("captured", len(self.captured) - 1))
        if isinstance(x, tuple | list):
            return "tuple" if isinstance(x, tuple) else "list", tuple([self.encoded(part) for part in x])
        if isinstance(x, slice):
            return "slice", tuple([self.encoded(part) for part in (x.start, x.stop, x.step)])
        if isinstance(x, dict):
            return "dict", tuple([(name, self.encoded(part)) for name, part in x.items()])
        if isinstance(x, int | float) and not isinstance(x, bool):
            self.numbers.append(x)
            return "number", len(self.numbers) - 1
        return "constant", x

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in FROM_ARRAYS and args and not isinstance(args[0], Tensor | tuple | list | int | float | complex):
            return super().__torch_function__(func, types, args, kwargs)  # of an array, which the graph takes as a tensor
        call = len(self.calls)
        self.calls.append((func, self.encoded(tuple(args)), self.encoded(kwargs or {})))
        result = super().__torch_function__(func, types, args, kwargs)
        if isinstance(result, Tensor):
            self._named(result, ("result", call))
        elif isinstance(result, tuple | list):
            for place, x in enumerate(result):
                if isinstance(x, Tensor):
                    self._named(x, ("part", (call, place)))
        return result

    def _named(self, x: Tensor, code: Encoded) -> Encoded:
        self._tensors.append(x)
        self._codes.append(code)
        return code
