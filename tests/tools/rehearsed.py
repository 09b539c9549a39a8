"""Stand-ins for a GPU's graphs and streams on a CPU, so tests of them are rehearsed before there is a GPU."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from support.caches import on_gpu
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pyattn import ops

CACHES = tuple(f"cache_{name}" for name in ("append", "append_pages", "keep", "keep_pages", "reorder", "reorder_pages"))
"""Operators whose GPU kernels consist of torch operations, so a CPU can run them."""


class Graph(TorchDispatchMode):
    """A captured graph. A capture leaves earlier tensors as they were; a replay writes all that the capture wrote."""

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
                if isinstance(new, Tensor) and new.data_ptr() != old.data_ptr():  # neither a view nor written in place
                    old.copy_(new)


class Stream:
    """A stream that runs its work at once."""

    def wait_stream(self, other: "Stream") -> None: ...

    def synchronize(self) -> None: ...


@contextlib.contextmanager
def instead_of_cuda() -> Iterator[None]:
    """Within it, torch.cuda has these graphs and streams, and caches use the operators of a GPU."""
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
