"""Counts of the products of queries and keys that :mod:`pyattn.adapters.scratch` saw."""

from typing import NamedTuple

from pyattn.adapters.tally import Tally

TAKEN = "taken"

_tally = Tally()


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
    left = _tally.counted()
    return Counts(left.pop(TAKEN, 0), left)


def reset_counts() -> None:
    """Resets all counts to zero."""
    _tally.reset()


def count(outcome: str, n: int = 1) -> None:
    """Counts ``n`` products as :data:`TAKEN`, or under the reason why they were left."""
    _tally.count(outcome, n)
