"""Attention over the keys in all ranks' caches: each rank's results for its own keys, merged on every rank."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyattn.derivatives.autograd import deterministic
from pyattn.derivatives.second_order import apply
from pyattn.distributed.agreement.ranks import ERRORS, exchange
from pyattn.distributed.cache.call import CacheCall
from pyattn.distributed.cache.local_keys import CachePart, keys_of, part_of
from pyattn.distributed.partial_results import BackwardInputs, PartialResults
from pyattn.options.schema import LEARNED
from pyattn.weights.max_score import of_heads


class Own(NamedTuple):
    """A rank's part, and its keys and values; ``pages`` as :func:`keys_of` gives them."""

    part: CachePart
    k: Tensor
    v: Tensor
    pages: tuple[Tensor, int] | None


class Saved(NamedTuple):
    """Tensors for backward: q, the rank's part, keys and values, and the results over all keys."""

    q: Tensor
    part: CachePart
    k: Tensor
    v: Tensor
    results: PartialResults


class Merging:
    """A call, for callers without autograd."""

    def __init__(self, call: CacheCall, q: Tensor) -> None:
        given = q, *(getattr(call.options, name) for name in LEARNED)
        self._call = call
        self._wide, self._device = torch.promote_types(q.dtype, torch.float32), q.device
        self._kinds = [(torch.Size(), self._wide) if t is None else (t.shape, t.dtype) for t in given]

    def own(self, q: Tensor) -> Own:
        """This rank's part of the call."""
        call = self._call
        k, v, pages = keys_of(q, call.cache, any(call.wanted))
        return Own(part_of(q, call.cache, call.whole, call.options), k, v, pages)

    def forward(self, q: Tensor) -> tuple[PartialResults, Tensor, Own]:
        """The results, each query's largest score, sinks apart, and this rank's part."""
        call = self._call
        try:
            own = self.own(q)
            results = own.part.forward(q, own.k, own.v, own.pages)
        except ERRORS as error:
            numbers = q.new_empty(2, *q.shape[:3], dtype=self._wide)
            exchange(call.name, call.ranks, [*numbers, q.new_empty(*q.shape[:3], call.cache.v.shape[-1])], error)
            raise
        sent = results.row_max, results.row_sum, results.out
        first, *others = (PartialResults(out, *numbers) for *numbers, out in exchange(call.name, call.ranks, sent))
        results = PartialResults(*(t.to(self._wide, copy=True) for t in first))  # not views of a message
        for other in others:
            results.merge(other)
        largest = results.row_max.clone()
        results.merge_sinks(call.options.sinks)
        return results._replace(out=results.out.to(q.dtype)), largest, own

    def backward(self, dout: Tensor | None, dlse: Tensor | None, saved: Callable[[], Saved]) -> list[Tensor | None]:
        """The gradients of q and of LEARNED; if ``saved`` raises, so do all ranks."""
        call, wanted = self._call, self._call.wanted
        found, error = list[Tensor | None](), None
        # dq first: it is there whatever is wanted, so that every rank hears of an error.
        shares = [at for at, name in enumerate(LEARNED, 1) if wanted[at] and (name != "bias" or call.one_column)]
        summed = [0, *shares]
        sent = [torch.zeros(self._kinds[at][0], dtype=self._wide, device=self._device) for at in summed]
        try:
            q, part, k, v, results = saved()
            dout = torch.zeros_like(results.out) if dout is None else dout
            found = part.backward(BackwardInputs(dout, dlse, q, results, wanted[1:], deterministic()), k, v)
            for total, at in zip(sent, summed, strict=True):
                if (share := found[at]) is not None:
                    total.copy_(share)
        except ERRORS as problem:
            error = problem
        parts = exchange(call.name, call.ranks, sent, error)
        for at, first, *others in zip(summed, *parts, strict=True):
            found[at] = sum(others, first)  # in the order of the ranks: the same bits on all
        return [
            g.to(dtype) if g is not None and want else None
            for g, (_, dtype), want in zip(found, self._kinds, wanted, strict=True)
        ]


class _OverCaches(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, merging: Merging, q: Tensor, *learned: Tensor | None) -> tuple[Tensor, ...]:
        results, largest, own = merging.forward(q)
        ctx.merging, ctx.part = merging, own.part
        ctx.mark_non_differentiable(largest)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, own.k, own.v, *results, *learned)
        return results.out, results.lse, largest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        def saved() -> Saved:
            q, k, v, out, row_max, row_sum, *learned = ctx.saved_tensors
            options = ctx.part.options._replace(**dict(zip(LEARNED, learned, strict=True)))
            return Saved(q, ctx.part._replace(options=options), k, v, PartialResults(out, row_max, row_sum))

        return None, *ctx.merging.backward(dout, dlse, saved)


def merged(call: CacheCall, q: Tensor) -> tuple[Tensor, ...]:
    """(out, lse, max_score)."""
    learned = [getattr(call.options, name) for name in LEARNED]
    out, lse, largest = apply(_OverCaches, Merging(call, q), q, *learned)
    return out, lse, of_heads(largest)
