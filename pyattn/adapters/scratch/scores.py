"""The product of queries and keys, recorded: torch's own function on queries that are deferred."""

from typing import Any

import torch
from torch import Tensor

from pyattn.adapters.scratch.products import BADDBMMS, MATMULS, Operands, tensors_of, with_tensors
from pyattn.adapters.scratch.recording.deferred import Cell, Deferred, plain
from pyattn.adapters.scratch.recording.expressions import Expression, State
from pyattn.adapters.scratch.recording.operators import Scores
from pyattn.adapters.scratch.recording.session import Product


class _Lift(torch.autograd.Function):
    """The queries as a deferred tensor, so that the operators on them are recorded below torch's autograd."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, product: Product) -> Tensor:
        return _deferred_queries(q, product)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return plain(gradient) if isinstance(gradient, Deferred) else gradient, None


def scores_of(func: Any, args: Any, kwargs: Any, operands: Operands, product: Product) -> Tensor:
    """``func`` with deferred queries. Torch's own steps are taken here where they are known: recording costs most."""
    tensors = tensors_of(func, args)
    q, k = operands.q, operands.k
    scores: Tensor
    by_einsum = func not in MATMULS and 1 in (*q.shape, *k.shape)  # it sums over dimensions of size 1 in other ways
    own_way = func in BADDBMMS or by_einsum or operands.lifted or operands.order is not None
    if own_way or len(operands.lead) < 2 or q.shape[:-2] != k.shape[:-2]:
        tensors[operands.lifted] = _lifted(tensors[operands.lifted], product)
        scores = func(*with_tensors(func, args, tensors), **kwargs)
        return torch.ops.aten._unsafe_view(scores, scores.shape) if scores._is_view() else scores  # alone in its memory
    q, k = q.reshape(-1, *q.shape[-2:]), k.transpose(-2, -1).reshape(-1, k.shape[-1], k.shape[-2])
    shape = (*operands.lead, q.shape[-2], k.shape[-1])
    scores = torch.ops.aten._unsafe_view(torch.bmm(_lifted(q, product), k), shape)
    return scores


def _lifted(q: Tensor, product: Product) -> Tensor:
    if q.requires_grad and torch.is_grad_enabled():
        lifted: Tensor = _Lift.apply(q, product)  # type: ignore[no-untyped-call]
        return lifted
    return _deferred_queries(q, product)


def _deferred_queries(q: Tensor, product: Product) -> Scores:
    return Scores(Cell(Expression.of(q, [(q, State.of(q))]), product), q.shape, q.stride(), q)
