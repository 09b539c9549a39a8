"""Kernels that take the place of torch's own operators for a while."""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch


class Kernels:
    """Functions registered with torch's dispatcher from construction to :meth:`remove`, which leaves it as it was.

    Args:
        functions: by operator, such as ``"aten::add.Tensor"``, and dispatch key, such as ``"CPU"``.
    """

    _alive: ClassVar[deque[Any]] = deque(maxlen=1000)
    """Keeps kernels alive after their removal: another thread may have looked one up and not yet called it."""

    def __init__(self, functions: Mapping[tuple[str, str], Callable[..., Any]]) -> None:
        self._library = torch.library.Library("aten", "IMPL")
        for (name, key), function in functions.items():
            self._library.impl(name, function, key)
            self._alive.append(torch.library.get_kernel(name, key))

    def remove(self) -> None:
        """Takes the functions out of the dispatcher."""
        self._library._destroy()
