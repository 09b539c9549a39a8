"""Messages: chunks of keys on their way around the ring, and their gradients on the way back to the owners."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pyattn.distributed.agreement.ranks import Ranks
from pyattn.distributed.layout import Chunks, slices
from pyattn.distributed.ring.routes import Route


class KeyChunk(NamedTuple):
    """A chunk of keys on this rank: its route, None for an own chunk; its positions; k and v."""

    route: Route | None
    keys: range
    k: Tensor
    v: Tensor


class Messages:
    """The messages of a call.

    At step t, a rank has the chunks that are t hops from their owners. While it computes with them, those of the next
    step are on their way. A chunk's k and v are one message, and so are their gradients.
    """

    def __init__(self, ranks: Ranks, routes: list[Route], keys: Chunks, k: Tensor, v: Tensor, dim: int) -> None:
        self._ranks, self._routes, self._dim = ranks, routes, dim
        self._keys, self._parts = keys[ranks.own], slices(keys[ranks.own])
        self._k, self._v = k, v
        self.steps: int = max((route.hops for route in routes), default=0)

    def here(self, step: int) -> list[Route]:
        """The routes whose chunks are on this rank at a step."""
        return [route for route in self._routes if route.hop(self._ranks.own, self._ranks.size) == step <= route.hops]

    def send(self, tensor: Tensor, rank: int, kind: int, route: Route) -> dist.Work:
        """Starts sending to a rank."""
        work = dist.isend(
            tensor, group=self._ranks.group, group_dst=rank % self._ranks.size, tag=self._tag(kind, route)
        )
        assert work is not None
        return work

    def receive(self, tensor: Tensor, rank: int, kind: int, route: Route) -> dist.Work:
        """Starts receiving from a rank."""
        source = rank % self._ranks.size
        work = dist.irecv(tensor, group=self._ranks.group, group_src=source, tag=self._tag(kind, route))
        assert work is not None
        return work

    def for_each_step(self, compute: Callable[[int, list[KeyChunk]], None]) -> None:
        """Calls ``compute(step, key_chunks)``: first with the rank's own chunks, then with those that arrive.

        A function, unlike a loop over a generator, holds no chunk while the next but one gets its memory.
        """
        own = self._ranks.own
        held = {route: self._message(route) for route in self.here(0)}
        key_chunks = [
            KeyChunk(None, keys, self.part(self._k, i), self.part(self._v, i)) for i, keys in enumerate(self._keys)
        ]
        for step in range(self.steps + 1):
            leaving = [route for route in held if route.hops > step]
            works = [self.send(held[route], own + route.step, 0, route) for route in leaving]
            coming = {route: self.buffer(route, self._k.dtype) for route in self.here(step + 1)}
            works += [self.receive(buffer, own - route.step, 0, route) for route, buffer in coming.items()]
            compute(step, key_chunks)
            for work in works:
                work.wait()
            held = coming
            key_chunks = [KeyChunk(route, route.keys, *self.views(route, buffer)) for route, buffer in held.items()]

    def part(self, tensor: Tensor, chunk: int) -> Tensor:
        """An own chunk's rows of a tensor that is cut as k and v are."""
        rows = self._parts[chunk]
        return tensor.narrow(self._dim, rows.start, rows.stop - rows.start)

    def travelling(self, tensor: Tensor, route: Route) -> Tensor:
        """The rows of an own chunk that travel, of a tensor that is cut as k and v are."""
        first = self._parts[route.chunk].start + route.keys.start - self._keys[route.chunk].start
        return tensor.narrow(self._dim, first, len(route.keys))

    def buffer(self, route: Route, dtype: torch.dtype) -> Tensor:
        """Memory for a chunk's k and v, or their gradients."""
        return self._k.new_empty(sum(self._sizes(route)), dtype=dtype)

    def _message(self, route: Route) -> Tensor:
        """A copy of k and v of an own chunk."""
        buffer = self.buffer(route, self._k.dtype)
        for view, tensor in zip(self.views(route, buffer), (self._k, self._v), strict=True):
            view.copy_(self.travelling(tensor, route))
        return buffer

    def views(self, route: Route, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """k and v in a buffer."""
        shapes = [self._shape(t, len(route.keys)) for t in (self._k, self._v)]
        k, v = (part.view(shape) for part, shape in zip(buffer.split(self._sizes(route)), shapes, strict=True))
        return k, v

    def _tag(self, kind: int, route: Route) -> int:
        return kind * len(self._routes) + route.number

    def _shape(self, like: Tensor, length: int) -> list[int]:
        return [length if dim == self._dim else size for dim, size in enumerate(like.shape)]

    def _sizes(self, route: Route) -> list[int]:
        return [math.prod(self._shape(t, len(route.keys))) for t in (self._k, self._v)]


class GradientReturn:
    """Gradients of the chunks that travel: each rank adds its own to those of the ranks before it."""

    def __init__(self, messages: Messages, own: int, dtype: torch.dtype) -> None:
        self._messages, self._own, self._dtype = messages, own, dtype
        self._returned: dict[Route, tuple[dist.Work, Tensor]] = {}
        self._sent: list[tuple[int, dist.Work, Tensor]] = []

    def begin(self, step: int) -> dict[Route, tuple[dist.Work, Tensor]]:
        """Starts receiving: the sums so far for this step's chunks, and those completed in the step before."""
        self._returned = {
            route: self._receive(route.owner + route.step * route.hops, 2, route)
            for route in self._messages.here(0)
            if route.hops == step - 1
        }
        coming = self._messages.here(step) if step > 1 else []
        return {route: self._receive(self._own - route.step, 1, route) for route in coming}

    def _receive(self, rank: int, kind: int, route: Route) -> tuple[dist.Work, Tensor]:
        buffer = self._messages.buffer(route, self._dtype)
        return self._messages.receive(buffer, rank, kind, route), buffer

    def pass_on(self, step: int, route: Route, own: Tensor, arriving: tuple[dist.Work, Tensor] | None) -> None:
        """Adds this rank's gradients, and sends the sum to the next rank, or from the last one to the owner."""
        self._finish(step)
        if arriving is not None:
            work, total = arriving
            work.wait()
            total += own
            own = total
        last = route.hops == step
        to, kind = (route.owner, 2) if last else (self._own + route.step, 1)
        self._sent.append((step, self._messages.send(own, to, kind, route), own))

    def _finish(self, step: int) -> None:
        """Waits for what was sent before a step, and frees it: its receivers begin that step without this rank."""
        for sent, work, _ in self._sent:
            if sent < step:
                work.wait()
        self._sent = [sent for sent in self._sent if sent[0] >= step]

    def collect(self, dk: Tensor, dv: Tensor) -> None:
        """Adds the completed sums that this step receives to the gradients of the own chunks."""
        for route, (work, buffer) in self._returned.items():
            work.wait()
            for total, part in zip((dk, dv), self._messages.views(route, buffer), strict=True):
                own = self._messages.travelling(total, route)
                own += part
        self._returned.clear()

    def end(self, dk: Tensor, dv: Tensor) -> None:
        """Receives and adds the sums that were completed in the last step."""
        past = self._messages.steps + 1
        self.begin(past)
        self.collect(dk, dv)
        self._finish(past)
