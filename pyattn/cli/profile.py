"""``pyattn profile``: where the native time of attention goes.

Shown are the phases inside the kernels (packing, each product, softmax, dropout, storing), in milliseconds a call over
all threads, with the floating-point operations a second of the products on a thread and their percent of the peak of
multiply-adds, measured in the same run. Operations are counted as computed: a tile that the mask cuts computes some in
vain; the last line of a pass counts only those that the mask leaves. Below, torch.profiler's view of the same calls.
With --trace both go into one file for chrome://tracing or https://ui.perfetto.dev, where the phases of a task, which
alternate thousands of times a second, are gathered to one bar each.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from pyattn import _C, _ops, attention
from pyattn.cli import InputError, info
from pyattn.cli.bench import DTYPES, shape_of
from pyattn.cli.timing import peak_flops

SECONDS = 0.5
"""How long the calls are repeated for, at least three times."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="pyattn profile", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shapes", metavar="BxHxTxD", default="1x8x1024x64", help="of q, k and v; default: %(default)s"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of all inputs")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    parser.add_argument("--isa", choices=_C.available_isas(), default=_C.active_isa(), help="instruction set")
    parser.add_argument("--dropout", type=float, default=0.0, metavar="P", help="probability")
    parser.add_argument("--full", action="store_true", help="without the causal mask")
    parser.add_argument("--forward", action="store_true", help="without the backward")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="Chrome trace to write; default: none")
    return parser.parse_args(argv)


def repeated(call: Callable[[], object]) -> int:
    """How often ``call`` is repeated to fill SECONDS; it is warm afterwards."""
    call()
    begin = time.perf_counter()
    call()
    return min(1000, max(3, int(SECONDS / (time.perf_counter() - begin))))


def profiled(call: Callable[[], object], calls: int) -> tuple[list[_C.TaskProfile], torch.profiler.profile]:
    """The kernels' tasks of ``calls`` calls, and torch's profile of the same."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True, with_flops=True) as theirs:
        _C.start_profile()
        try:
            for _ in range(calls):
                call()
        finally:
            tasks = _C.stop_profile()
    return tasks, theirs


def phases(task: _C.TaskProfile) -> list[tuple[str, float, int]]:
    """Name, seconds and operations of each phase that a task has; its ticks are taken to fill its time."""
    second = sum(task.ticks) / max(task.end_ns - task.begin_ns, 1) * 1e9
    found = zip(_C.phases, task.ticks, task.flops, strict=True)
    return [(name, ticks / second, flops) for name, ticks, flops in found if ticks]


def show(tasks: list[_C.TaskProfile], calls: int, useful: dict[str, int], peak: float) -> None:
    """A table for each pass; ``useful`` operations of a call are those that its mask leaves, ``peak`` is a thread's."""
    for pass_name in dict.fromkeys(task.pass_name for task in tasks):
        mine = [task for task in tasks if task.pass_name == pass_name]
        seconds, flops = dict.fromkeys(_C.phases, 0.0), dict.fromkeys(_C.phases, 0)
        busy: dict[int, int] = {}
        for task in mine:
            busy[task.thread] = busy.get(task.thread, 0) + task.end_ns - task.begin_ns
            for name, s, n in phases(task):
                seconds[name] += s
                flops[name] += n
        total = sum(seconds.values())
        even = sum(busy.values()) / len(busy) / max(busy.values())
        print(f"\n{pass_name:16}{'ms':>10}{'share':>8}{'GFLOP/s':>10}{'peak':>7}", end="")
        print(f"   {len(busy)} threads, {even:.0%} as long as the longest on average" if len(busy) > 1 else "")
        lines = [(name, seconds[name], flops[name]) for name in _C.phases if seconds[name] > total / 1000]
        lines.append(("all", total, sum(flops.values())))
        if pass_name in useful:
            lines.append(("all, as masked", total, calls * useful[pass_name]))
        for name, s, n in lines:
            rate = f"{n / s / 1e9:10.1f}{n / s / peak:7.0%}" if n else ""
            print(f"  {name:14}{1e3 * s / calls:10.3f}{s / total:8.1%}{rate}")


def write_trace(path: Path, tasks: list[_C.TaskProfile], theirs: torch.profiler.profile) -> None:
    """Torch's Chrome trace with the kernels' tasks and phases in it, each on its thread."""
    theirs.export_chrome_trace(str(path))
    trace = json.loads(path.read_text())
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
    path.write_text(json.dumps(trace))


def run(argv: Sequence[str]) -> int:
    """Measure, show, write."""
    options = parse(argv)
    if options.threads < 1:
        raise InputError("--threads must be at least 1", options.threads)
    if not 0 <= options.dropout < 1:
        raise InputError("--dropout must be at least 0 and below 1", options.dropout)
    shape = shape_of(options.shapes)
    torch.set_num_threads(options.threads)
    _C.set_isa(options.isa)
    q, k, v = (torch.randn(shape, dtype=DTYPES[options.dtype], requires_grad=not options.forward) for _ in range(3))
    dout = torch.randn_like(q)

    def call() -> None:
        out = attention(q, k, v, causal=not options.full, dropout_p=options.dropout)
        if not options.forward:
            torch.autograd.grad(out, (q, k, v), dout)

    calls = repeated(call)
    peak = peak_flops(options.dtype, options.threads) / options.threads
    tasks, theirs = profiled(call, calls)
    mask = "no mask" if options.full else "causal"
    print(f"{info.cpu()}, {options.isa}, {options.threads} threads, torch {torch.__version__}")
    print(f"{options.shapes} {options.dtype}, {mask}, dropout {options.dropout:g}, {calls} calls")
    print(f"peak {peak / 1e9:.0f} GFLOP/s a thread")
    useful = {
        "forward": _ops.forward_flops(q, k, v, None, not options.full),
        "backward": _ops.backward_flops(dout, None, q, k, v, None, None, None, None, not options.full),
    }
    show(tasks, calls, useful, peak)
    for event in theirs.events() or ():  # torch counts the operations of its own operators alone
        if event.name.startswith("pyattn::attention_"):
            event.flops = useful[event.name.removeprefix("pyattn::attention_")]
    print("\ntorch.profiler:")
    print(theirs.key_averages().table(sort_by="self_cpu_time_total", row_limit=8, max_name_column_width=40))
    if options.trace:
        write_trace(options.trace, tasks, theirs)
        print(f"written to {options.trace}: for chrome://tracing or https://ui.perfetto.dev")
    return 0
