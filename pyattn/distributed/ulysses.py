"""Ulysses: each rank exchanges its positions of all heads for all positions of its heads."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyattn.derivatives import autograd
from pyattn.derivatives.second_order import apply
from pyattn.derivatives.tangents import DENSE
from pyattn.distributed.agreement.call import AgreedCall
from pyattn.distributed.agreement.ranks import Ranks
from pyattn.distributed.layout import Chunks, slices, unshard
from pyattn.distributed.partial_results import BackwardInputs, PartialResults
from pyattn.options.axes import AXES, dim_of, dims_of, parts, take
from pyattn.options.positions import moved_origins
from pyattn.options.schema import LEARNED, Options
from pyattn.weights.max_score import of_heads, with_largest_scores

Inner = Callable[[Tensor, Tensor, Tensor, Options], tuple[Tensor, ...]]


def _attend(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, ...]:
    return autograd.attend(DENSE, q, k, v, options)


def _with_largest(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, ...]:
    return with_largest_scores(partial(autograd.attend, DENSE, q, k, v), options)


class Exchange(NamedTuple):
    """An exchange of ``num_heads`` heads for positions: the heads and the positions that each rank has."""

    ranks: Ranks
    num_heads: int
    heads: list[range]
    positions: Chunks

    def to_heads(self, x: Tensor) -> Tensor:
        """(B, H, positions of this rank, D) -> (B, heads of this rank, all positions, D)."""
        (found,) = _Adjoint.apply(self.gather, self.scatter, x)  # type: ignore[no-untyped-call]
        return found  # type: ignore[no-any-return]

    def to_positions(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """(B, heads of this rank, all positions, D) -> (B, H, positions of this rank, D), of each.

        Backward exchanges the gradients of all, also if this rank's loss needs only some: other ranks' may need others.
        """
        return apply(_Adjoint, self.scatter, self.gather, *tensors)

    def gather(self, x: Tensor) -> Tensor:
        """The result of :meth:`to_heads`."""
        sent = [x[:, heads.start : heads.stop] for heads in self.heads]
        own = len(self.heads[self.ranks.own])
        lengths = [sum(map(len, chunks)) for chunks in self.positions]
        shapes = [(x.shape[0], own, length, x.shape[3]) for length in lengths]
        whole = x.new_empty(x.shape[0], own, sum(lengths), x.shape[3])
        for part, chunks in zip(self._swap(sent, shapes), self.positions, strict=True):
            for chunk, rows in zip(chunks, slices(chunks), strict=True):
                whole[:, :, chunk.start : chunk.stop] = part[:, :, rows]
        return whole

    def scatter(self, x: Tensor) -> Tensor:
        """The adjoint of :meth:`gather`: heads that several ranks have are summed, in the order of the ranks."""
        sent = [torch.cat([x[:, :, c.start : c.stop] for c in chunks], 2) for chunks in self.positions]
        length = sent[self.ranks.own].shape[2]
        shapes = [(x.shape[0], len(heads), length, x.shape[3]) for heads in self.heads]
        wide = torch.promote_types(x.dtype, torch.float32)
        total = x.new_zeros(x.shape[0], self.num_heads, length, x.shape[3], dtype=wide)
        for part, heads in zip(self._swap(sent, shapes), self.heads, strict=True):
            total[:, heads.start : heads.stop] += part
        return total.to(x.dtype)

    def _swap(self, sent: list[Tensor], shapes: list[tuple[int, int, int, int]]) -> list[Tensor]:
        """Sends the nth tensor to rank n, and returns those received, of these shapes."""
        flat = torch.cat([part.reshape(-1) for part in sent])
        sizes = [torch.Size(shape).numel() for shape in shapes]
        received = flat.new_empty(sum(sizes))
        # Bytes, because gloo knows few dtypes.
        coming, going = (
            [count * flat.element_size() for count in counts] for counts in (sizes, [part.numel() for part in sent])
        )
        dist.all_to_all_single(
            received.view(torch.uint8), flat.view(torch.uint8), coming, going, group=self.ranks.group
        )
        return [part.view(shape) for part, shape in zip(received.split(sizes), shapes, strict=True)]


class _Adjoint(torch.autograd.Function):
    """A linear function of each tensor; its adjoint maps gradients."""

    @staticmethod
    def forward(
        ctx: Any, function: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.adjoint = adjoint
        return tuple(map(function, tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *map(ctx.adjoint, gradients)


class Ulysses:
    """A call, for callers without autograd; backward computes forward again.

    ``attend`` gives the call's (out, lse), differentiable, and the largest scores.
    """

    def __init__(self, call: AgreedCall, attend: Callable[[AgreedCall], tuple[Tensor, ...]]) -> None:
        self._call, self._of = call, attend

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, ...]:
        return self._of(self._call._replace(q=q, k=k, v=v, options=options))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[PartialResults, Tensor]:
        """The results for this rank's queries, and the largest scores of its heads."""
        with torch.no_grad():
            out, lse, largest = self._attend(q, k, v, self._call.options)
        return PartialResults(out, lse, torch.ones_like(lse)), largest

    def backward(self, inputs: BackwardInputs, k: Tensor, v: Tensor) -> list[Tensor | None]:
        """The gradients of this rank's q, k, v and bias, and its parts of those of the other LEARNED."""
        options, (dout, dlse, q, results, wanted, _) = self._call.options, inputs
        with _recording():
            q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
            learned = {
                name: getattr(options, name).detach().requires_grad_()
                for name, want in zip(LEARNED, wanted, strict=True)
                if want
            }
            again = self._attend(q, k, v, options._replace(**learned))[:2]
            gradients = dout, torch.zeros_like(results.lse) if dlse is None else dlse
            dq, dk, dv, *found = torch.autograd.grad(again, [q, k, v, *learned.values()], gradients)
        own = dict(zip(learned, found, strict=True))
        return [dq, dk, dv, *(own.get(name) for name in LEARNED)]


@contextmanager
def _recording() -> Iterator[None]:
    """Records operations for a gradient, also within an operator, where torch has turned that off for this thread."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    included = torch._C._dispatch_tls_local_include_set()
    with torch.enable_grad(), torch._C._ForceDispatchKeyGuard(included, excluded):
        yield


def by_heads(call: AgreedCall, layout: str, inner: Inner | None = None) -> tuple[Tensor, ...]:
    """(out, lse) of this rank's positions, from ``inner`` over its heads and all positions; their largest scores.

    Those are (B, Hq, 1), -inf for the other heads, and mean nothing unless the call wants max_score.

    Query heads are divided as evenly as possible; a rank gets the KV heads that its query heads read, so a KV head may
    go to several ranks.
    """
    ranks, q, k, v = call.ranks, call.q, call.k, call.v
    count, group = q.shape[1], max(1, q.shape[1] // max(1, k.shape[1]))
    heads = [range(count * rank // ranks.size, count * (rank + 1) // ranks.size) for rank in range(ranks.size)]
    shared = [range(own.start // group, -(-own.stop // group)) if own else range(0) for own in heads]
    own, own_shared = heads[ranks.own], shared[ranks.own]
    by_query = Exchange(ranks, count, heads, call.queries)
    by_key = Exchange(ranks, k.shape[1], shared, call.keys)
    k, v = by_key.to_heads(k), by_key.to_heads(v)
    if own.start % group or len(own) % group:  # the query heads of a KV head are on several ranks
        of_query = torch.tensor([head // group - own_shared.start for head in own], dtype=torch.int64, device=k.device)
        k, v = k.index_select(1, of_query), v.index_select(1, of_query)
    known = _of_heads(call, by_query, layout)
    inner = inner or (_with_largest if call.max_score else _attend)
    out, lse, largest, *_ = inner(by_query.to_heads(q), k, v, known)
    most = largest.new_full((*q.shape[:2], 1), -math.inf)
    most[:, own.start : own.stop, 0] = of_heads(largest)
    out, lse = by_query.to_positions(out, lse.unsqueeze(-1))
    return out, lse.squeeze(-1), most


def _of_heads(call: AgreedCall, by_query: Exchange, layout: str) -> Options:
    """The options of this rank's heads, with all rows."""
    own, whole = by_query.heads[call.ranks.own], dict[str, Tensor]()
    these: dict[str, Any] = {"heads": slice(own.start, own.stop), "num_heads": by_query.num_heads}
    for name in call.by_row:
        tensor = getattr(call.options, name)
        if "h" in dims_of(AXES[name], tensor):  # then it has four dimensions, as q has
            whole[name] = by_query.to_heads(tensor[(None,) * (4 - tensor.dim())])
        else:
            rows = tensor.dim() + dim_of("q", AXES[name], tensor)
            whole |= parts({name: unshard(tensor, rows, call.ranks.group, layout=layout)}, **these)
    options: Options = take(call.options, **these)
    if options.dropout_p:
        origins = options.origins_for(len(call.q), by_query.num_heads, call.q.device)
        options = options._replace(dropout_origins=moved_origins(origins, heads=own.start))
    return options._replace(**whole)
