"""Output of a profile: tables of phases or of GPU kernels, the read rate of decoding, and a trace."""

import gzip
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyattn import _C, attention_weights
from pyattn.cli import InputError, output
from pyattn.cli.profile.phases import pass_times, phases
from pyattn.cli.timing import in_turn

SECONDS = 0.5
"""Time for each of the two measurements in :func:`show_reading`."""

ROWS = 256
"""Queries whose weights are computed at a time: 16 MB per head with 16,384 keys in float32."""

MASKS = ("causal", "window", "key_ranges", "mask")
"""Options that decide which keys a query sees."""

EXPLAINED = {
    "merge_out": "few queries: threads share the keys of a head; this pass merges their partial out",
    "reduce": "few heads: threads share the keys or queries of a head; this pass adds up their partial gradients",
    "mask_rows": "masks: the keys that a bool mask leaves visible, for each row of the mask",
    "bias_rows": "masks: the keys that the -inf of a bias leave visible, for each row of the bias",
    "mask_blocks": "masks: the keys that ranges, mask and bias leave each block of rows",
    "bias_gradient": "scores: the gradient of a bias that broadcasts, from recomputed S and dP",
    "head_gradients": "scores: sums the gradients of slopes and sinks",
    "relative_gradient": "scores: sums the gradient of a relative bias",
}
"""Passes that only some shapes and options need."""


def show(tasks: list[_C.TaskProfile], calls: int, useful: dict[str, int], peak: float) -> None:
    """Print one table per pass.

    Args:
        tasks: all tasks of the ``calls`` calls.
        useful: by pass, the operations per call that the mask leaves.
        peak: operations per second of one thread.
    """
    for pass_name, times in pass_times(tasks, calls).items():
        busy: Counter[int] = Counter()
        for task in (task for task in tasks if task.pass_name == pass_name):
            busy[task.thread] += task.end_ns - task.begin_ns
        total = sum(s for s, _ in times.values()) or busy.total() / 1e9 / calls  # passes that prepare masks have none
        even = busy.total() / len(busy) / max(busy.values())
        print(f"\n{pass_name:16}{'ms':>10}{'share':>8}{'GFLOP/s':>10}{'peak':>7}", end="")
        print(f"   {len(busy)} threads, {even:.0%} as long as the longest on average" if len(busy) > 1 else "")
        if pass_name in EXPLAINED:
            print(f"  ({EXPLAINED[pass_name]})")
        lines = [(name, *times[name]) for name in _C.phases if name in times and times[name][0] > total / 1000]
        lines.append(("all", total, sum(n for _, n in times.values())))
        if pass_name in useful:
            lines.append(("all, as masked", total, useful[pass_name]))
        for name, s, n in lines:
            rate = f"{n / s / 1e9:10.1f}{n / s / peak:7.0%}" if n else ""
            print(f"  {name:14}{1e3 * s:10.3f}{s / total:8.1%}{rate}")


def launched(op: Any) -> Iterator[Any]:
    """The GPU kernels of an operator in torch's profile, including those of nested operators."""
    yield from op.kernels
    for child in op.cpu_children:
        yield from launched(child)


def show_kernels(events: Iterable[Any], useful: dict[str, int]) -> None:
    """Print one table of GPU kernels per pass, longest first; ``useful`` as in :func:`show`."""
    for pass_name, flops in useful.items():
        ops = [event for event in events if event.name == f"pyattn::attention_{pass_name}"]
        times: dict[str, list[float]] = {}
        for kernel in (kernel for op in ops for kernel in launched(op)):
            times.setdefault(kernel.name, []).append(kernel.duration / 1e6)
        calls, total = len(ops), sum(map(sum, times.values()))
        if not times:
            raise InputError("--device cuda needs a torch.profiler that sees kernels (CUPTI)", f"none in {calls} calls")
        print(f"\n{pass_name:62}{'ms':>10}{'share':>8}{'launches':>10}{'TFLOP/s':>9}")
        lines = [(name, sum(taken), f"{len(taken) / calls:10g}") for name, taken in times.items()]
        lines.sort(key=lambda line: line[1], reverse=True)
        for name, s, rest in [*lines, ("all, as masked", total, f"{calls * flops / total / 1e12:19.1f}")]:
            short = name.removeprefix("void ").replace("(anonymous namespace)::", "")[:60]
            print(f"  {short:60}{1e3 * s / calls:10.3f}{s / total:8.1%}{rest}")


def bytes_seen(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> int:
    """Bytes of the keys and values that some query of their group sees, found from the weights of zero queries."""
    masks = {name: value for name, value in options.items() if name in MASKS}
    seen = torch.zeros(*q.shape[:2], k.shape[2], dtype=torch.bool, device=q.device)
    for rows in torch.arange(q.shape[2]).split(ROWS):
        seen |= (attention_weights(torch.zeros_like(q), k, rows=rows, **masks) > 0).any(2)
    keys = int(seen.unflatten(1, (k.shape[1], -1)).any(2).sum())
    return keys * (k.shape[3] + v.shape[3]) * k.itemsize


def show_reading(call: Callable[[], object], q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    """Print how fast ``call``, attention of q, k and v, reads its visible keys and values, beside torch.sum."""
    calls = {"attention": call, "torch.sum": lambda: (k.sum(), v.sum())}
    times = in_turn(calls, "torch.sum", SECONDS, q.device.type)
    seen, whole = bytes_seen(q, k, v, **options), k.nbytes + v.nbytes
    rate, theirs = seen / times["attention"].seconds, whole / times["torch.sum"].seconds
    share = times["attention"].speedup * seen / whole
    print(f"\nK and V: {seen / 1e6:,.1f} MB a call, {rate / 1e9:.1f} GB/s", end="")
    print(f", {share:.0%} of the {theirs / 1e9:.1f} GB/s of torch.sum")


def write_trace(path: Path, tasks: list[_C.TaskProfile], theirs: torch.profiler.profile) -> None:
    """Write torch's Chrome trace plus the kernels' tasks and phases, each on its thread; compressed if named ``*.gz``.

    Raises:
        InputError: no room for it at ``path``, or in the folder for temporary files, where torch writes first.
    """
    with tempfile.TemporaryDirectory() as folder:
        export = Path(folder, "trace.json")
        try:
            theirs.export_chrome_trace(str(export))
            trace = json.loads(export.read_text())
        except (OSError, ValueError) as error:  # torch reports no failure: the file is cut off or missing
            raise InputError("torch must be able to write its trace for --trace", folder) from error
    base = trace.get("baseTimeNanoseconds", 0)

    def bar(name: str, thread: int, begin: float, seconds: float, **args: object) -> None:
        place = {"ph": "X", "cat": "pyattn", "pid": os.getpid(), "tid": thread}
        trace["traceEvents"].append(place | {"name": name, "ts": begin, "dur": seconds * 1e6, "args": args})

    for task in tasks:
        at = (task.begin_ns - base) / 1e3
        bar(task.pass_name, task.thread, at, (task.end_ns - task.begin_ns) / 1e9, isa=task.isa, items=task.items)
        for name, seconds, flops in phases(task):
            bar(name, task.thread, at, seconds, **({"GFLOP/s": flops / seconds / 1e9} if flops else {}))
            at += seconds * 1e6
    content = json.dumps(trace).encode()
    output.write(path, gzip.compress(content) if path.suffix == ".gz" else content)
