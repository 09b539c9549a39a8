"""Copies of what git tracks, in which tests run that import pyattn from the copy and from nowhere else."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from editable import WITHOUT_EDITABLE
from faults import BadFaultError

ROOT = Path(__file__).parents[2]
LOOP = 3600
"""Seconds of processor time after which a process counts as looping: a run of all tests takes a twentieth of it."""


class SourceCopy:
    """A copy, and its runs of pytest.

    Attributes:
        folder: where it lies.
        cwd: where commands run.
        run_tests: the code that runs pytest; its first argument is the folder, the others are pytest's.
        idle: seconds after which processes that only sleep count as hung.
    """

    run_tests: str
    idle: int

    def __init__(self, folder: Path) -> None:
        self.folder = self.cwd = folder
        for name in subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0"):
            if name:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        (folder / "sitecustomize.py").write_text(WITHOUT_EDITABLE)

    def tests(self) -> set[str]:
        """The files and folders of tests that may run here."""
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        """An environment in which Python finds this copy and no other."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return os.environ | {"PATH": path, "PYTHONPATH": str(self.folder)}

    def run(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Runs the command and returns its result."""
        defaults = {"cwd": self.cwd, "env": self.environment(), "capture_output": True, "text": True, "check": True}
        return subprocess.run(command, **(defaults | options))

    def watch(self, command: list[str], isa: str) -> subprocess.CompletedProcess[str] | None:
        """The command's result; None if it hangs, as it may if a fault corrupts the heap."""
        environment = self.environment() | {"PYATTN_ISA": isa}
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, cwd=self.folder, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )
        before, since = "", time.monotonic()
        while True:
            try:
                out, err = process.communicate(timeout=5)
                return subprocess.CompletedProcess(command, process.returncode, out, err)
            except subprocess.TimeoutExpired:
                states = ["ps", "--sid", str(process.pid), "-o", "stat=", "-o", "cputimes="]
                now = subprocess.run(states, check=False, capture_output=True, text=True).stdout
                if now != before or re.search("^R", now, re.MULTILINE):  # waiting for a processor is not sleeping
                    before, since = now, time.monotonic()
                elif time.monotonic() - since > self.idle:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.communicate()
                    return None

    def first_failure(self, *arguments: str, isa: str = "") -> str | None:
        """The first test that fails, or what else ends the run; None if all pass."""
        command = [sys.executable, "-c", self.run_tests, str(self.folder)]
        command += ["-x", "-v", "--tb=no", "-p", "no:cacheprovider", "-m", "not slow"]
        result = self.watch(["prlimit", f"--cpu={LOOP}", *command, *arguments], isa)
        if result is None:
            return "hangs"
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", result.stdout, re.MULTILINE)
        if failed or result.returncode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return failed[0] if failed else None
        if result.returncode > 0:
            raise BadFaultError(f"the suite does not run:\n{result.stdout[-2000:]}{result.stderr[-2000:]}")
        last = re.findall(r"^tests/\S+", result.stdout, re.MULTILINE)
        return f"signal {-result.returncode} in {last[-1] if last else 'the imports'}"
