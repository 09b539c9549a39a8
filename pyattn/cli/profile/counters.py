"""Hardware counters of the processor by Linux's perf_event_open, for the threads of this process in user space."""

import ctypes
import os
import platform
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

TASKS = Path("/proc/self/task")
SYSCALLS = {"x86_64": 298, "aarch64": 241}
"""The number of perf_event_open by machine."""

HARDWARE, CACHE, RAW = 0, 3, 4
"""Types of events."""

L1_READ_MISS = 0 | 1 << 16
TLB_READ_MISS = 3 | 1 << 16
"""A cache, 0 for reads, and 1 << 16 for misses, as the kernel encodes events of caches."""

L2_MISSES = {"AuthenticAMD": 0x0864, "GenuineIntel": 0x3F24, "ARM": 0x17}
"""Raw events by vendor: misses of data in L2 on Zen, L2_RQSTS.MISS since Skylake, L2D_CACHE_REFILL of ARMv8."""

ATTRIBUTES = struct.Struct("=IIQQQQQQQQQQQQQ")
"""perf_event_attr as of Linux 3.4, 112 bytes; fields after the flags are 0."""

DISABLED, NO_KERNEL, NO_HYPERVISOR = 1 << 0, 1 << 5, 1 << 6
WITH_TIMES = 1 | 2
"""Also report how long an event was enabled and counted: the kernel may count several by turns."""

ENABLE, DISABLE, RESET = 0x2400, 0x2401, 0x2403
"""ioctl requests."""


class Counts(NamedTuple):
    """Events of a call; None for those that this processor does not count.

    Attributes:
        page_faults: pages that the system had to provide, as it counts them everywhere.
    """

    instructions: float | None
    cycles: float | None
    l1_misses: float | None
    l2_misses: float | None
    tlb_misses: float | None
    page_faults: float


def vendor() -> str:
    """The processor's vendor, as keys of :data:`L2_MISSES`."""
    if platform.machine() == "aarch64":
        return "ARM"
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("vendor_id")), "")


def events() -> list[tuple[int, int] | None]:
    """Type and number of the events in the order of :class:`Counts`."""
    raw = L2_MISSES.get(vendor())
    l2 = None if raw is None else (RAW, raw)
    return [(HARDWARE, 1), (HARDWARE, 0), (CACHE, L1_READ_MISS), l2, (CACHE, TLB_READ_MISS)]


def opened(event: tuple[int, int], thread: int) -> int:
    """The descriptor of a counter of this event in ``thread``.

    Raises:
        OSError: this system does not allow it, or this processor does not count it.
    """
    number = SYSCALLS.get(platform.machine())
    if platform.system() != "Linux" or number is None:
        raise OSError(0, f"none on {platform.system()} {platform.machine()}")
    kind, config = event
    flags = DISABLED | NO_KERNEL | NO_HYPERVISOR
    attributes = ATTRIBUTES.pack(kind, ATTRIBUTES.size, config, 0, 0, WITH_TIMES, flags, *[0] * 8)
    library = ctypes.CDLL(None, use_errno=True)
    descriptor = int(library.syscall(number, attributes, thread, -1, -1, 0))
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return descriptor


class Counter:
    """One event in all threads that this process has; refuses as :func:`opened` does."""

    def __init__(self, event: tuple[int, int]) -> None:
        self._descriptors: list[int] = []
        try:
            for task in TASKS.iterdir():
                self._descriptors.append(opened(event, int(task.name)))
        except OSError:
            self.close()
            raise

    def control(self, request: int) -> None:
        """Sends an ioctl request to all threads' counters."""
        import fcntl  # where perf_event_open is, this is too

        for descriptor in self._descriptors:
            fcntl.ioctl(descriptor, request, 0)

    def value(self) -> float:
        """The events counted, scaled up where the kernel counted only for a part of the time."""
        total = 0.0
        for descriptor in self._descriptors:
            count, enabled, running = struct.unpack("=QQQ", os.read(descriptor, 24))
            total += count * enabled / running if running else 0.0
        return total

    def close(self) -> None:
        """Closes the descriptors."""
        for descriptor in self._descriptors:
            os.close(descriptor)


def counted(call: Callable[[], object], calls: int) -> tuple[Counts, str]:
    """Events per call, over that many calls, and why hardware counters are missing; "" if they are not."""
    found: list[Counter | None] = []
    why = ""
    for event in events():
        try:
            found.append(Counter(event) if event else None)
        except OSError as error:
            why = why or str(error.strerror)
            found.append(None)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    there = [counter for counter in found if counter]
    for request in (RESET, ENABLE):
        for counter in there:
            counter.control(request)
    for _ in range(calls):
        call()
    for counter in there:
        counter.control(DISABLE)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    values = tuple(None if counter is None else counter.value() / calls for counter in found)
    for counter in there:
        counter.close()
    instructions, cycles, l1_misses, l2_misses, tlb_misses = values
    return Counts(instructions, cycles, l1_misses, l2_misses, tlb_misses, faults / calls), why if not there else ""


def show(rows: dict[str, Counts], why: str) -> None:
    """Print the counters of each call by name; a sentence and the page faults where there are no hardware counters."""
    if why:
        faults = ", ".join(f"{counts.page_faults:,.0f} {name}" for name, counts in rows.items())
        print(f"\nno hardware counters: perf_event_open says {why!r}; page faults a call: {faults}")
        return
    head = ("instr./cycle", "L1 misses", "L2 misses", "TLB misses", "page faults")
    print(f"\n{'a call':20}{'instructions':>14}" + "".join(f"{name:>13}" for name in head))
    for name, counts in rows.items():
        ratio = counts.instructions / counts.cycles if counts.instructions and counts.cycles else None
        cells = [None if ratio is None else f"{ratio:.2f}"]
        cells += [None if n is None else f"{n:,.0f}" for n in (*counts[2:5], counts.page_faults)]
        instructions = "-" if counts.instructions is None else f"{counts.instructions:,.0f}"
        print(f"  {name:18}{instructions:>14}" + "".join(f"{cell or '-':>13}" for cell in cells))
