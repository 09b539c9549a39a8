"""The process of a step: does the checks of one module, one after the other, and writes a line of JSON for each.

``checks(*arguments)`` of the module gives them by name. A check returns figures to record, or None; it raises where it
fails, and :class:`LeftOutError` where there is nothing to check. A module with a function ``run`` does all that itself.
"""

import argparse
import importlib
import json
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

PASSED, FAILED, LEFT_OUT = "passed", "failed", "left out"

LOST = 75
"""Exit status where the GPU has failed this process, which its next checks need a new one for."""

LONGEST_MESSAGE = 2000

Check = Callable[[], Any]
Record = dict[str, Any]


class LeftOutError(Exception):
    """Why a check can't be made here."""


def record(check: str, status: str, seconds: float = 0.0, message: str = "", figures: Any = None) -> Record:
    """What is written of a check."""
    known = {"check": check, "status": status, "seconds": round(seconds, 2)}
    return known | ({"message": message} if message else {}) | ({"figures": figures} if figures else {})


def describe(error: Exception) -> str:
    """What was raised, and by which line; without folders, which are of no interest elsewhere."""
    at = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(at.filename).name}:{at.lineno}: {at.line})"[:LONGEST_MESSAGE]


def finish() -> None:
    """Waits for the GPU, which may fail later than the call that makes it. Without torch there is none to wait for."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def judge(name: str, check: Check) -> Record:
    """The record of a check."""
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
    """Whether every further call to the GPU fails, as after an access out of bounds."""
    try:
        finish()
    except RuntimeError:
        return True
    return False


def write(result: Any, results: TextIO) -> None:
    print(json.dumps(result), file=results)


def run_checks(module: ModuleType, results: TextIO, skip: int, *arguments: str) -> None:
    """Writes the names of the checks, then the records of all but the first ``skip``."""
    checks: dict[str, Check] = module.checks(*arguments)
    write(list(checks), results)
    for name in list(checks)[skip:]:
        result = judge(name, checks[name])
        write(result, results)
        if result["status"] == FAILED and lost():
            sys.exit(LOST)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module")
    parser.add_argument("results", type=Path, help="file to append to: the names of the checks, then their records")
    parser.add_argument("skip", type=int, help="how many checks are done already")
    parser.add_argument("arguments", nargs="*", help="of the module's function")
    options = parser.parse_args()
    module = importlib.import_module(options.module)
    run = getattr(module, "run", None) or partial(run_checks, module)
    with options.results.open("a", buffering=1) as results:
        run(results, options.skip, *options.arguments)
