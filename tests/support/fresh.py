"""Python as in a new process, without the two seconds that importing torch takes: forks of a process that did it."""

import gc
import os
import runpy
import subprocess
import sys
import tempfile
from multiprocessing import get_context
from pathlib import Path

CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch"])
LONGEST = 600
"""Seconds after which a process counts as hanging."""


def collect_rarely() -> None:
    """The garbage collector visits no object made so far, and others rarely.

    Visiting them takes 0.4 s in a process of tests, and in a fork it copies the memory that they lie in. A graph that
    torch.compile builds has 10^5 objects: with Python's own thresholds, compiling takes a tenth longer.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def become(arguments: list[str], environment: dict[str, str], folder: str) -> None:
    """In the fork: ``python -c CODE ...`` or ``python -m MODULE ...``, whose output goes to files in the folder."""
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(folder, name), os.O_CREAT | os.O_WRONLY), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    option, program, *others = arguments
    sys.argv = [option, *others]
    if option == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The result of ``python -c CODE ...`` or ``python -m MODULE ...`` in a process without pyattn.

    torch is imported already, so this process shows nothing of its import. Its exit runs no ``atexit``.
    """
    with tempfile.TemporaryDirectory() as folder:
        process = CONTEXT.Process(target=become, args=(list(arguments), os.environ | environment, folder))
        process.start()
        process.join(LONGEST)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(list(arguments), LONGEST)
        out, err = (Path(folder, name).read_text() for name in ("out", "err"))
        return subprocess.CompletedProcess(list(arguments), process.exitcode, out, err)
