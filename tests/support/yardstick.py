"""The rule that judges accuracy: at most twice the error that plain PyTorch makes in the same dtype.

Plain PyTorch's error depends on the order in which its BLAS happens to sum, so on
the machine. The yardstick is therefore its largest error over orders that are equal
in exact arithmetic: queries, keys and the columns of the head dimensions permuted.

One additional error is allowed, which plain PyTorch has in no order. A kernel of linear memory subtracts ``delta =
rowsum(dO * O)`` where softmax's own gradient subtracts ``rowsum(P * dP)``; O is computed from forward's weights, P is
backward's, and O is rounded to the dtype: see :meth:`Rounding.delta`. Gradients that several ranks have in shares err
by :func:`rounded_shares` too.
"""

import functools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from pyattn import reference
from pyattn.reference import formula

ORDERS = 16
"""The given order, and 15 random ones. They run only until one allows the error; the first nearly always does."""

WEIGHT_ROUNDINGS = 4
"""By how many eps a weight of forward and of backward may differ: exp2 errs by up to 2.1 ulp in each."""

NAMES = ("out", "lse", "dq", "dk", "dv")

LEARNED = {"bias": "dbias", "alibi_slopes": "dslopes", "sinks": "dsinks", "relative_bias": "drelative"}
"""Options with gradients; these come after those of NAMES."""

Results = tuple[Tensor, ...]
Run = Callable[..., Results]
"""``run(attention, qkv, dout, dlse, **options)``: out, lse, dq, dk, dv, and the gradients of its LEARNED options."""


def learned(options: dict[str, Any]) -> list[str]:
    """The options that have gradients."""
    return [name for name in LEARNED if name in options]


def in_double(options: dict[str, Any]) -> dict[str, Any]:
    """The same options, with differentiable ones in float64."""
    return options | {name: options[name].double() for name in learned(options)}


def _largest(x: Tensor) -> float:
    """The largest absolute value, or NaN. torch.aminmax takes a fifth of the time of ``abs().max()``."""
    return max(abs(end.item()) for end in x.aminmax()) if x.numel() else 0.0


def error(x: Tensor, exact: Tensor) -> float:
    """The largest absolute difference. Where the exact value is infinite, x must be too."""
    wide = x.double()
    largest = _largest(wide - exact)
    if math.isfinite(largest):
        return largest
    finite = exact.isfinite()
    assert torch.equal(wide[~finite], exact[~finite])
    return _largest((wide - exact)[finite])


def bound(dtype: torch.dtype, plain: Tensor, exact: Tensor) -> float:
    """Twice the error of the plain result, plus four roundings of the largest value.

    ``plain`` is the reference's result in ``dtype``, ``exact`` its result in
    float64. For float64 itself, 1e-12 of the largest value.
    """
    largest = _largest(exact)
    if not math.isfinite(largest):
        largest = _largest(exact[exact.isfinite()])
    if dtype == torch.float64:
        return 1e-12 * largest
    return 2 * error(plain, exact) + 4 * torch.finfo(dtype).eps * largest


def excess(x: Tensor, bounds: Iterable[float], exact: Tensor, more: float = 0.0, factor: float = 1.0) -> float:
    """The error of x over the largest of its bounds, 1 at the bound. None is drawn after the first that allows it.

    ``more`` is an additional allowance. Errors below 1e-14 of ``factor``, by which the result was scaled, count as
    none: the exact result has that much of float64's own rounding noise. So do errors below float32's normal range.
    """
    assert x.shape == exact.shape
    wrong, smallest = error(x, exact), float("inf")
    noise = max(1e-14 * factor, torch.finfo(torch.float32).tiny)
    for each in bounds:
        allowed = max(each + more, noise)
        if math.isfinite(allowed):  # a plain result that overflows allows nothing
            smallest = min(smallest, wrong / allowed)  # NaN, from a NaN among finite values, is never smaller
        if smallest <= 1:
            break
    return smallest


def assert_accurate(name: str, x: Tensor, plain: Tensor, exact: Tensor) -> None:
    """Asserts that x is within the bound that ``plain``, the reference's result, gives it."""
    assert excess(x, [bound(x.dtype, plain, exact)], exact) <= 1, name


def rounded_shares(shares: Tensor) -> float:
    """The error of a sum over ranks because each of them rounds its share, given the sum of their absolute values.

    A rank's gradient of a tensor that all ranks have is its share of the whole one, in the tensor's dtype, off by up to
    half an eps of itself. Shares that cancel are larger than their sum, to which :func:`bound` is relative.
    """
    return torch.finfo(shares.dtype).eps / 2 * _largest(shares)


def _scale(q: Tensor, options: dict[str, Any]) -> float:
    """The absolute value of softmax_scale."""
    scale = options.get("softmax_scale")
    return abs(reference.default_scale(q.shape[3]) if scale is None else scale)


class Rounding:
    """The effect of rounding alone on the gradients, derived in float64 from their sums.

    P are the weights before dropout, with D the weights after it, dP = dO V^T,
    dS the gradient of the score, p the sink's weight.
    """

    def __init__(self, qkv: Results, dout: Tensor, dlse: Tensor | None, options: dict[str, Any]) -> None:
        self._q, self._k, v = (t.double() for t in qkv)
        self._options = exact = in_double(options)
        self._scale, self._group = _scale(self._q, options), self._q.shape[1] // self._k.shape[1]
        bias, shape = exact.get("bias"), (*self._q.shape[:3], self._k.shape[2])
        scores = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
        known = exact | {"bias": scores if bias is None else scores + bias, "return_lse": True, "return_weights": True}
        out, lse, dropped = reference.attention(self._q, self._k, v, **known)
        results, gradients = [out], [dout.double()]
        if dlse is not None:
            results, gradients = [out, lse], [*gradients, dlse.double()]
        (self._ds,) = torch.autograd.grad(results, [scores], gradients)
        self._weights = reference.attention(self._q, self._k, v, **known | {"dropout_p": 0.0})[2].detach()
        self._sink = (exact["sinks"][:, None] - lse).exp().detach() if "sinks" in exact else None
        dp = dout.double() @ v.repeat_interleave(self._group, 1).mT
        self._terms = (dropped.detach() * dp).abs().sum(-1)
        self._out = (dout.double() * out.detach()).abs().sum(-1)
        self._dlse = torch.zeros_like(self._terms) if dlse is None else dlse.double().abs()
        dtype = qkv[0].dtype
        self._eps, self._eps_row = (torch.finfo(t).eps for t in (dtype, torch.promote_types(dtype, torch.float32)))

    def _sums(self, scores: Tensor, sink: Tensor) -> dict[str, Tensor]:
        """Gradients of LEARNED from absolute values of their terms: those of each score, and of each row's sink."""
        sums, offset = {}, self._options.get("q_offset")
        if "bias" in self._options:
            sums["dbias"] = scores.sum_to_size(self._options["bias"].shape)
        if "alibi_slopes" in self._options:
            far = reference.distances(*scores.shape[2:], q_offset=offset, device=scores.device).abs()
            sums["dslopes"] = (scores * far).sum((2, 3)).sum_to_size(self._options["alibi_slopes"].shape)
        if "relative_bias" in self._options:
            relative = self._options["relative_bias"]
            ahead = reference.distances(*scores.shape[2:], q_offset=offset, device=scores.device)
            reach = relative.shape[-1] // 2
            places = (ahead.clamp(-reach, reach).long() + reach).expand(scores.shape).flatten(2)
            terms = scores.new_zeros(*scores.shape[:2], relative.shape[-1])
            sums["drelative"] = terms.scatter_add(-1, places, scores.flatten(2)).sum_to_size(relative.shape)
        if "sinks" in self._options:
            sums["dsinks"] = (self._sink * sink).sum((0, 2))
        return sums

    def delta(self) -> dict[str, float]:
        """The error due to delta alone, if forward's weights differ from backward's by WEIGHT_ROUNDINGS.

        Then row i's delta is off by up to ``d_i = eps_row WEIGHT_ROUNDINGS sum_j |P_ij D_ij dP_ij| + eps / 2
        |dO_i| |O_i|``, columns multiplied one by one: weights are held in lse's dtype, and O is rounded to its own. The
        gradients are off by ``softmax_scale d_i |sum_j P_ij t_ij k_j|`` and ``softmax_scale sum_i P_ij t_ij d_i
        |q_i|``, t being softcap's derivative; those of LEARNED by their sums over ``P_ij d_i`` and ``p_i d_i``.
        """
        off = (self._eps_row * WEIGHT_ROUNDINGS * self._terms + self._eps / 2 * self._out)[..., None]
        weights, k = self._weights, self._k.repeat_interleave(self._group, 1)
        if softcap := self._options.get("softcap"):
            weights = weights * (1 - torch.tanh(self._q @ k.mT * self._scale / softcap) ** 2)
        dq = self._scale * off * (weights @ k).abs()
        dk = self._scale * (weights.mT @ (off * self._q.abs())).unflatten(1, (-1, self._group)).sum(2)
        sums = {"dq": dq, "dk": dk} | self._sums(self._weights * off, off[..., 0])
        return {name: x.max().item() for name, x in sums.items()}

    def magnitudes(self) -> dict[str, float]:
        """The largest sum of absolute terms: if they cancel, float64's own rounding noise is as large."""
        sums = self._sums(self._ds.abs(), self._terms + self._dlse)
        return {name: x.max().item() for name, x in sums.items()}


def _permuted(x: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """x with its last two dimensions permuted, except those that it lacks or that broadcast."""
    if x.dim() >= 1 and x.shape[-1] > 1:
        x = x[..., keys]
    return x[..., queries, :] if x.dim() >= 2 and x.shape[-2] > 1 else x


def _reordered(
    run: Run, qkv: Results, dout: Tensor, dlse: Tensor | None, options: dict[str, Any], seed: int
) -> Results:
    """The reference's results for permuted inputs, restored to the original order.

    The formula's position-dependent parts, the mask, ALiBi's distances and dropout's draws, are permuted too.
    """
    q, k, v = qkv
    sizes = (q.shape[2], k.shape[2], q.shape[3], v.shape[3])
    generator = random.Random(seed)
    queries, keys, columns, columns_v = (
        torch.tensor(generator.sample(range(n), n), dtype=torch.int64, device=q.device) for n in sizes
    )

    def at_their_places(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *arguments, **named: function(*arguments, **named)[..., queries, :][..., keys]

    places = {name: at_their_places(getattr(formula, name)) for name in ("visible", "distances", "dropout_mask")}
    inputs = (q[:, :, queries][..., columns], k[:, :, keys][..., columns], v[:, :, keys][..., columns_v])
    options = options | {name: _permuted(options[name], queries, keys) for name in ("mask", "bias") if name in options}
    with mock.patch.multiple(formula, **places):
        results = run(
            reference.attention,
            inputs,
            dout[:, :, queries][..., columns_v],
            None if dlse is None else dlse[:, :, queries],
            **options,
        )
    out, lse, dq, dk, dv, *more = results
    if "bias" in learned(options):
        more[0] = _permuted(more[0], queries.argsort(), keys.argsort())
    rows, these = queries.argsort(), keys.argsort()
    dq, dk = (x[:, :, order][..., columns.argsort()] for x, order in ((dq, rows), (dk, these)))
    out, dv = (x[:, :, order][..., columns_v.argsort()] for x, order in ((out, rows), (dv, these)))
    return out, lse[:, :, rows], dq, dk, dv, *more


class Yardsticks:
    """The bounds by the reference's results in the dtype of ``qkv``, in as many orders as requested, each run once."""

    def __init__(
        self, exact: Results, run: Run, qkv: Results, dout: Tensor, dlse: Tensor | None = None, **options: Any
    ) -> None:
        self._exact = exact
        self._names = (*NAMES, *(LEARNED[name] for name in learned(options)))
        self._rounding = functools.cache(lambda: Rounding(qkv, dout, dlse, options))
        self._factors = dict.fromkeys(("dq", "dk"), min(1.0, _scale(qkv[0], options)))
        self._run = lambda seed: _reordered(run, qkv, dout, dlse, options, seed)
        self._orders = [self._bounds(run(reference.attention, qkv, dout, dlse, **options))]

    def _bounds(self, plain: Results) -> list[float]:
        return [bound(x.dtype, x, exact) for x, exact in zip(plain, self._exact, strict=False)]

    def bounds(self, index: int) -> Iterator[float]:
        """The bounds of result ``index`` of out, lse, dq, dk, dv and so on, order by order."""
        for order in range(ORDERS):
            if order == len(self._orders):
                self._orders.append(self._bounds(self._run(order)))
            yield self._orders[order][index]

    def excesses(self, ours: Results, shares: Mapping[str, Tensor] | None = None) -> dict[str, float]:
        """:func:`excess` of each result, by name; infinite if a result has a NaN that the exact one does not.

        ``shares``: the sums of the absolute values of those gradients of LEARNED that are sums over ranks, by option.
        """
        rounded = {LEARNED[option]: rounded_shares(sums) for option, sums in (shares or {}).items()}
        assert len(ours) == len(self._exact)
        found = {}
        for i, (name, x, exact) in enumerate(zip(self._names, ours, self._exact, strict=False)):
            factor, more = self._factors.get(name, 1.0), rounded.get(name, 0.0)
            found[name] = excess(x, self.bounds(i), exact, more, factor)
            if found[name] > 1 and i >= len(NAMES):
                factor = max(factor, self._rounding().magnitudes()[name])
                found[name] = excess(x, self.bounds(i), exact, more, factor)
            if found[name] > 1 and name not in ("out", "lse", "dv"):
                found[name] = excess(x, self.bounds(i), exact, more + self._rounding().delta()[name], factor)
        return found
