"""Runs a step in a process of its own: watched, stopped when time is up, started again after a check that ended it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from gpu_steps.child import FAILED, LEFT_OUT, LOST, Record, record

OUT_OF_TIME = "out of time"

INTERVAL = 0.05
"""Seconds between two looks at a process."""


@dataclass(frozen=True)
class Step:
    """The checks of a module.

    Attributes:
        module: its ``checks(*arguments)`` gives them.
        seconds: when they are over, no further check begins.
        longest: seconds after which a check is taken for one that hangs.
    """

    module: str
    arguments: tuple[str, ...]
    seconds: float
    longest: float = 60.0

    @property
    def name(self) -> str:
        return self.module.removeprefix("gpu_steps.")


def last_line(log: Path) -> str:
    return log.read_text(errors="replace").strip().rpartition("\n")[2]


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the process, and whatever it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=10)


def watch(process: subprocess.Popen[bytes], results: Path, step: Step, step_end: float, end: float) -> str:
    """Waits until the process has ended or is to be stopped. Returns what is wrong with the check that it is at."""
    written, since = 0, time.monotonic()
    while process.poll() is None:
        time.sleep(INTERVAL)
        now = time.monotonic()
        lines = results.read_text().count("\n")
        if now >= end or (lines > written and now >= step_end):
            return ""
        if lines > written:
            written, since = lines, now
        if now - since > step.longest:
            return f"no end after {step.longest:g} s"
    return "" if process.returncode == LOST else f"the process ended with status {process.returncode}"


def run_step(step: Step, environment: dict[str, str], log: Path, end: float) -> list[Record]:
    """A record for each check; at ``end``, by the monotonic clock, the time of all steps is over."""
    step_end = min(end, time.monotonic() + step.seconds)
    names, records = [step.name], list[Record]()
    while len(records) < len(names) and time.monotonic() < step_end:
        with tempfile.TemporaryDirectory() as folder, log.open("ab") as output:
            results = Path(folder, "results")
            results.touch()
            command = [sys.executable, "-X", "faulthandler", "-m", "gpu_steps", step.module]
            command += [str(results), str(len(records)), *step.arguments]
            process = subprocess.Popen(
                command,
                env=environment,
                cwd=folder,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                wrong = watch(process, results, step, step_end, end)
            finally:
                stop(process)
            lines = results.read_text().splitlines()
        if lines:
            names, *new = map(json.loads, lines)
            records += new
        if wrong and len(records) < len(names):
            records.append(record(names[len(records)], FAILED, message=f"{wrong}: {last_line(log)}"))
    return records + [record(name, LEFT_OUT, message=OUT_OF_TIME) for name in names[len(records) :]]
