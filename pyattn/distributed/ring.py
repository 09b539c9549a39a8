"""Ring attention: each rank has a part of the sequence, and chunks of keys travel from neighbour to neighbour."""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyattn.derivatives import autograd
from pyattn.distributed.call import Call
from pyattn.distributed.layout import Chunks, slices
from pyattn.distributed.ranks import Ranks
from pyattn.distributed.shares import Dense, Rows, Wanted
from pyattn.distributed.trips import Trip, trips_of

class Ring:
    """One call on this rank: chunks, trips, and the messages between neighbours.

    At step t the rank has the chunks of keys that are t hops from their owners. While it computes with them, those of
    the next step are on their way.
    """

    def __init__(self, ranks: Ranks, shares: Dense, queries: Chunks, keys: Chunks) -> None:
        self.ranks, self.shares = ranks, shares
        self.queries, self.keys = queries[ranks.own], keys[ranks.own]
        self.trips = trips_of(queries, keys, shares.sees)
        self.steps = max((trip.hops for trip in self.trips), default=0)

    def at(self, step: int) -> list[Trip]:
        """The trips whose chunks are on this rank at a step."""
        here = (self.ranks.own, self.ranks.count)
        return [trip for trip in self.trips if trip.hop(*here) == step <= trip.hops]

    def send(self, tensor: Tensor, rank: int, tag: int) -> dist.Work:
        """Starts sending to a rank; tensor must live until the end."""
        return self._work(dist.isend(tensor, group=self.ranks.group, group_dst=rank % self.ranks.count, tag=tag))

    def receive(self, tensor: Tensor, rank: int, tag: int) -> dist.Work:
        """Starts receiving from a rank."""
        return self._work(dist.irecv(tensor, group=self.ranks.group, group_src=rank % self.ranks.count, tag=tag))

    @staticmethod
    def _work(work: dist.Work | None) -> dist.Work:
        assert work is not None
        return work

    def blocks(self, k: Tensor, v: Tensor, kind: int) -> Iterator[tuple[int, list[tuple[Trip, Tensor, Tensor]]]]:
        """Steps from 1 on, each with the trips whose chunks are here, and their keys and values."""
        own, parts = self.ranks.own, slices(self.keys)
        held = {}
        for trip in self.at(0):
            held[trip.number] = torch.cat([self._chunk(t, parts[trip.chunk]).reshape(-1) for t in (k, v)])
        for step in range(1, self.steps + 1):
            works = [
                self.send(held[trip.number], own + trip.step, kind + trip.number)
                for trip in self.at(step - 1)
                if trip.hops >= step
            ]
            coming = {trip.number: k.new_empty(sum(self._sizes(trip, k, v))) for trip in self.at(step)}
            works += [self.receive(coming[trip.number], own - trip.step, kind + trip.number) for trip in self.at(step)]
            yield step - 1, [(trip, *self._views(trip, held[trip.number], k, v)) for trip in self.at(step - 1) if step > 1]
            for work in works:
                work.wait()
            held = coming
        yield self.steps, [(t, *self._views(t, held[t.number], k, v)) for t in self.at(self.steps) if self.steps]

    def _chunk(self, tensor: Tensor, rows: slice) -> Tensor:
        return tensor.narrow(self.shares.dim, rows.start, rows.stop - rows.start)

    def _shape(self, like: Tensor, length: int) -> list[int]:
        return [length if dim == self.shares.dim else size for dim, size in enumerate(like.shape)]

    def _sizes(self, trip: Trip, k: Tensor, v: Tensor) -> list[int]:
        return [math.prod(self._shape(t, len(trip.keys))) for t in (k, v)]

    def _views(self, trip: Trip, buffer: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        first, second = buffer.split(self._sizes(trip, k, v))
        return first.view(self._shape(k, len(trip.keys))), second.view(self._shape(v, len(trip.keys)))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Rows:
        """The results for this rank's queries, in float32 or more unless they come from one share."""
        rows, parts = slices(self.queries), slices(self.keys)
        found: list[Rows | None] = [None] * len(rows)

        def add(keys: range, k: Tensor, v: Tensor) -> None:
            for number, (place, queries) in enumerate(zip(rows, self.queries, strict=True)):
                before = found[number]
                if before is None or self.shares.sees(queries, keys):
                    share = self.shares.forward(self._chunk(q, place), k, v, place, queries, keys, before is None)
                    found[number] = share if before is None else before.merged(share, self.shares.column)

        for step, blocks in self.blocks(k, v, 0):
            if step == 0:
                for keys, part in zip(self.keys, parts, strict=True):
                    add(keys, self._chunk(k, part), self._chunk(v, part))
            for trip, *block in blocks:
                add(trip.keys, *block)
        outs, *numbers = zip(*(part for part in found if part is not None), strict=True)
        out = torch.cat([part.to(q.dtype) for part in outs], self.shares.dim)
        return Rows(out, *(torch.cat(parts, self.shares.row_dim) for parts in numbers))

    def backward(
        self, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, results: Rows, wanted: Wanted
    ) -> list[Tensor | None]:
        """The gradients of this rank's q, k, v and bias, and its shares of those of the slopes and sinks.

        Those of a chunk of keys travel with it; each rank adds its own, and the last one sends them to the owner.
        """
        ranks, shares, options = self.ranks, self.shares, self.shares.options
        wide = torch.promote_types(q.dtype, torch.float32)
        rows, parts = slices(self.queries), slices(self.keys)
        learned = (options.bias, options.alibi_slopes, options.sinks)
        totals = [None if t is None or not want else torch.zeros_like(t, dtype=wide) for t, want in zip(learned, wanted, strict=True)]
        dq, dk, dv = (torch.zeros_like(t, dtype=wide) for t in (q, k, v))
        flag = autograd.deterministic()
        seen: set[int] = set()

        def share(keys: range, block: tuple[Tensor, Tensor], into: tuple[Tensor, Tensor]) -> None:
            for number, (place, queries) in enumerate(zip(rows, self.queries, strict=True)):
                if number in seen and not shares.sees(queries, keys):
                    continue
                first = number not in seen
                seen.add(number)
                of_rows = [None if t is None else t.narrow(shares.row_dim, place.start, len(queries)) for t in (dlse, *results[1:])]
                out = self._chunk(results.out, place)
                found = shares.backward(
                    self._chunk(dout, place), of_rows[0], (self._chunk(q, place), *block), Rows(out, of_rows[1], of_rows[2]),
                    wanted, flag, place, queries, keys, first,
                )
                for total, gradient in zip((self._chunk(dq, place), *into), found, strict=False):
                    total += gradient
                for index, gradient in enumerate(found[3:]):
                    total = totals[index]
                    if total is not None and (index < 2 or first):
                        target = shares.bias_of(total, place, keys) if index == 0 else total
                        target += gradient

        homes = {trip.number: dk.new_empty(sum(self._sizes(trip, k, v))) for trip in self.at(0)}
        many = len(self.trips)
        returns = [
            self.receive(homes[trip.number], trip.owner + trip.step * trip.hops, 3 * many + trip.number) for trip in self.at(0)
        ]
        sent: list[tuple[dist.Work, Tensor]] = []
        for step, blocks in self.blocks(k, v, many):
            if step == 0:
                for keys, part in zip(self.keys, parts, strict=True):
                    own = self._chunk(k, part), self._chunk(v, part)
                    share(keys, own, (self._chunk(dk, part), self._chunk(dv, part)))
            coming = {}
            for trip, *_ in blocks:
                buffer = dk.new_zeros(sum(self._sizes(trip, k, v)))
                work = self.receive(buffer, ranks.own - trip.step, 2 * many + trip.number) if step > 1 else None
                coming[trip.number] = buffer, work
            for trip, *block in blocks:
                mine = torch.zeros_like(coming[trip.number][0])
                share(trip.keys, tuple(block), self._views(trip, mine, k, v))  # type: ignore[arg-type]
                buffer, work = coming[trip.number]
                if work is not None:
                    work.wait()
                buffer += mine
                at_end = trip.hops == step
                to = trip.owner if at_end else ranks.own + trip.step
                sent.append((self.send(buffer, to, (3 if at_end else 2) * many + trip.number), buffer))
        for work in returns:
            work.wait()
        for trip in self.at(0):
            for total, part in zip((dk, dv), self._views(trip, homes[trip.number], k, v), strict=True):
                total.narrow(shares.dim, parts[trip.chunk].start, len(trip.keys)).add_(part)
        for work, _ in sent:
            work.wait()
        return [dq, dk, dv, *totals]


class RingAttention(torch.autograd.Function):
    """The Function of a call: (out, lse) of this rank's queries."""

    @staticmethod
    def forward(ctx: Any, ring: Ring, q: Tensor, k: Tensor, v: Tensor, *learned: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: D102
        rows = ring.forward(q, k, v)
        ctx.ring = ring
        ctx.given = learned
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, *rows, *(t for t in learned if t is not None))
        return rows.out, rows.lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: D102
        q, k, v, out, row_max, row_sum, *_ = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        found = ctx.ring.backward(dout, dlse, q, k, v, Rows(out, row_max, row_sum), ctx.needs_input_grad[4:7])
        like = (q, k, v, *ctx.given)
        return None, *(None if g is None else g.to(t.dtype) for g, t in zip(found, like, strict=True))


def ring(call: Call, shares: Dense) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank's queries."""
    learned = shares.options.bias, shares.options.alibi_slopes, shares.options.sinks
    engine = Ring(call.ranks, shares, call.queries, call.keys)
    out, lse = RingAttention.apply(engine, call.q, call.k, call.v, *learned)  # type: ignore[no-untyped-call]
    return out, lse
