"""Times of several sides in turn, the peak of the machine in the same run, and memory."""

import ctypes
import random
import resource
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from pyattn import _C

SHORTEST = 2e-3
"""Seconds a measurement lasts at least: a shorter call is repeated, so that neither clock nor wake-ups show."""

SPIN = 0.03
"""Seconds that the peak is measured for, several times: starting threads takes less than a hundredth of it."""

CLEAR_REFS = Path("/proc/self/clear_refs")
"""Where Linux resets the process's peak memory."""


@dataclass(frozen=True)
class Time:
    """What one side took.

    Attributes:
        seconds: median of the rounds.
        low, high: first and third quartile.
        speedup: time of the base over this one's, median of the ratios of each round.
    """

    seconds: float
    low: float
    high: float
    speedup: float


def stopwatch(device: str) -> Callable[[], float]:
    """Starts the clock of ``device``. Returns what reads it, in seconds, once the device has done all it was given."""
    if device == "cpu":
        started = time.perf_counter()
        return lambda: time.perf_counter() - started
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()

    def stop() -> float:
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    return stop


def once(call: Callable[[], object], repeats: int, device: str = "cpu") -> float:
    """Seconds of a call, mean of ``repeats`` in a row."""
    seconds = stopwatch(device)
    for _ in range(repeats):
        call()
    return seconds() / repeats


def in_turn(calls: dict[str, Callable[[], object]], base: str, seconds: float, device: str = "cpu") -> dict[str, Time]:
    """Time each of ``calls``, one after the other in rounds, for about ``seconds`` a side and at least three rounds.

    A machine with other work slows all sides of a round alike, so it is the ratios within a round that are compared.
    """
    warm = {name: once(call, 1, device) for name, call in calls.items()}
    repeats = {name: max(1, int(SHORTEST / max(t, 1e-7))) for name, t in warm.items()}
    expected = sum(max(warm[name] * repeats[name], SHORTEST) for name in calls)
    rounds = min(50, max(3, int(seconds * len(calls) / expected)))
    taken: dict[str, list[float]] = {name: [] for name in calls}
    shuffle = random.Random(0)
    for _ in range(rounds):
        for name in shuffle.sample(list(calls), len(calls)):  # nobody always follows the one that empties the caches
            taken[name].append(once(calls[name], repeats[name], device))

    def summary(name: str) -> Time:
        low, median, high = statistics.quantiles(taken[name], n=4, method="inclusive")
        ratios = [b / t for b, t in zip(taken[base], taken[name], strict=True)]
        return Time(median, low, high, statistics.median(ratios))

    return {name: summary(name) for name in calls}


def peak_flops(dtype: str, threads: int) -> float:
    """Floating-point operations a second that ``threads`` threads reach between registers, with the active ISA."""

    def spin(rounds: int) -> tuple[float, float]:
        with ThreadPoolExecutor(threads) as pool:
            begin = time.perf_counter()
            done = sum(pool.map(lambda _: _C.spin(dtype, rounds), range(threads)))
            return done, time.perf_counter() - begin

    rounds = 1 << 16
    while (seconds := spin(rounds)[1]) < SPIN:
        rounds = int(rounds * min(8.0, 1.2 * SPIN / seconds))
    return max(done / seconds for done, seconds in (spin(rounds) for _ in range(8)))


def peak_memory(call: Callable[[], object], device: str = "cpu") -> int | None:
    """Bytes by which resident memory rises at most during a call; None where Linux's counter is not there.

    On a GPU, what torch has allocated there.
    """
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    ctypes.CDLL(None).malloc_trim(0)  # what earlier calls have left
    try:
        CLEAR_REFS.write_text("5")
    except OSError:
        return None
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    call()
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    return max(0, peak - before)
