"""The phases of the kernels' passes: time and operations of each."""

from collections.abc import Iterable

from pyattn import _C

PassTimes = dict[str, tuple[float, float]]
"""Seconds and operations per call, by phase."""


def phases(task: _C.TaskProfile) -> list[tuple[str, float, int]]:
    """Name, seconds and operations of each phase of a task; empty unless its ticks add up to the task's time."""
    second = sum(task.ticks) / max(task.end_ns - task.begin_ns, 1) * 1e9
    found = zip(_C.phases, task.ticks, task.flops, strict=True)
    return [(name, ticks / second, flops) for name, ticks, flops in found if ticks]


def pass_times(tasks: Iterable[_C.TaskProfile], calls: int) -> dict[str, PassTimes]:
    """The phases of each pass, summed over the tasks of that many calls."""
    found: dict[str, PassTimes] = {}
    for task in tasks:
        times = found.setdefault(task.pass_name, {})
        for name, s, n in phases(task):
            seconds, flops = times.get(name, (0.0, 0.0))
            times[name] = seconds + s / calls, flops + n / calls
    return found
