"""CPU contention: how much of their time this process's threads are ready to run and wait for a core."""

import os
import time
from pathlib import Path
from typing import TypeGuard

TASKS = Path("/proc/self/task")
"""Where Linux counts it, for each thread."""

BUSY = 0.1
"""Share of waiting from which on times are the scheduler's rather than the program's: one more busy thread on two
cores makes it 0.17 or more, and a machine without other work stays below 0.01."""

WINDOW = 10.0
"""Seconds between two looks at it in training: longer than a burst of other work, short beside any training."""


def waited() -> float | None:
    """Seconds that all threads of this process have waited for a core so far; None where nobody counts them."""
    try:
        return sum(int((task / "schedstat").read_text().split()[1]) for task in TASKS.iterdir()) / 1e9
    except (OSError, IndexError):  # no Linux, a kernel that does not count, or a thread that ends while it is read
        return None


class Contention:
    """Watches the waiting of ``threads`` threads from now on."""

    def __init__(self, threads: int) -> None:
        self.threads, self.since, self.before = threads, time.perf_counter(), waited()

    def share(self) -> float | None:
        """The part of the time that a thread waited, 0 to 1, on average over the threads; None where not known."""
        now, seconds = waited(), time.perf_counter() - self.since
        if now is None or self.before is None or seconds <= 0:
            return None
        return min(1.0, max(0.0, now - self.before) / (seconds * self.threads))


def is_busy(share: float | None) -> TypeGuard[float]:
    """Whether a share of waiting is one that spoils times."""
    return share is not None and share >= BUSY


def busy(share: float) -> str:
    """The sentence that says so."""
    load, cores = os.getloadavg()[0], os.cpu_count()
    return f"busy machine: threads waited for a core {share:.0%} of the time (load {load:.1f}, {cores} cores)"


class SpinNotice:
    """Says once that OpenMP's threads spin on cores that others want.

    libgomp's threads spin for milliseconds at the end of each parallel loop. Where another process has the core of the
    thread that they wait for, they keep that process, and so themselves, from going on.
    """

    def __init__(self, threads: int) -> None:
        self.needed = threads > 1 and os.environ.get("OMP_WAIT_POLICY", "").lower() != "passive"
        self.contention = Contention(threads)

    def look(self) -> str | None:
        """The sentence, the first time that a WINDOW was busy; else None."""
        if not self.needed or time.perf_counter() - self.contention.since < WINDOW:
            return None
        share = self.contention.share()
        self.contention = Contention(self.contention.threads)
        if not is_busy(share):
            return None
        self.needed = False
        return f"{busy(share)}; OMP_WAIT_POLICY=passive in the environment, or --threads 1, makes training faster there"
