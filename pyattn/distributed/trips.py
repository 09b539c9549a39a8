"""Trips: the way of each chunk of keys around the ring, no further than the last rank that needs it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

Sees = Callable[[range, range], bool]
"""Whether any query of a chunk may see any key of another."""


class Trip(NamedTuple):
    """The way of a chunk of keys from its owner, over one neighbour after another.

    Attributes:
        number: of the trip, in the list that all ranks have.
        owner: the rank to which the chunk belongs.
        chunk: its place in the owner's shard.
        keys: its positions.
        step: 1 towards the next rank, -1 towards the one before.
        hops: how far it goes.
    """

    number: int
    owner: int
    chunk: int
    keys: range
    step: int
    hops: int

    def hop(self, rank: int, ranks: int) -> int:
        """At which hop the chunk is at ``rank``: 0 for the owner; beyond ``hops`` it never is."""
        return (rank - self.owner) * self.step % ranks


def trips_of(queries: Sequence[Sequence[range]], keys: Sequence[Sequence[range]], sees: Sees) -> list[Trip]:
    """All trips, given each rank's chunks; each takes the shorter way to the last rank that needs it."""
    ranks, trips = len(queries), list[Trip]()
    for owner, held in enumerate(keys):
        for number, chunk in enumerate(held):
            needed = [r for r in range(ranks) if r != owner and any(sees(own, chunk) for own in queries[r])]
            if needed:
                ahead, back = (max((r - owner) * step % ranks for r in needed) for step in (1, -1))
                step, hops = (1, ahead) if ahead <= back else (-1, back)
                trips.append(Trip(len(trips), owner, number, chunk, step, hops))
    return trips
