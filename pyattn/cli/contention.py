"""CPU contention: the share of its time during which a thread is ready to run but has no core."""

import os
import time
from pathlib import Path
from typing import TypeGuard

TASKS = Path("/proc/self/task")
"""One folder per thread of this process, whose ``schedstat`` counts nanoseconds of waiting (Linux)."""

BUSY = 0.1
"""Share above which wall-clock times measure the scheduler rather than the program. Three busy threads on two cores
give 1 / 6 or more to two of them; without other work, it is near 0."""

WINDOW = 10.0
"""Seconds that training averages over: longer than a burst of other work, shorter than most trainings."""


def waited() -> float | None:
    """Seconds that this process's threads have waited for a core, summed; None if the system does not count them."""
    try:
        return sum(int((task / "schedstat").read_text().split()[1]) for task in TASKS.iterdir()) / 1e9
    except (OSError, IndexError):  # not Linux, no counters in this kernel, or a thread that just ended
        return None


class Contention:
    """Measures how long ``threads`` computing threads have waited since it was created."""

    threads: int
    since: float
    before: float | None

    def __init__(self, threads: int) -> None:
        self.threads, self.since, self.before = threads, time.perf_counter(), waited()

    def share(self) -> float | None:
        """Share of its time that a thread waited, 0 to 1, mean over the threads; None if unknown."""
        now, seconds = waited(), time.perf_counter() - self.since
        if now is None or self.before is None or seconds <= 0:
            return None
        return min(1.0, max(0.0, now - self.before) / (seconds * self.threads))


def is_busy(share: float | None) -> TypeGuard[float]:
    """Whether the threads waited so much that wall-clock times are unreliable."""
    return share is not None and share >= BUSY


def busy(share: float) -> str:
    """A sentence with the share, the load and the cores."""
    load, cores = os.getloadavg()[0], os.cpu_count()
    return f"busy machine: threads waited for a core {share:.0%} of the time (load {load:.1f}, {cores} cores)"


class SpinNotice:
    """Reports, once, that OpenMP's threads spin on cores that other processes need.

    At the end of a parallel loop, libgomp's threads spin until the last one is done. If the last one has no core, the
    spinning threads keep the cores busy and delay it: 60 training steps took 159 seconds beside ten other processes on
    two cores, and 20 seconds with OMP_WAIT_POLICY=passive.
    """

    needed: bool
    contention: Contention

    def __init__(self, threads: int) -> None:
        self.needed = threads > 1 and os.environ.get("OMP_WAIT_POLICY", "").lower() != "passive"
        self.contention = Contention(threads)

    def look(self) -> str | None:
        """The sentence to show after the first busy WINDOW, else None."""
        if not self.needed or time.perf_counter() - self.contention.since < WINDOW:
            return None
        share = self.contention.share()
        self.contention = Contention(self.contention.threads)
        if not is_busy(share):
            return None
        self.needed = False
        return f"{busy(share)}; OMP_WAIT_POLICY=passive in the environment, or --threads 1, makes training faster there"
