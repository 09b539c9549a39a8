"""Counts of the calls that the switch of :mod:`pyattn.adapters.sdpa` saw."""

import os
import threading
from collections import Counter
from typing import NamedTuple

TAKEN, TRACED = "taken", "traced"

_lock = threading.Lock()
_counted: Counter[str] = Counter()


class Counts(NamedTuple):
    """Calls of torch's ``scaled_dot_product_attention`` while the switch was on.

    Attributes:
        taken: calls that the native kernels computed.
        traced: calls that ``torch.compile`` and other tracers took into a graph; one call may be traced several times.
            Running the graph is not counted.
        torch: calls that torch computed, by reason.
    """

    taken: int
    traced: int
    torch: dict[str, int]


def counts() -> Counts:
    """The counts since the process began or since :func:`reset_counts`, over all threads."""
    with _lock:
        reasons = {name: n for name, n in _counted.items() if name not in (TAKEN, TRACED)}
        return Counts(_counted[TAKEN], _counted[TRACED], reasons)


def reset_counts() -> None:
    """Resets all counts to zero."""
    with _lock:
        _counted.clear()


def count(name: str) -> None:
    """Counts one call as :data:`TAKEN`, :data:`TRACED`, or under the reason why torch computes it."""
    with _lock:
        _counted[name] += 1


def described() -> str:
    """The counts on one line, empty if nothing was counted."""
    taken, traced, by_torch = counts()
    if not (taken or traced or by_torch):
        return ""
    reasons = "".join(f", {n} to torch ({reason})" for reason, n in sorted(by_torch.items()))
    return f"{taken} calls taken, {traced} traced{reasons}"


def _renew_lock() -> None:
    """Replaces the lock in a child process, which has no other threads but inherits the locks they held."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
