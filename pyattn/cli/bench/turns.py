"""One build's part of ``pyattn bench --against``: it makes a comparison's calls, and times one when it is told to."""

import hashlib
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyattn import isa, isas
from pyattn.cli.bench.sides.calls import Calls, Run
from pyattn.cli.bench.table import Call
from pyattn.cli.timing import by_the_wall, once, settle

Side = tuple[str, str]
"""A side of the comparison, and "forward" or "forward_backward"."""

_calls: dict[Side, Call] = {}
"""The calls of the current comparison."""


def digest(results: Any) -> str:
    """A hash of all bits of a tensor or of several; "" for results that are not tensors."""
    found = hashlib.sha256()
    tensors = [results] if isinstance(results, Tensor) else results if isinstance(results, tuple) else []
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest() if tensors else ""


def _called(side: Side, repeats: int) -> float:
    with torch.set_grad_enabled(side[1] != "forward"):
        return once(_calls[side], repeats)


def made(make: Callable[[Run, Any], Calls], run: Run, sizes: Any, threads: int) -> dict[Side, tuple[str, str]]:
    """Makes the calls of pyattn, of the active instruction set alone, and calls each once.

    Returns:
        the digest of each result, and why it has none; inputs are the same in all builds.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    _calls.clear()
    found = make(run, sizes)
    others = {f"pyattn {name}" for name in isas() if name != isa()}
    results: dict[Side, tuple[str, str]] = {}
    for key, calls in (("forward", found.forwards), ("forward_backward", found.trainings)):
        for name, call in calls.items():
            if not name.startswith("pyattn") or name in others:
                continue
            try:
                with torch.set_grad_enabled(key != "forward"):
                    results[name, key] = digest(call()), ""
            except Exception as error:  # an older build refuses what a newer one takes
                results[name, key] = "", f"{type(error).__name__}: {error}".splitlines()[0]
            else:
                _calls[name, key] = call
    return results


def timed(side: Side, repeats: int, cpu: int | None = None) -> float:
    """Seconds per call, on this processor if given; the threads of this build sleep again when it returns."""
    if cpu is not None:
        os.sched_setaffinity(0, [cpu])
    if repeats > 1:
        _called(side, 1)  # as in in_turn
    seconds = _called(side, repeats)
    if by_the_wall("cpu"):
        settle()
    return seconds
