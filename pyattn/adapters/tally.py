"""Counts of calls by outcome, over all threads."""

import os
import threading
from collections import Counter


class Tally:
    """How often each outcome was counted since the process began or since :meth:`reset`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counted: Counter[str] = Counter()
        os.register_at_fork(after_in_child=self._renew_lock)

    def _renew_lock(self) -> None:
        """Replaces the lock in a child process, which has no other threads but inherits the locks they held."""
        self._lock = threading.Lock()

    def count(self, outcome: str, n: int = 1) -> None:
        """Counts ``outcome`` ``n`` times more."""
        with self._lock:  # += reads, and then writes
            self._counted[outcome] += n

    def counted(self) -> dict[str, int]:
        """The outcomes that were counted, and how often."""
        with self._lock:
            return {outcome: n for outcome, n in self._counted.items() if n}

    def reset(self) -> None:
        """Resets all counts to zero."""
        with self._lock:
            self._counted.clear()
