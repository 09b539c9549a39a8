"""Counts of the products of queries and keys that :mod:`pyattn.adapters.scratch` saw."""

import os
import threading
from collections import Counter
from typing import NamedTuple

TAKEN = "taken"

_lock = threading.Lock()
_counted: Counter[str] = Counter()


class Counts(NamedTuple):
    """Products of queries and keys in modules and blocks where recognition was on.

    Attributes:
        taken: products that became a call of :func:`pyattn.attention`.
        left: products that were computed as they are written, by reason.
    """

    taken: int
    left: dict[str, int]


def counts() -> Counts:
    """The counts since the process began or since :func:`reset_counts`, over all threads."""
    with _lock:
        return Counts(_counted[TAKEN], {reason: n for reason, n in _counted.items() if n and reason != TAKEN})


def reset_counts() -> None:
    """Resets all counts to zero."""
    with _lock:
        _counted.clear()


def count(outcome: str, n: int = 1) -> None:
    """Counts ``n`` products as :data:`TAKEN`, or under the reason why they were left."""
    with _lock:
        _counted[outcome] += n


def _renew_lock() -> None:
    """Replaces the lock in a child process, which has no other threads but inherits the locks they held."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
