"""Streams: chunks of keys on their way around the ring, and their gradients on the way home."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pyattn.distributed.agreement.ranks import Ranks
from pyattn.distributed.layout import Chunks, slices
from pyattn.distributed.ring.routes import Trip


class Block(NamedTuple):
    """A chunk of keys on this rank: its trip, None for an own chunk; its positions; k and v."""

    trip: Trip | None
    keys: range
    k: Tensor
    v: Tensor


class Stream:
    """The messages of a call.

    At step t, a rank has the chunks that are t hops from their owners. While it computes with them, those of the next
    step are on their way. A chunk's k and v are one message, and so are their gradients.
    """

    def __init__(self, ranks: Ranks, trips: list[Trip], keys: Chunks, k: Tensor, v: Tensor, dim: int) -> None:
        self._ranks, self._trips, self._dim = ranks, trips, dim
        self._keys, self._parts = keys[ranks.own], slices(keys[ranks.own])
        self._k, self._v = k, v
        self.steps: int = max((trip.hops for trip in trips), default=0)

    def here(self, step: int) -> list[Trip]:
        """The trips whose chunks are on this rank at a step."""
        return [trip for trip in self._trips if trip.hop(self._ranks.own, self._ranks.size) == step <= trip.hops]

    def send(self, tensor: Tensor, rank: int, kind: int, trip: Trip) -> dist.Work:
        """Starts sending to a rank."""
        work = dist.isend(tensor, group=self._ranks.group, group_dst=rank % self._ranks.size, tag=self._tag(kind, trip))
        assert work is not None
        return work

    def receive(self, tensor: Tensor, rank: int, kind: int, trip: Trip) -> dist.Work:
        """Starts receiving from a rank."""
        source = rank % self._ranks.size
        work = dist.irecv(tensor, group=self._ranks.group, group_src=source, tag=self._tag(kind, trip))
        assert work is not None
        return work

    def for_each_step(self, compute: Callable[[int, list[Block]], None]) -> None:
        """Calls ``compute(step, blocks)``: first with the rank's own blocks, then with those that arrive.

        A function, unlike a loop over a generator, keeps no block while the next but one gets its memory.
        """
        own = self._ranks.own
        held = {trip: self._message(trip) for trip in self.here(0)}
        blocks = [Block(None, keys, self.part(self._k, i), self.part(self._v, i)) for i, keys in enumerate(self._keys)]
        for step in range(self.steps + 1):
            leaving = [trip for trip in held if trip.hops > step]
            works = [self.send(held[trip], own + trip.step, 0, trip) for trip in leaving]
            coming = {trip: self.buffer(trip, self._k.dtype) for trip in self.here(step + 1)}
            works += [self.receive(buffer, own - trip.step, 0, trip) for trip, buffer in coming.items()]
            compute(step, blocks)
            for work in works:
                work.wait()
            held = coming
            blocks = [Block(trip, trip.keys, *self.views(trip, buffer)) for trip, buffer in held.items()]

    def part(self, tensor: Tensor, chunk: int) -> Tensor:
        """An own chunk's rows of a tensor that is cut as k and v are."""
        rows = self._parts[chunk]
        return tensor.narrow(self._dim, rows.start, rows.stop - rows.start)

    def travelling(self, tensor: Tensor, trip: Trip) -> Tensor:
        """The rows of an own chunk that travel, of a tensor that is cut as k and v are."""
        first = self._parts[trip.chunk].start + trip.keys.start - self._keys[trip.chunk].start
        return tensor.narrow(self._dim, first, len(trip.keys))

    def buffer(self, trip: Trip, dtype: torch.dtype) -> Tensor:
        """Memory for a chunk's k and v, or their gradients."""
        return self._k.new_empty(sum(self._sizes(trip)), dtype=dtype)

    def _message(self, trip: Trip) -> Tensor:
        """A copy of k and v of an own chunk."""
        buffer = self.buffer(trip, self._k.dtype)
        for view, tensor in zip(self.views(trip, buffer), (self._k, self._v), strict=True):
            view.copy_(self.travelling(tensor, trip))
        return buffer

    def views(self, trip: Trip, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """k and v in a buffer."""
        shapes = [self._shape(t, len(trip.keys)) for t in (self._k, self._v)]
        k, v = (part.view(shape) for part, shape in zip(buffer.split(self._sizes(trip)), shapes, strict=True))
        return k, v

    def _tag(self, kind: int, trip: Trip) -> int:
        return kind * len(self._trips) + trip.number

    def _shape(self, like: Tensor, length: int) -> list[int]:
        return [length if dim == self._dim else size for dim, size in enumerate(like.shape)]

    def _sizes(self, trip: Trip) -> list[int]:
        return [math.prod(self._shape(t, len(trip.keys))) for t in (self._k, self._v)]


class Homeward:
    """Gradients of the chunks that travel: each rank adds its own to those of the ranks before it."""

    def __init__(self, stream: Stream, own: int, dtype: torch.dtype) -> None:
        self._stream, self._own, self._dtype = stream, own, dtype
        self._home: dict[Trip, tuple[dist.Work, Tensor]] = {}
        self._sent: list[tuple[int, dist.Work, Tensor]] = []

    def begin(self, step: int) -> dict[Trip, tuple[dist.Work, Tensor]]:
        """Starts receiving: the sums so far for this step's chunks, and those completed in the step before."""
        self._home = {
            trip: self._receive(trip.owner + trip.step * trip.hops, 2, trip)
            for trip in self._stream.here(0)
            if trip.hops == step - 1
        }
        return {trip: self._receive(self._own - trip.step, 1, trip) for trip in self._stream.here(step) if step > 1}

    def _receive(self, rank: int, kind: int, trip: Trip) -> tuple[dist.Work, Tensor]:
        buffer = self._stream.buffer(trip, self._dtype)
        return self._stream.receive(buffer, rank, kind, trip), buffer

    def pass_on(self, step: int, trip: Trip, own: Tensor, arriving: tuple[dist.Work, Tensor] | None) -> None:
        """Adds this rank's gradients, and sends the sum to the next rank, or from the last one to the owner."""
        self._finish(step)
        if arriving is not None:
            work, total = arriving
            work.wait()
            total += own
            own = total
        last = trip.hops == step
        to, kind = (trip.owner, 2) if last else (self._own + trip.step, 1)
        self._sent.append((step, self._stream.send(own, to, kind, trip), own))

    def _finish(self, step: int) -> None:
        """Waits for what was sent before a step, and frees it: its receivers begin that step without this rank."""
        for sent, work, _ in self._sent:
            if sent < step:
                work.wait()
        self._sent = [sent for sent in self._sent if sent[0] >= step]

    def come_home(self, dk: Tensor, dv: Tensor) -> None:
        """Adds the completed sums that this step receives to the gradients of the own chunks."""
        for trip, (work, buffer) in self._home.items():
            work.wait()
            for total, part in zip((dk, dv), self._stream.views(trip, buffer), strict=True):
                own = self._stream.travelling(total, trip)
                own += part
        self._home.clear()

    def end(self, dk: Tensor, dv: Tensor) -> None:
        """Receives and adds the sums that were completed in the last step."""
        past = self._stream.steps + 1
        self.begin(past)
        self.come_home(dk, dv)
        self._finish(past)
