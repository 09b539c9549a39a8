"""A GPU's graphs and streams on a CPU, for tests of them: what they expect is tried before there is a GPU."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from cache.caches import on_gpu
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pyattn import ops

CACHES = ("cache_append", "cache_append_pages", "cache_reorder", "cache_reorder_pages")
"""Operators whose kernels for a GPU are made of torch's operations, so that a CPU runs them."""


class Graph(TorchDispatchMode):
    """A captured graph. A capture writes to no tensor that was there before, a replay to all that it has made."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Callable[..., Any], Any, Any, Any]] = []
        self._before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if isinstance(value, Tensor) and argument.alias_info is not None and argument.alias_info.is_write:
                self._before.append((value, value.clone()))
        result = func(*args, **kwargs or {})
        self._calls.append((func, args, kwargs or {}, result))
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        with torch.no_grad():
            for tensor, before in reversed(self._before):
                tensor.copy_(before)

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, result in self._calls:
            for new, old in zip(tree_leaves(func(*args, **kwargs)), tree_leaves(result), strict=True):
                if isinstance(new, Tensor) and new.data_ptr() != old.data_ptr():  # no view, nor written in place
                    old.copy_(new)


class Stream:
    """Work is done when it is asked for."""

    def wait_stream(self, other: "Stream") -> None: ...

    def synchronize(self) -> None: ...


@contextlib.contextmanager
def instead_of_cuda() -> Iterator[None]:
    """Within it torch.cuda has these graphs and streams, and caches the operators of a GPU."""
    operators = {name: getattr(ops, name) for name in CACHES}
    with contextlib.ExitStack() as stack:
        for name, value in {
            "CUDAGraph": Graph,
            "graph": lambda graph: graph,
            "Stream": Stream,
            "current_stream": Stream,
            "stream": lambda stream: contextlib.nullcontext(),
            "_sleep": lambda cycles: None,
        }.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        for name, operator in operators.items():
            call = lambda *arguments, operator=operator: on_gpu(operator, *arguments)  # noqa: E731
            stack.enter_context(mock.patch.object(ops, name, call))
        yield
