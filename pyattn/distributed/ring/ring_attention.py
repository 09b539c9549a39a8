"""Ring attention: forward and backward over the chunks of keys that pass a rank."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyattn.derivatives import autograd
from pyattn.derivatives.second_order import apply
from pyattn.distributed.agreement.call import AgreedCall
from pyattn.distributed.layout import slices
from pyattn.distributed.partial_results import BackwardInputs, PartialResults
from pyattn.distributed.ring.chunk_attention import Chunk, Dense, Packed
from pyattn.distributed.ring.messages import GradientReturn, KeyChunk, Messages
from pyattn.distributed.ring.routes import routes_of
from pyattn.options.schema import LEARNED


class Ring:
    """A call: the chunks that its ranks compute, and the routes of keys between them."""

    def __init__(self, call: AgreedCall) -> None:
        of, sizes = (Packed, call.sequences) if call.sequences else (Dense, call.lengths)
        self._chunks = of(call.options, call.q, *sizes)
        self._ranks, self._keys = call.ranks, call.keys
        self._queries = call.queries[call.ranks.own]
        self._routes = routes_of(call.queries, call.keys, self._chunks.visible)

    def _messages(self, k: Tensor, v: Tensor) -> Messages:
        return Messages(self._ranks, self._routes, self._keys, k, v, self._chunks.dim)

    def _over(self, keys: range, begun: set[int]) -> list[tuple[int, Chunk]]:
        """The chunks over these keys, by the number of their queries; ``begun`` has those that have had keys.

        All begin with some keys, even if these are hidden, for the sinks.
        """
        found = []
        for number, (rows, queries) in enumerate(zip(slices(self._queries), self._queries, strict=True)):
            if number not in begun or self._chunks.visible(queries, keys):
                found.append((number, Chunk(rows, queries, keys, number not in begun)))
                begun.add(number)
        return found

    def _together(self, first: bool) -> Chunk | None:
        """All own queries over all own keys, if these are one call."""
        held = self._queries, self._keys[self._ranks.own]
        if not self._chunks.are_one(*held):
            return None
        queries, keys = (range(sum(map(len, of))) for of in held)
        return Chunk(slice(0, len(queries)), queries, keys, first)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[PartialResults, Tensor]:
        """The results for this rank's queries, and their largest scores, sinks apart: these are merged last."""
        chunks, begun = self._chunks, set[int]()
        own = self._together(first=False)
        held = list(zip(slices(self._queries), self._queries, strict=True))
        found: dict[int, PartialResults] = {}
        together = list[PartialResults]()  # of all queries, of which found has views

        def compute(step: int, key_chunks: list[KeyChunk]) -> None:
            if step == 0 and own is not None:
                together.append(chunks.forward(q, k, v, own).wide())
                found.update(enumerate(together[0].narrow(at, chunks.dim, chunks.row_dim) for at, _ in held))
                begun.update(found)
                return
            for key_chunk in key_chunks:
                for number, chunk in self._over(key_chunk.keys, begun):
                    rows = chunks.forward(
                        chunks.of_rows(q, chunk), key_chunk.k, key_chunk.v, chunk._replace(first=False)
                    )
                    if number in found:
                        found[number].merge(rows)
                    else:
                        found[number] = rows.wide()

        self._messages(k, v).for_each_step(compute)
        parts = [found[number] for number in range(len(held))]
        largest = torch.cat([part.row_max for part in parts], chunks.row_dim)
        for part, (_, queries) in zip(parts, held, strict=True):
            chunks.merge_sinks(part, queries)
        if together:
            return together[0]._replace(out=together[0].out.to(q.dtype)), largest
        outs, *numbers = zip(*parts, strict=True)
        out = torch.cat([part.to(q.dtype) for part in outs], chunks.dim)
        return PartialResults(out, *(torch.cat(part, chunks.row_dim) for part in numbers)), largest

    def backward(self, inputs: BackwardInputs, k: Tensor, v: Tensor) -> list[Tensor | None]:
        """The gradients of this rank's q, k, v and bias, and its parts of those of the other LEARNED."""
        messages = self._messages(k, v)
        wide = torch.promote_types(inputs.q.dtype, torch.float32)
        gradients = _Gradients(self, messages, GradientReturn(messages, self._ranks.own, wide), inputs, (k, v), wide)
        messages.for_each_step(gradients.compute)
        return gradients.collected()


class _Gradients:
    """The sums of a rank's gradients, to which each step adds those of the chunks that it computes."""

    def __init__(
        self,
        ring: Ring,
        messages: Messages,
        returning: GradientReturn,
        inputs: BackwardInputs,
        own: tuple[Tensor, Tensor],
        wide: torch.dtype,
    ) -> None:
        self._ring, self._messages, self._returning = ring, messages, returning
        self._inputs, self._own, self._wide = inputs, own, wide
        self._begun = set[int]()
        self._sums, self._learned = list[Tensor](), list[Tensor | None]()

    def compute(self, step: int, key_chunks: list[KeyChunk]) -> None:
        """Adds the gradients of the chunks over these keys; those of other ranks' keys continue on their way."""
        arriving = self._returning.begin(step)
        if step == 0 and (together := self._ring._together(first=True)) is not None:
            found = self._ring._chunks.backward(self._inputs, *self._own, together)
            sums = [None if t is None else t.to(self._wide) for t in found]
            self._sums, self._learned = [t for t in sums[:3] if t is not None], sums[3:]
            self._begun.update(range(len(self._ring._queries)))
            return
        if step == 0:
            self._begin()
        for number, key_chunk in enumerate(key_chunks):
            if key_chunk.route is None:
                self._add(
                    key_chunk, (self._messages.part(self._sums[1], number), self._messages.part(self._sums[2], number))
                )
            else:
                buffer = self._messages.buffer(key_chunk.route, self._wide).zero_()
                self._add(key_chunk, self._messages.views(key_chunk.route, buffer))
                self._returning.pass_on(step, key_chunk.route, buffer, arriving.pop(key_chunk.route, None))
        self._returning.collect(*self._sums[1:])

    def _begin(self) -> None:
        self._sums = [torch.zeros_like(t, dtype=self._wide) for t in (self._inputs.q, *self._own)]
        learned = [getattr(self._ring._chunks.options, name) for name in LEARNED]
        self._learned = [
            None if t is None or not want else torch.zeros_like(t, dtype=self._wide)
            for t, want in zip(learned, self._inputs.wanted, strict=True)
        ]

    def _add(self, key_chunk: KeyChunk, into: tuple[Tensor, Tensor]) -> None:
        chunks = self._ring._chunks
        for _, chunk in self._ring._over(key_chunk.keys, self._begun):
            targets = chunks.of_rows(self._sums[0], chunk), *into, *chunks.of_learned(self._learned, chunk)
            found = chunks.backward(self._inputs, key_chunk.k, key_chunk.v, chunk)
            for total, gradient in zip(targets, found, strict=True):
                if total is not None and gradient is not None:
                    total += gradient

    def collected(self) -> list[Tensor | None]:
        """The sums, once those of own keys that other ranks completed in the last step have key_chunks."""
        self._returning.end(*self._sums[1:])
        return [*self._sums, *self._learned]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ring: Ring, q: Tensor, k: Tensor, v: Tensor, *learned: Tensor | None) -> tuple[Tensor, ...]:
        results, largest = ring.forward(q, k, v)
        ctx.ring, ctx.learned = ring, learned
        ctx.mark_non_differentiable(largest)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, *results)
        return results.out, results.lse, largest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        q, k, v, *rows = ctx.saved_tensors
        results = PartialResults(*rows)
        dout = torch.zeros_like(results.out) if dout is None else dout
        inputs = BackwardInputs(dout, dlse, q, results, ctx.needs_input_grad[4:], autograd.deterministic())
        found = ctx.ring.backward(inputs, k, v)
        given = (q, k, v, *ctx.learned)
        return None, *(None if g is None else g.to(t.dtype) for g, t in zip(found, given, strict=True))


def ring(call: AgreedCall) -> tuple[Tensor, ...]:
    """(out, lse, the largest scores) of this rank's queries."""
    learned = [getattr(call.options, name) for name in LEARNED]
    return apply(_RingAttention, Ring(call), call.q, call.k, call.v, *learned)
