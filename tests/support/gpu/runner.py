"""Runs a step in separate processes: watched, stopped when time is up, restarted after a check that ended one."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from support.gpu.child import FAILED, LEFT_OUT, LOST, Record, record
from support.gpu.log import Copy, Log

OUT_OF_TIME = "out of time"

INTERVAL = 0.1
"""Seconds between two checks on a process."""

PUBLISHED = 5.0
"""Seconds between two writes of a running step's results."""

RUNNING: set[subprocess.Popen[bytes]] = set()
STOPPED = threading.Event()


@dataclass(frozen=True)
class Step:
    """The checks of a module.

    Attributes:
        name: what ``--steps`` calls it.
        module: the module whose ``checks(*arguments)`` returns them.
        seconds: time after which no further check starts.
        longest: seconds after which a check counts as hung.
        shares: number of processes that divide the checks.
    """

    name: str
    module: str
    arguments: tuple[str, ...]
    seconds: float
    longest: float = 60.0
    shares: int = 1


@dataclass
class Share:
    """The names of the checks in one share of a step, and the records so far."""

    first: int
    names: list[str]
    records: list[Record] = field(default_factory=list)

    def read(self, results: Path, done: int) -> int:
        """Reads the results of a process that began with check number ``done``. Returns how many lines there are."""
        lines = results.read_text().split("\n")[:-1]
        if lines:
            self.names = json.loads(lines[0])
            self.records[done:] = map(json.loads, lines[1:])
        return len(lines)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and all its descendants."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=10)


def stop_all() -> None:
    """Ends all processes of steps and starts no more."""
    STOPPED.set()
    for process in list(RUNNING):
        stop(process)


def watch(process: subprocess.Popen[bytes], read: Callable[[], int], step: Step, step_end: float, end: float) -> str:
    """Waits until the process has ended or must be stopped; ``read`` says how many lines of results there are.

    Returns the fault of the check that was running.
    """
    written, since = 0, time.monotonic()
    while process.poll() is None:
        time.sleep(INTERVAL)
        now, lines = time.monotonic(), read()
        if now >= end or (lines > written and now >= step_end):
            return ""
        if lines > written:
            written, since = lines, now
        if now - since > step.longest:
            return f"no end after {step.longest:g} s"
    return "" if process.returncode == LOST else f"the process ended with status {process.returncode}"


def run_share(step: Step, share: Share, environment: dict[str, str], log: Log, step_end: float, end: float) -> None:
    """Runs one process after the other until all of the share's checks are recorded or the time is over."""
    while len(share.records) < len(share.names) and time.monotonic() < step_end and not STOPPED.is_set():
        done = len(share.records)
        with tempfile.TemporaryDirectory() as folder:
            results = Path(folder, "results")
            results.touch()
            places = map(str, (results, share.first, step.shares, done))
            process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-m", "support.gpu", step.module, *places, *step.arguments],
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            RUNNING.add(process)
            output = Copy(process, log)
            try:
                wrong = watch(process, lambda: share.read(results, done), step, step_end, end)  # noqa: B023
            finally:
                stop(process)
                RUNNING.discard(process)
            share.read(results, done)
        if wrong and len(share.records) < len(share.names):
            message = f"{wrong}: {output.last_line()}"
            share.records.append(record(share.names[len(share.records)], FAILED, message=message))


def run_step(
    step: Step,
    environment: dict[str, str],
    log: Log,
    end: float,
    publish: Callable[[list[Record]], None] = lambda records: None,
) -> list[Record]:
    """The records of all checks; ``end`` is when the time of all steps is over, by the monotonic clock.

    ``publish`` gets the records so far every few seconds.
    """
    step_end = min(end, time.monotonic() + step.seconds)
    shares = [Share(first, [step.name]) for first in range(step.shares)]
    with ThreadPoolExecutor(step.shares) as pool:
        running = {pool.submit(run_share, step, share, environment, log, step_end, end) for share in shares}
        while running:
            ended, running = wait(running, timeout=PUBLISHED, return_when=FIRST_COMPLETED)
            for future in ended:
                future.result()
            publish([known for share in shares for known in list(share.records)])
    left = [name for share in shares for name in share.names[len(share.records) :]]
    return [known for share in shares for known in share.records] + [
        record(name, LEFT_OUT, message=OUT_OF_TIME) for name in left
    ]
