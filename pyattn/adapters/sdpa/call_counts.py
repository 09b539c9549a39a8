"""Counts of the calls that the switch of :mod:`pyattn.adapters.sdpa` saw."""

from typing import NamedTuple

from pyattn.adapters.sdpa import at_once
from pyattn.adapters.tally import Tally

TAKEN, TRACED = "taken", "traced"

_tally = Tally()
_at_reset = 0
"""How many plain calls had been computed at the last reset."""


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
    reasons = _tally.counted()
    return Counts(reasons.pop(TAKEN, 0) + at_once.calls() - _at_reset, reasons.pop(TRACED, 0), reasons)


def reset_counts() -> None:
    """Resets all counts to zero."""
    global _at_reset
    _tally.reset()
    _at_reset = at_once.calls()


def count(name: str) -> None:
    """Counts one call as :data:`TAKEN`, :data:`TRACED`, or under the reason why torch computes it."""
    _tally.count(name)


def described() -> str:
    """The counts on one line, empty if nothing was counted."""
    taken, traced, by_torch = counts()
    if not (taken or traced or by_torch):
        return ""
    reasons = "".join(f", {n} to torch ({reason})" for reason, n in sorted(by_torch.items()))
    return f"{taken} calls taken, {traced} traced{reasons}"
