"""Queries that see no key, and what the code as it is written makes of their weights and gradients.

The softmax of a row that is all -inf is NaN. Its gradient is NaN at every key, even where its result was replaced by 0.
A fill passes no gradient on where it fills; a sum does, to the products and to its other summand.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyattn.adapters.scratch.recording.chain import Chain, LeftError
from pyattn.adapters.scratch.recording.changes import Change


class Blind(NamedTuple):
    """Queries that see no key, in code without a look at values, and where their gradients are NaN.

    Attributes:
        rows: True = sees no key, (1 or full of *fine, 1 or Sq, 1).
        filled: keys that are filled after the product, (1 or full of *fine, 1 or Sq, 1 or Sk); None = all of ``rows``.
        cleared: keys whose weights are replaced by 0 after the softmax, like ``filled``; None = no key.
    """

    rows: Tensor
    filled: Tensor | None = None
    cleared: Tensor | None = None

    @property
    def results(self) -> Tensor:
        """The queries whose results are NaN, like ``rows``."""
        return self.rows if self.cleared is None else self.rows & ~self.cleared.all(-1, keepdim=True)

    def of(self, q: Tensor, k: Tensor, v: Tensor, *, nan_is_zero: bool) -> tuple[Tensor, Tensor, Tensor]:
        """``q``, ``k`` and ``v`` whose gradients are NaN where plain code's are, v's unless its weights become 0."""
        if not nan_is_zero:
            weighted = self.rows if self.cleared is None else self.rows & ~self.cleared
            v = _with_nan(v, weighted.any(-2, keepdim=True).mT)
        if self.filled is None:
            return q, k, v
        reached = self.rows & ~self.filled
        return _with_nan(q, reached.any(-1, keepdim=True)), _with_nan(k, reached.any(-2, keepdim=True).mT), v


def bias_of(bias: Tensor, rows: Tensor, filled: Tensor | None) -> Tensor:
    """``bias`` with a gradient that is NaN in ``rows``, but for keys that are ``filled`` after it."""
    return _with_nan(bias, rows if filled is None else rows & ~filled)


def _with_nan(x: Tensor, rows: Tensor) -> Tensor:
    """``x`` with a gradient that is NaN where ``rows``, of which any counts that share a part of ``x``, is True."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x
    shared = [at for at in range(-x.dim(), 0) if x.shape[at] == 1 and rows.shape[at] != 1]
    marked: Tensor = _NaNGradient.apply(x, rows.any(shared, keepdim=True) if shared else rows)  # type: ignore[no-untyped-call]
    return marked


class _NaNGradient(torch.autograd.Function):
    """The identity, with a gradient that is NaN at ``rows``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.masked_fill(ctx.saved_tensors[0], math.nan), None


def finite(changes: list[Change], chain: Chain, q: Tensor, k: Tensor) -> bool:
    """Whether bounds prove that all scores are numbers or -inf, the latter by masks alone.

    No step on the way to the softmax then gives NaN or overflows. Half of the dtype's largest number is left for
    rounding, which adds less than 1% a step.
    """
    most = min(torch.finfo(chain.dtype).max, -chain.least) / 2
    sizes = [max(abs(float(y)) for y in torch.aminmax(x.detach())) for x in (q, k)]
    product = chain.scale * q.shape[-1] * math.prod(sizes) + (chain.factor if chain.capped else 0.0)
    total = (product + sum(x.size for x in changes)) * chain.growth
    return not chain.factors and all(x < most for x in (*sizes, total)) and all(x.high < math.inf for x in changes)


def are_zero(
    changes: list[Change],
    rows: Tensor,
    chain: Chain,
    products: tuple[Tensor, Tensor],
    bound: float,
    *,
    filled: bool,
) -> bool:
    """Whether the weights of ``rows``, which see no key, end as 0: ``filled``, or NaN and then replaced.

    Args:
        changes: of ``chain``.
        rows: (1 or full of *fine, 1 or Sq).
        chain: if ``nan_is_zero``, the scores are :func:`finite`.
        products: q and k.
        bound: no product of them is larger if a change is a finite number.
        filled: whether the weights were filled with 0.

    Raises LeftError if only some of the weights are 0, or if gradients that are NaN reach something.
    """
    if filled:
        least = max(chain.least, *(torch.finfo(x).min for x in (products[0].dtype, chain.dtype)))
        nan = not sum(min(x.low, 0.0) for x in changes) - bound >= least
    elif chain.nan_is_zero:
        endless = _endless(changes, products[0])
        nan = bool(endless.any())
        if nan and bool((rows & ~endless).any()):
            raise LeftError("queries that see no key, of which some have weights")
    else:
        return False
    if nan and not _stopped(changes, rows, chain, products):
        raise LeftError("a query that sees no key, with a gradient of NaN")
    return filled or nan


def _endless(changes: list[Change], q: Tensor) -> Tensor:
    """The queries whose scores are all -inf, (1 or full of *fine, 1 or Sq)."""
    total = torch.zeros((1, 1), dtype=q.dtype, device=q.device)
    for x in changes:
        total = x.applied(total)
    return (total == -math.inf).all(-1)


def _stopped(changes: list[Change], rows: Tensor, chain: Chain, products: tuple[Tensor, Tensor]) -> bool:
    """Whether the gradient NaN of ``rows`` reaches nothing: fills replace what they have of products and biases.

    The maximum of a row spreads its gradient over the row, past fills that follow it.
    """
    if not torch.is_grad_enabled():
        return True
    filled = ~rows[..., None]
    for x in reversed(changes):
        if x.tensor is None:
            continue
        if x.coefficient is None:
            filled = filled | x.tensor if x.low < 0 else filled
        elif x.tensor.requires_grad and not bool(filled.all()):
            return False
    return not any(x.requires_grad for x in products) or (not chain.final and bool(filled.all()))
