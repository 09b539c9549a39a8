"""Plain calls of the operator under the switch: csrc/ops/sdpa.cpp computes them without entering Python."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pyattn import ops

_kernels = torch.library.Library("pyattn", "IMPL")


def take_others(kernel: Callable[..., Any]) -> None:
    """Registers the kernel for all calls on the CPU that are not plain."""
    _kernels.impl(ops.sdpa_by_rules.name(), kernel, "CompositeImplicitAutograd")


def switch(on: bool) -> None:
    """Replaces torch's kernels on the CPU, or restores them; under a lock."""
    ops.sdpa_switch(on)


def calls() -> int:
    """How many plain calls were computed since the process began."""
    return ops.sdpa_calls()


@contextmanager
def forbidden() -> Iterator[None]:
    """Within the block, no thread's call is plain: Python sees each."""
    ops.sdpa_forbid(1)
    try:
        yield
    finally:
        ops.sdpa_forbid(-1)
