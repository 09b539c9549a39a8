"""Rounds, memory and agreement of all sides of all cases."""

import datetime
import importlib.metadata
import os
import platform
import re
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import pyattn
from comparison import attention, models
from pyattn.cli.bench.table import usable
from pyattn.cli.options import DTYPES, cpu
from pyattn.cli.timing import peak_memory, rounds_in_turn

PACKAGES = ("torch", "pyattn", "onnxruntime", "openvino", "transformers", "numpy")
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}
"""Largest difference from ours of out, whose inputs have variance 1; a step's loss, relative to ours."""

STEPS = 3
"""Steps before the clock starts, whose losses are kept."""

Calls = Mapping[str, Callable[[], Any]]
Record = dict[str, Any]


def versions() -> dict[str, str]:
    """The installed ones of PACKAGES."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found | {"python": platform.python_version(), "torch": torch.__version__}


def disagreement(results: Mapping[str, Any], dtype: str, sides: dict[str, Record]) -> list[str]:
    """The sides whose first result differs too much from ours; notes each one's difference."""
    ours = results.get("pyattn")
    wrong = []
    for name, result in results.items():
        if isinstance(ours, Tensor) and isinstance(result, Tensor):
            difference = float((result.float().reshape(ours.shape) - ours.float()).abs().max())
        elif isinstance(ours, list) and isinstance(result, list):
            difference = max(abs(a - b) / abs(a) for a, b in zip(ours, result, strict=True))
            sides[name]["losses"] = result
        else:
            continue
        sides[name]["difference"] = difference
        if not difference <= TOLERANCE[dtype]:
            sides[name]["left_out"] = f"differs from pyattn by {difference:.1e}"
            wrong.append(name)
    return wrong


def passed(calls: Calls, key: str, dtype: str, ends: float, sides: dict[str, Record]) -> None:
    """Measure one pass of all sides that can do it, and write it into their records.

    Args:
        key: "forward" or "training".
        ends: ``time.perf_counter()`` at which the rounds end; there are at least three.
    """
    results: dict[str, Any] = {}

    def first(name: str, call: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            began = time.perf_counter()
            results[name] = call()
            sides[name][key] = {"first_seconds": time.perf_counter() - began}

        return run

    for name in calls:
        sides.setdefault(name, {})
    good, reasons = usable({name: first(name, call) for name, call in calls.items()})
    for name, reason in reasons.items():
        sides[name][f"{key}_left_out"] = re.sub(r"/\S+/", "", reason)  # no folder of this machine
    wrong = disagreement(results, dtype, sides)
    there = {name: calls[name] for name in good if name not in wrong}
    if not there:
        return
    seconds = max(0.0, ends - time.perf_counter()) / len(there)
    taken, _ = rounds_in_turn(there, seconds)
    for name, rounds in taken.items():
        sides[name][key]["rounds"] = [mean for mean, _, _ in rounds]
        sides[name][key]["peak_bytes"] = peak_memory(there[name])


def attention_case(shape: attention.Shape, dtype: str, ends: float) -> dict[str, Record]:
    """The sides of attention at this shape."""
    torch.compiler.reset()
    sides: dict[str, Record] = {}
    contest = attention.contest(shape, DTYPES[dtype])
    share = 1.0 if not contest.trainings else 0.35
    with torch.no_grad():
        now = time.perf_counter()
        passed(contest.forwards, "forward", dtype, now + share * (ends - now), sides)
    if contest.trainings:
        passed(contest.trainings, "training", dtype, ends, sides)
    return sides


def step_case(name: str, dtype: str, ends: float) -> dict[str, Record]:
    """The sides of a model's training step."""
    torch.compiler.reset()
    sides: dict[str, Record] = {}
    trainers = models.steps(name, DTYPES[dtype])
    warmed = {side: _after_steps(trainer) for side, trainer in trainers.items()}
    passed(warmed, "training", dtype, ends, sides)
    return sides


def _after_steps(trainer: Callable[[], float]) -> Callable[[], Any]:
    """A step; the first call makes STEPS of them and returns their losses."""
    losses: list[float] = []

    def step() -> Any:
        if losses:
            return trainer()
        losses.extend(trainer() for _ in range(STEPS))
        return losses

    return step


def cases(dtypes: list[str]) -> dict[tuple[str, str, str, str], Callable[[float], dict[str, Record]]]:
    """All cases by kind, name, sizes and dtype; each takes the end of its time."""
    found: dict[tuple[str, str, str, str], Callable[[float], dict[str, Record]]] = {}
    for dtype in dtypes:
        for kind, shapes in (("layer", attention.LAYERS), ("token", attention.TOKENS)):
            for shape in shapes:
                key = kind, shape.name, shape.described(), dtype
                found[key] = lambda ends, s=shape, d=dtype: attention_case(s, d, ends)
        for name, (_, _, sizes) in models.MODELS.items():
            found["step", name, sizes, dtype] = lambda ends, n=name, d=dtype: step_case(n, d, ends)
    return found


def measured(command: str, minutes: float, dtypes: list[str], say: Callable[[str], None]) -> Record:
    """The record of all cases, which share the time equally; compiling counts, so a second run has more rounds."""
    began = time.perf_counter()
    ends, todo = began + 60 * minutes, cases(dtypes)
    record: Record = {
        "command": command,
        "date": datetime.date.today().isoformat(),
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "isa": pyattn.isa(),
        "versions": versions(),
        "load_before": os.getloadavg()[0],
        "cases": [],
    }
    for i, ((kind, name, sizes, dtype), case) in enumerate(todo.items()):
        now = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sides = case(now + max(0.0, ends - now) / (len(todo) - i))
        record["cases"].append({"kind": kind, "name": name, "sizes": sizes, "dtype": dtype, "sides": sides})
        say(f"{kind} {name} {dtype}: {time.perf_counter() - now:.0f} s")
    return record | {"load_after": os.getloadavg()[0], "seconds": time.perf_counter() - began}
