"""Builds something once for a run of the tests, in one process or, with pytest-xdist, in several."""

import atexit
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))


def built(name: str, build: Callable[[Path], Path]) -> Path:
    """The result of ``build`` in an empty folder: the first process of the run builds it, and others wait for it."""
    folder = Path(tempfile.gettempdir()) / f"pyattn-{RUN}" / name
    folder.mkdir(parents=True, exist_ok=True)
    atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        link = folder / "built"
        if not link.exists():
            link.symlink_to(build(folder))
    return link.resolve()
