"""The rule that judges accuracy: at most twice the error that plain PyTorch makes in the same dtype.

What plain PyTorch errs by depends on the order that its BLAS happens to sum in, so on the machine. The yardstick is
therefore its largest error over orders that are equal in exact arithmetic: queries, keys and the columns of the head
dimensions permuted.

One error is allowed on top, which no order of plain PyTorch's has. A kernel of linear memory subtracts
``delta = rowsum(dO * O)`` where softmax's own gradient subtracts ``rowsum(P * dP)``, and O is made of forward's
weights, P of backward's: see :func:`delta_rounding`.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from math import isfinite
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from pyattn import reference
from pyattn.reference import formula

ORDERS = 16
"""As given, and 15 at random. They are run only until one allows the error, which the first nearly always does."""

WEIGHT_ROUNDINGS = 4
"""By how many eps a weight of forward and the same one of backward may differ: exp2 errs by up to 2.1 ulp in each."""

NAMES = ("out", "lse", "dq", "dk", "dv")

Results = tuple[Tensor, ...]
Run = Callable[..., Results]
"""``run(attention, qkv, dout, dlse, **options)``: out, lse, dq, dk, dv."""


def error(x: Tensor, exact: Tensor) -> float:
    """The largest absolute difference. Where the exact value is infinite, so must x be."""
    finite = exact.isfinite()
    assert torch.equal(x.double()[~finite], exact[~finite])
    return (x.double() - exact)[finite].abs().max().item() if finite.any() else 0.0


def bound(dtype: torch.dtype, plain: Tensor, exact: Tensor) -> float:
    """Twice the error of the plain result, plus four roundings of the largest value.

    ``plain`` is the reference's result in ``dtype``, ``exact`` its result in float64. For float64 itself, 1e-12 of the
    largest value.
    """
    finite = exact[exact.isfinite()]
    largest = finite.abs().max().item() if finite.numel() else 0.0
    if dtype == torch.float64:
        return 1e-12 * largest
    return 2 * error(plain, exact) + 4 * torch.finfo(dtype).eps * largest


def excess(x: Tensor, plain: Iterable[Tensor], exact: Tensor, more: float = 0.0, factor: float = 1.0) -> float:
    """By how much the error of x exceeds its bound, 1 being equal to it, for the order of ``plain`` that allows most.

    ``more`` is allowed on top. Errors below 1e-14 of ``factor``, by which the result was scaled, count as none: there,
    the exact result is rounding noise of float64 itself. So do errors below float32's normal range.
    """
    assert x.shape == exact.shape
    wrong, smallest = error(x, exact), float("inf")
    noise = max(1e-14 * factor, torch.finfo(torch.float32).tiny)
    for result in plain:
        allowed = max(bound(x.dtype, result, exact) + more, noise)
        if isfinite(allowed):  # a plain result that overflows allows nothing
            smallest = min(smallest, wrong / allowed)  # which NaN, from a NaN among finite values, never is
        if smallest <= 1:
            break
    return smallest


def assert_accurate(name: str, x: Tensor, plain: Tensor | Iterable[Tensor], exact: Tensor) -> None:
    """The error of x is within its bound; ``plain`` is the reference's result, or an iterable of it in many orders."""
    assert excess(x, [plain] if isinstance(plain, Tensor) else plain, exact) <= 1, name


def _scale(q: Tensor, options: dict[str, Any]) -> float:
    """The absolute value of softmax_scale."""
    scale = options.get("softmax_scale")
    return abs(reference.default_scale(q.shape[3]) if scale is None else scale)


def delta_rounding(qkv: Results, dout: Tensor, **options: Any) -> dict[str, float]:
    """How much of dq and dk is due to delta alone, if forward's weights differ from backward's by WEIGHT_ROUNDINGS.

    Then row i's delta is off by up to ``d_i = eps WEIGHT_ROUNDINGS sum_j |P_ij D_ij dP_ij|``, D being dropout's
    factors, and the gradients by ``softmax_scale d_i |sum_j P_ij k_j|`` and ``softmax_scale sum_i P_ij d_i |q_i|``.
    """
    q, k, v = (t.double() for t in qkv)
    group = q.shape[1] // k.shape[1]
    scale = _scale(q, options)
    weights, dropped = (
        reference.attention(q, k, v, return_weights=True, **options | changes)[1]
        for changes in ({"dropout_p": 0.0}, {})
    )
    dp = dout.double() @ v.repeat_interleave(group, 1).mT
    off = scale * torch.finfo(qkv[0].dtype).eps * WEIGHT_ROUNDINGS * (dropped * dp).abs().sum(-1, keepdim=True)
    dq = off * (weights @ k.repeat_interleave(group, 1)).abs()
    dk = (weights.mT @ (off * q.abs())).unflatten(1, (-1, group)).sum(2)
    return {"dq": dq.max().item(), "dk": dk.max().item()}


def _reordered(
    run: Run, qkv: Results, dout: Tensor, dlse: Tensor | None, options: dict[str, Any], seed: int
) -> Results:
    """The reference's results of permuted inputs, put back into their order."""
    q, k, v = qkv
    sizes = (q.shape[2], k.shape[2], q.shape[3], v.shape[3])
    generator = random.Random(seed)
    queries, keys, columns, columns_v = (
        torch.tensor(generator.sample(range(n), n), dtype=torch.int64, device=q.device) for n in sizes
    )
    where = {name: options.get(name, default) for name, default in (("causal", True), ("q_offset", None))}
    seen = reference.visible(*sizes[:2], **where, device=q.device)[..., queries, :][..., keys]
    dropout_mask = formula.dropout_mask

    def permuted_mask(*arguments: Any) -> Tensor:
        return dropout_mask(*arguments)[..., queries, :][..., keys]

    inputs = (q[:, :, queries][..., columns], k[:, :, keys][..., columns], v[:, :, keys][..., columns_v])
    with mock.patch.object(formula, "dropout_mask", permuted_mask):
        results = run(
            reference.attention,
            inputs,
            dout[:, :, queries][..., columns_v],
            None if dlse is None else dlse[:, :, queries],
            **options | {"causal": False, "q_offset": None, "bias": seen},
        )
    everything = torch.arange(1, device=q.device)
    places = ((queries, columns_v), (queries, everything), (queries, columns), (keys, columns), (keys, columns_v))
    return tuple(
        (x[..., None] if x.dim() == 3 else x)[:, :, rows.argsort()][..., within.argsort()].reshape(x.shape)
        for x, (rows, within) in zip(results, places, strict=True)
    )


class Yardsticks:
    """The reference's results in the dtype of ``qkv``, in as many orders as are asked for, each run once."""

    def __init__(self, run: Run, qkv: Results, dout: Tensor, dlse: Tensor | None = None, **options: Any) -> None:
        self._delta_rounding = lambda: delta_rounding(qkv, dout, **options)
        self._factors = dict.fromkeys(("dq", "dk"), min(1.0, _scale(qkv[0], options)))
        self._run = lambda seed: _reordered(run, qkv, dout, dlse, options, seed)
        self._runs = [run(reference.attention, qkv, dout, dlse, **options)]

    def results(self, index: int) -> Iterator[Tensor]:
        """Result ``index`` of out, lse, dq, dk, dv, order by order."""
        for order in range(ORDERS):
            if order == len(self._runs):
                self._runs.append(self._run(order))
            yield self._runs[order][index]

    def excesses(self, ours: Results, exact: Results) -> dict[str, float]:
        """:func:`excess` of each result, by name; infinite where a result has a NaN that the exact one has not."""
        found = {}
        for i, (name, x, truth) in enumerate(zip(NAMES, ours, exact, strict=True)):
            factor = self._factors.get(name, 1.0)
            found[name] = excess(x, self.results(i), truth, 0.0, factor)
            if found[name] > 1 and name in ("dq", "dk") and x.dtype == torch.float32:
                found[name] = excess(x, self.results(i), truth, self._delta_rounding()[name], factor)
        return found
