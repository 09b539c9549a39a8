"""The process of a step: runs the checks of one module in turn, and writes a line of JSON for each.

``checks(device, *arguments)`` of the module returns them by name. A check returns figures to record, or None; it raises
if it fails, and raises :class:`LeftOutError` if there is nothing to check. A module without ``checks`` does all this
itself, in ``run(results, share, *arguments)``.
"""

import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TextIO

from support.gpu.device import DEVICES

PASSED, FAILED, LEFT_OUT = "passed", "failed", "left out"

LOST = 75
"""Exit status if the GPU has failed this process: its remaining checks need a new one."""

LONGEST_MESSAGE = 2000

Check = Callable[[], Any]
Record = dict[str, Any]


class LeftOutError(Exception):
    """Raised with the reason why a check can't run here."""


class Share(NamedTuple):
    """The checks of this process: every ``of``-th from number ``first`` on, except the ``skip`` already done."""

    first: int
    of: int
    skip: int

    def names(self, names: list[str]) -> list[str]:
        """The names in this share."""
        return names[self.first :: self.of]


def record(check: str, status: str, seconds: float = 0.0, message: str = "", figures: Any = None) -> Record:
    """The record of a check, as it is written."""
    known = {"check": check, "status": status, "seconds": round(seconds, 2)}
    return known | ({"message": message} if message else {}) | ({"figures": figures} if figures else {})


def poisoned(failure: Record) -> Record:
    """The record of a check after which every further GPU call of its process failed."""
    return failure | {"lost": True}


def describe(error: Exception) -> str:
    """The exception and its line, without folders, which mean nothing on other machines."""
    at = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(at.filename).name}:{at.lineno}: {at.line})"[:LONGEST_MESSAGE]


def finish() -> None:
    """Waits for the GPU, which may fail later than the call that causes it. Without torch there is none to wait for."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def judge(name: str, check: Check) -> Record:
    """Runs a check and returns its record."""
    begin = time.perf_counter()
    status, message, figures = PASSED, "", None
    try:
        figures = check()
        finish()
    except LeftOutError as reason:
        status, message = LEFT_OUT, str(reason)
    except Exception as error:
        status, message = FAILED, describe(error)
    return record(name, status, time.perf_counter() - begin, message, figures)


def lost() -> bool:
    """Whether every further call to the GPU fails, as after an out-of-bounds access."""
    try:
        finish()
    except RuntimeError:
        return True
    return False


def write(result: Any, results: TextIO) -> None:
    print(json.dumps(result), file=results)


def run_checks(module: ModuleType, results: TextIO, share: Share, device: str, *arguments: str) -> None:
    """Writes the names of the share's checks, then the records of those not done yet."""
    checks: dict[str, Check] = module.checks(DEVICES[device], *arguments)
    names = share.names(list(checks))
    write(names, results)
    for name in names[share.skip :]:
        result = judge(name, checks[name])
        is_lost = result["status"] == FAILED and lost()
        write(poisoned(result) if is_lost else result, results)
        if is_lost:
            sys.exit(LOST)


def follow(parent: int) -> None:
    """Ends this process and all that it has started once ``parent`` has ended, by whatever signal."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main() -> None:
    """``python -m support.gpu MODULE RESULTS FIRST OF SKIP ARGUMENT...``; an argument may look like an option."""
    os.setpgid(0, 0)  # runner.py's stop() ends the group
    threading.Thread(target=follow, args=(os.getppid(),), daemon=True).start()
    name, path, first, of, skip, *arguments = sys.argv[1:]
    module = importlib.import_module(name)
    run = partial(run_checks, module) if hasattr(module, "checks") else module.run
    with Path(path).open("a", buffering=1) as results:
        run(results, Share(int(first), int(of), int(skip)), *arguments)
