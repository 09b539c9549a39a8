"""Kernels that take the place of torch's own operators for a while."""

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch

_Functions = Mapping[tuple[str, str], Callable[..., Any]]


def _around(function: Callable[..., Any], replaced: Any) -> Callable[..., Any]:
    def kernel(keys: torch._C.DispatchKeySet, *arguments: Any, **named: Any) -> Any:
        return function(partial(replaced.call_boxed, keys), *arguments, **named)

    return kernel


class Kernels:
    """Functions registered with torch's dispatcher from construction to :meth:`remove`, which leaves it as it was.

    Args:
        functions: by operator, such as ``"aten::add.Tensor"``, and dispatch key, such as ``"CPU"``.
        outer: also; each function is called with the one that it replaces, then with the operator's arguments.
    """

    _alive: ClassVar[deque[Any]] = deque(maxlen=1000)
    """Keeps kernels alive after their removal: another thread may have looked one up and not yet called it."""

    def __init__(self, functions: _Functions, outer: _Functions) -> None:
        replaced = {place: torch.library.get_kernel(*place) for place in outer}
        self._library = torch.library.Library("aten", "IMPL")
        for place, function in functions.items():
            self._register(place, function)
        for place, function in outer.items():
            self._register(place, _around(function, replaced[place]), with_keyset=True)

    def _register(self, place: tuple[str, str], function: Callable[..., Any], *, with_keyset: bool = False) -> None:
        name, key = place
        self._library.impl(name, function, key, with_keyset=with_keyset)
        self._alive.append(torch.library.get_kernel(name, key))

    def remove(self) -> None:
        """Takes the functions out of the dispatcher."""
        self._library._destroy()
