"""The lock of state that all threads of a process share: settings, switches, counts, names."""

import os
import threading
from typing import Any


class Lock:
    """A lock that a thread may take again while it holds it.

    A forked child gets a new one: the thread that held it, if it was another, does not run there.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: Any) -> None:
        self._lock.release()
