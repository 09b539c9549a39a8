"""Ring attention: forward and backward over the chunks of keys that pass a rank."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyattn.derivatives import autograd
from pyattn.distributed.agreement.call import Call
from pyattn.distributed.layout import slices
from pyattn.distributed.partial_results import Rows
from pyattn.distributed.ring.chunk_attention import Dense, Packed, Place, Wanted
from pyattn.distributed.ring.messages import Block, Homeward, Stream
from pyattn.distributed.ring.routes import Trip, trips_of
from pyattn.options.schema import LEARNED


class Ring:
    """A call: its shares of attention, and the trips of its chunks."""

    def __init__(self, call: Call) -> None:
        of, sizes = (Packed, call.packings) if call.packings else (Dense, call.lengths)
        shares = of(call.options, call.q.shape[1], *sizes)
        self._ranks, self._shares, self._keys = call.ranks, shares, call.keys
        self._queries = call.queries[call.ranks.own]
        self._trips = trips_of(call.queries, call.keys, shares.seen)

    def _stream(self, k: Tensor, v: Tensor) -> Stream:
        return Stream(self._ranks, self._trips, self._keys, k, v, self._shares.dim)

    def _places(self, keys: range, seen: set[int]) -> list[tuple[int, Place]]:
        """The chunks of queries that see these keys; each sees its first keys even if all are hidden, for the sinks."""
        found = []
        for number, (rows, queries) in enumerate(zip(slices(self._queries), self._queries, strict=True)):
            if number not in seen or self._shares.seen(queries, keys):
                found.append((number, Place(rows, queries, keys, number not in seen)))
                seen.add(number)
        return found

    def _together(self, first: bool) -> Place | None:
        """All own queries over all own keys, if their chunks are one share."""
        chunks = self._queries, self._keys[self._ranks.own]
        if not self._shares.is_one_share(*chunks):
            return None
        queries, keys = (range(sum(map(len, of))) for of in chunks)
        return Place(slice(0, len(queries)), queries, keys, first)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Rows, Tensor]:
        """The results for this rank's queries, and their largest scores, sinks apart: these are merged last."""
        shares, seen = self._shares, set[int]()
        own = self._together(first=False)
        chunks = list(zip(slices(self._queries), self._queries, strict=True))
        found: dict[int, Rows] = {}
        together = list[Rows]()  # of all queries, of which found has views

        def compute(step: int, blocks: list[Block]) -> None:
            if step == 0 and own is not None:
                together.append(shares.forward(q, k, v, own).wide())
                found.update(enumerate(together[0].narrow(at, shares.dim, shares.row_dim) for at, _ in chunks))
                seen.update(found)
                return
            for block in blocks:
                for number, place in self._places(block.keys, seen):
                    rows = shares.forward(shares.of_rows(q, place), block.k, block.v, place._replace(first=False))
                    if number in found:
                        found[number].merge(rows, shares.column)
                    else:
                        found[number] = rows.wide()

        self._stream(k, v).for_each_step(compute)
        parts = [found[number] for number in range(len(chunks))]
        largest = torch.cat([part.row_max for part in parts], shares.row_dim)
        for part, (_, queries) in zip(parts, chunks, strict=True):
            shares.merge_sinks(part, queries)
        if together:
            return together[0]._replace(out=together[0].out.to(q.dtype)), largest
        outs, *numbers = zip(*parts, strict=True)
        out = torch.cat([part.to(q.dtype) for part in outs], shares.dim)
        return Rows(out, *(torch.cat(part, shares.row_dim) for part in numbers)), largest

    def backward(
        self, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, results: Rows, wanted: Wanted
    ) -> list[Tensor | None]:
        """The gradients of this rank's q, k, v and bias, and its shares of those of the other LEARNED."""
        shares, seen = self._shares, set[int]()
        wide = torch.promote_types(q.dtype, torch.float32)
        stream = self._stream(k, v)
        homeward = Homeward(stream, self._ranks.own, wide)
        together = self._together(first=True)
        sums, totals = list[Tensor](), list[Tensor | None]()  # of dq, dk, dv and of the learned options so far

        def share(k: Tensor, v: Tensor, place: Place) -> tuple[Tensor | None, ...]:
            return shares.backward(dout, dlse, q, results, k, v, wanted, autograd.deterministic(), place)

        def add(block: Block, into: tuple[Tensor, Tensor]) -> None:
            for _, place in self._places(block.keys, seen):
                targets = shares.of_rows(sums[0], place), *into, *shares.parts_of(totals, place)
                for total, gradient in zip(targets, share(block.k, block.v, place), strict=True):
                    if total is not None and gradient is not None:
                        total += gradient

        def pass_gradients(step: int, trip: Trip, block: Block, arriving: tuple[dist.Work, Tensor] | None) -> None:
            own = stream.buffer(trip, wide).zero_()
            add(block, stream.views(trip, own))
            homeward.pass_on(step, trip, own, arriving)

        def compute(step: int, blocks: list[Block]) -> None:
            arriving = homeward.begin(step)
            if step == 0 and together is not None:
                first = [None if t is None else t.to(wide) for t in share(k, v, together)]
                sums.extend(t for t in first[:3] if t is not None)
                totals.extend(first[3:])
                seen.update(range(len(self._queries)))
                return
            if step == 0:
                sums.extend(torch.zeros_like(t, dtype=wide) for t in (q, k, v))
                totals.extend(
                    None if t is None or not want else torch.zeros_like(t, dtype=wide)
                    for t, want in zip(shares.learned(), wanted, strict=True)
                )
            for chunk, block in enumerate(blocks):
                if block.trip is None:
                    add(block, (stream.part(sums[1], chunk), stream.part(sums[2], chunk)))
                else:
                    pass_gradients(step, block.trip, block, arriving.pop(block.trip, None))
            homeward.come_home(*sums[1:])

        stream.for_each_step(compute)
        homeward.end(*sums[1:])
        return [*sums, *totals]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ring: Ring, q: Tensor, k: Tensor, v: Tensor, *learned: Tensor | None) -> tuple[Tensor, ...]:
        rows, largest = ring.forward(q, k, v)
        ctx.ring, ctx.learned = ring, learned
        ctx.mark_non_differentiable(largest)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, *rows)
        return rows.out, rows.lse, largest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        q, k, v, *rows = ctx.saved_tensors
        results = Rows(*rows)
        dout = torch.zeros_like(results.out) if dout is None else dout
        found = ctx.ring.backward(dout, dlse, q, k, v, results, ctx.needs_input_grad[4:])
        given = (q, k, v, *ctx.learned)
        return None, *(None if g is None else g.to(t.dtype) for g, t in zip(found, given, strict=True))


def ring(call: Call) -> tuple[Tensor, ...]:
    """(out, lse, the largest scores) of this rank's queries."""
    learned = [getattr(call.options, name) for name in LEARNED]
    results: tuple[Tensor, ...] = _RingAttention.apply(Ring(call), call.q, call.k, call.v, *learned)  # type: ignore[no-untyped-call]
    return results
