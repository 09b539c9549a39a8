"""The fixed cost of a call, split: Python, the dispatcher, checks and allocation, kernels."""

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pyattn import _C
from pyattn.cli.timing import in_turn

BATCHES, CALLS = 5, 40
"""The kernels' own time is the median of some batches of calls."""

Operator = Callable[[], Any]


class Split(NamedTuple):
    """Seconds of a call.

    Attributes:
        whole: all of it.
        python: above the operators: parsing of options, autograd's graph and engine.
        dispatcher: as many calls of an operator of torch that takes the same tensors and computes nothing.
        checks: in the operators, around the kernels: checks, parameters, allocation.
        kernels: in the kernels.
    """

    whole: float
    python: float
    dispatcher: float
    checks: float
    kernels: float


class _Recorder(TorchDispatchMode):
    """Keeps each operator of pyattn that is called, with its arguments."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[Operator] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "pyattn":
            self.operators.append(lambda: func(*args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))


def _kernel_seconds(call: Operator) -> float:
    """Seconds of all tasks, per call."""
    _C.start_profile()
    try:
        for _ in range(CALLS):
            call()
    finally:
        tasks = _C.stop_profile()
    return sum(task.end_ns - task.begin_ns for task in tasks) / 1e9 / CALLS


def split(call: Callable[[], object], seconds: float) -> Split:
    """The parts of ``call``, each timed for about ``seconds``."""
    with _Recorder() as recorder:
        call()
    operators = recorder.operators
    q = torch.zeros(1, 1, 1, 1)

    def all_operators() -> None:
        with torch.no_grad():
            for operator in operators:
                operator()

    def dispatched() -> None:
        for _ in operators:
            torch.ops.aten._fused_sdp_choice.default(q, q, q)

    times = in_turn({"call": call, "operators": all_operators, "dispatcher": dispatched}, "call", seconds)
    whole, inside, dispatcher = (times[name].seconds for name in ("call", "operators", "dispatcher"))
    kernels = statistics.median(_kernel_seconds(all_operators) for _ in range(BATCHES))
    return Split(whole, whole - inside, dispatcher, inside - dispatcher - kernels, kernels)


def show(shape: str, rows: dict[str, Split]) -> None:
    """Print the parts of each call by name, in microseconds."""
    head = ("call", "Python, graph", "dispatcher", "checks, memory", "kernels")
    print(f"\n{f'fixed cost, {shape}, us':34}" + "".join(f"{name:>16}" for name in head))
    for name, parts in rows.items():
        print(f"  {name:32}" + "".join(f"{1e6 * part:16.1f}" for part in parts))
