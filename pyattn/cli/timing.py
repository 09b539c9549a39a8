"""Timing of several sides in turn, the machine's peak, and peak memory."""

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
from pyattn.cli.contention import Contention

SHORTEST = 2e-3
"""Least seconds of a measurement; shorter calls are repeated, so clock reads and wake-ups don't matter."""

MOST_ROUNDS = 50
"""More rounds would move a median by less than the rounds differ."""

SPIN = 0.02
"""CPU seconds of each thread per try at the peak: some 10^8 instructions."""

PEAK_TRIES = 4
"""Tries; the best one is the peak, because a core may still run at a low frequency in the first."""

SETTLE, QUIET = 0.1, 1e-3
"""Most seconds to wait for other threads to sleep, and seconds without CPU time after which they do."""

CLEAR_REFS = Path("/proc/self/clear_refs")
"""Linux resets the process's peak memory when this file is written."""


@dataclass(frozen=True)
class Time:
    """The time of one call of one side.

    Attributes:
        seconds: median of the rounds, by the clock of :func:`stopwatch`.
        low, high: first and third quartile.
        speedup: the base's time over this one's, median of the ratios within each round.
        rounds: number of rounds; quartiles of fewer than three mean nothing.
        wall_seconds, cpu_seconds: medians of wall-clock time and of all threads' CPU time, spinning included.
        waited: share of the comparison's time that a thread waited for a core;
            None if the clock is not the wall clock, or if unknown.
    """

    seconds: float
    low: float
    high: float
    speedup: float
    rounds: int
    wall_seconds: float
    cpu_seconds: float
    waited: float | None


def by_the_wall(device: str) -> bool:
    """Whether times on ``device`` are wall-clock times, which other programs affect."""
    return device == "cpu" and torch.get_num_threads() > 1


def stopwatch(device: str) -> Callable[[], float]:
    """Starts the clock of ``device``. Returns a function that waits for the device and reads the clock in seconds.

    With one thread, a CPU's clock is that thread's CPU time, which other programs don't affect. With more threads it is
    the wall clock, because threads that spin at a barrier use CPU time too.
    """
    if device == "cpu":
        clock = time.perf_counter if by_the_wall(device) else time.thread_time
        started = clock()
        return lambda: clock() - started
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()

    def stop() -> float:
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    return stop


def once(call: Callable[[], object], repeats: int, device: str = "cpu") -> float:
    """Seconds per call, mean of ``repeats`` calls in a row."""
    seconds = stopwatch(device)
    for _ in range(repeats):
        call()
    return seconds() / repeats


def settle() -> None:
    """Waits until no other thread of this process uses CPU time.

    OpenMP's threads spin for 4 to 16 ms after a call. The next side may run in other processes, on the same cores.
    """
    ends, used = time.perf_counter() + SETTLE, -1.0
    while time.perf_counter() < ends and time.process_time() > used + QUIET / 4:
        used = time.process_time()
        time.sleep(QUIET)


Round = tuple[float, float, float]
"""Seconds per call by the clock of :func:`stopwatch`, by the wall clock, and of all threads' CPU time."""


def rounds_in_turn(
    calls: dict[str, Callable[[], object]], seconds: float, device: str = "cpu", fewest: int = 3
) -> tuple[dict[str, list[Round]], float | None]:
    """Time each of ``calls`` in turn, in rounds, about ``seconds`` per side and at least ``fewest`` rounds.

    Before a short call is repeated, one that is not timed sets what the side needs, such as a switch, and warms its
    caches.

    Returns:
        the rounds by side; the share of the time that a thread waited for a core, as in :class:`Time`.
    """
    repeats = {name: max(1, int(SHORTEST / max(once(call, 1, device), 1e-7))) for name, call in calls.items()}
    taken: dict[str, list[Round]] = {name: [] for name in calls}
    shuffle = random.Random(0)
    contention = Contention(torch.get_num_threads()) if by_the_wall(device) else None
    started, rounds = time.perf_counter(), 0
    while rounds < fewest or (
        rounds < MOST_ROUNDS and (time.perf_counter() - started) * (rounds + 1) / rounds < seconds * len(calls)
    ):
        for name in shuffle.sample(list(calls), len(calls)):  # so no side always follows the same one
            if contention:
                settle()
            if (n := repeats[name]) > 1:
                calls[name]()
            wall, cpu = time.perf_counter(), time.process_time()
            mean = once(calls[name], n, device)
            taken[name].append((mean, (time.perf_counter() - wall) / n, (time.process_time() - cpu) / n))
        rounds += 1
    return taken, contention.share() if contention else None


def in_turn(
    calls: dict[str, Callable[[], object]], base: str, seconds: float, device: str = "cpu", fewest: int = 3
) -> dict[str, Time]:
    """The summaries of :func:`rounds_in_turn`, with speed-ups over ``base``.

    Other work on the machine slows all sides of a round alike, so speed-ups compare times within a round.
    """
    taken, waited = rounds_in_turn(calls, seconds, device, fewest)
    rounds = len(taken[base])

    def summary(name: str) -> Time:
        times, walls, cpus = zip(*taken[name], strict=True)
        quartiles = statistics.quantiles(times, n=4, method="inclusive") if rounds > 1 else 3 * times
        low, median, high = quartiles
        ratios = [b[0] / t for b, t in zip(taken[base], times, strict=True)]
        speedup = statistics.median(ratios)
        return Time(median, low, high, speedup, rounds, statistics.median(walls), statistics.median(cpus), waited)

    return {name: summary(name) for name in calls}


def peak_flops(dtype: str, threads: int) -> float:
    """Floating-point operations per second of ``threads`` threads between registers, with the active instruction set.

    Each thread is timed by its own CPU time, which other programs don't affect.
    """

    def spin(rounds: int) -> tuple[float, float]:
        begin = time.thread_time()
        done = _C.spin(dtype, rounds)
        return done, time.thread_time() - begin

    rounds, best = 1 << 16, 0.0
    with ThreadPoolExecutor(threads) as pool:
        while (shortest := min(s for _, s in pool.map(spin, [rounds] * threads))) < SPIN:
            rounds = int(rounds * min(8.0, 1.2 * SPIN / max(shortest, 1e-9)))
        for _ in range(PEAK_TRIES):
            best = max(best, sum(done / s for done, s in pool.map(spin, [rounds] * threads)))
    return best


def peak_memory(call: Callable[[], object], device: str = "cpu") -> int | None:
    """The peak rise of resident memory during a call, in bytes; None if the system does not count it.

    On a GPU, the peak of torch's allocations.
    """
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    try:
        ctypes.CDLL(None).malloc_trim(0)  # returns what earlier calls freed
        CLEAR_REFS.write_text("5")
    except (AttributeError, OSError):  # not Linux, or not its usual C library
        return None
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    call()
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    return max(0, peak - before)
