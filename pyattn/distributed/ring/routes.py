"""Routes: the way of each chunk of keys around the ring, no further than the last rank that needs it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

Visible = Callable[[range, range], range]
"""The keys of a chunk, from the first to the last, that may be visible to queries of another."""


class Route(NamedTuple):
    """The way of a chunk of keys from its owner, over one neighbour after another.

    Attributes:
        number: of the route, in the list that all ranks have.
        owner: the rank to which the chunk belongs.
        chunk: its place in the owner's shard.
        keys: the positions that travel: those from the first to the last that are visible to other ranks.
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


def routes_of(queries: Sequence[Sequence[range]], keys: Sequence[Sequence[range]], visible: Visible) -> list[Route]:
    """All routes, given each rank's chunks; each takes the shorter way to the last rank that needs it."""
    ranks, routes = len(queries), list[Route]()
    for owner, held in enumerate(keys):
        for number, chunk in enumerate(held):
            by_rank = {
                r: [part for own in queries[r] if (part := visible(own, chunk))] for r in range(ranks) if r != owner
            }
            needed = {r: parts for r, parts in by_rank.items() if parts}
            if needed:
                ahead, back = (max((r - owner) * step % ranks for r in needed) for step in (1, -1))
                step, hops = (1, ahead) if ahead <= back else (-1, back)
                parts = [part for parts in needed.values() for part in parts]
                travelling = range(min(part.start for part in parts), max(part.stop for part in parts))
                routes.append(Route(len(routes), owner, number, travelling, step, hops))
    return routes
