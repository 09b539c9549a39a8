"""Operators on whole rows: the maximum of scores, a column of sinks beside them, softmax, what it is written by, and
what follows it.

``softmax(cat([scores, sinks], -1) - maximum)[..., :-1]`` is the softmax of the scores times sigmoid(lse - sinks). The
maximum changes no weight, so it is not computed.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from pyattn.adapters.scratch.recording.chain import EXPONENTIALS, LOGARITHMS, Chain, LeftError
from pyattn.adapters.scratch.recording.expressions import Expression, Noise
from pyattn.adapters.scratch.recording.leading import exchanged
from pyattn.adapters.scratch.recording.terms import Gate, Read, turned

aten: Any = torch.ops.aten
MAXIMA = {aten.max.dim, aten.amax.default}


class RowMaximum(Expression):
    """The largest of each row of ``scores``, (*lead, Sq, 1)."""

    __slots__ = ("scores",)

    def __init__(self, operator: Any, scores: Expression) -> None:
        super().__init__(operator, (scores,))
        self.scores: Expression = scores


class RowSum(Expression):
    """The sum of each row of ``exponentials``, (*lead, Sq, 1): ``least`` or more, or NaN."""

    __slots__ = ("exponentials", "least")

    def __init__(self, operator: Any, args: tuple[Any, ...], exponentials: Expression, least: float) -> None:
        super().__init__(operator, args)
        self.exponentials: Expression = exponentials
        self.least: float = least

    def same(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> "RowSum | None":
        """The result of ``func``, if it changes no sum of ``dtype``: it adds less than rounding, or is a lower bound.

        1 plus less than half of eps is rounded to 1, and larger numbers are rounded more coarsely.
        """
        number = args[1] if len(args) == 2 else kwargs.get("min") if len(args) == 1 else None
        below = torch.finfo(dtype).eps / 2 if func is aten.add.Tensor else 1.0
        named = kwargs.keys() - {"min"}
        if named or self.least < 1 or type(number) is not float or not 0 <= number < below:
            return None
        return RowSum(partial(func, **kwargs), (self, *args[1:]), self.exponentials, self.least)

    def is_of(self, numbers: Expression) -> bool:
        """Whether ``numbers`` are the exponentials, or the same function of the same scores."""
        first, second = self.exponentials, numbers
        again = first.operator is second.operator is aten.exp.default and not (first.kwargs or second.kwargs)
        return first is second or (again and len(first.args) == 1 and first.args[0] is second.args[0])


def sums(chain: Chain, numbers: Expression, dim: int, args: tuple[Any, ...]) -> RowSum:
    """The result of a sum over dimension ``dim``, the last one, that stays."""
    given, keeps = args[1] if len(args) > 1 else None, len(args) > 2 and bool(args[2])
    if chain.halfway != EXPONENTIALS or not keeps or list(given or ()) not in ([-1], [dim]):
        raise LeftError("sum")
    holds_a_maximum = chain.range == math.inf  # whose exponential is 1
    return RowSum(partial(_sum, dim), (numbers,), numbers, 1.0 if holds_a_maximum else 0.0)


def _sum(dim: int, numbers: Tensor) -> Tensor:
    found: Tensor = aten.sum.dim_IntList(numbers, [dim], True)
    return found


def maxima(func: Any, scores: Expression, dim: int, args: tuple[Any, ...]) -> tuple[Expression, ...]:
    """The results of a maximum over dimension ``dim``, the last one, that stays: values, of ``max`` the places too."""
    given, keeps = args[1] if len(args) > 1 else (), len(args) > 2 and bool(args[2])
    dims = [given] if isinstance(given, int) else list(given)
    if not keeps or dims not in ([-1], [dim]):
        raise LeftError("a maximum that is not one of rows")
    if func is aten.amax.default:
        return (RowMaximum(partial(_maximum, dim), scores),)
    return RowMaximum(partial(_maximum, dim), scores), Expression(partial(_place, dim), (scores,))


def _maximum(dim: int, scores: Tensor) -> Tensor:
    found: Tensor = aten.amax.default(scores, [dim], True)
    return found


def _place(dim: int, scores: Tensor) -> Tensor:
    place: Tensor = aten.max.dim(scores, dim, True)[1]
    return place


def column_of_sinks(tensors: list[Any], scores: Tensor, chain: Chain, dim: int) -> Tensor:
    """The other tensor of a ``cat`` along ``dim``, if it is one more column of ``scores``."""
    other = tensors[1] if len(tensors) == 2 else None
    if tensors[0] is not scores or type(other) is not type(chain.q.tensor) or dim not in (-1, scores.dim() - 1):
        raise LeftError("a cat of scores")
    if other.shape != (*scores.shape[:-1], 1) or other.dtype != scores.dtype or other.layout is not torch.strided:
        raise LeftError("a cat of scores with more than a column of their dtype")
    assert isinstance(other, Tensor)
    return other


def joined(dim: int, scores: Tensor, sinks: Tensor) -> Tensor:
    """Scores and sinks in one tensor."""
    found: Tensor = aten.cat.default([scores, sinks], dim)
    return found


def drops_sinks(chain: Chain, x: Tensor, args: tuple[Any, ...]) -> bool:
    """Whether a slice (x, dim, start, end, step) of joined weights leaves the last column out."""
    names = ("dim", "start", "end", "step")
    given: dict[str, Any] = {"dim": 0, "start": 0, "step": 1} | dict(zip(names, args[1:], strict=False))
    last = given["dim"] in (-1, x.dim() - 1) and given["start"] in (0, None)
    within = last and given.get("end") in (-1, chain.sizes[1]) and given["step"] == 1
    return chain.weights and chain.joined and within


def softmax(chain: Chain, dim: int) -> Chain:
    """Weights: the softmax over keys."""
    chain.expect_scores("softmax")
    chain.expect_whole("softmax")
    return _with_keys_at(chain, dim)._replace(weights=True)


def _with_keys_at(chain: Chain, dim: int) -> Chain:
    """Scores whose keys are in dimension ``dim``: where the queries seemed to be, both exchange their roles."""
    dims = len(chain.leads[-1]) + 2
    if not -dims <= dim < dims:
        raise LeftError(f"softmax over dimension {dim} of {dims}")
    found = dim % dims if chain.order is None else chain.order[dim]
    if found == dims - 1:
        return chain
    if found < dims - 2 or chain.final:
        raise LeftError(f"softmax over dimension {dim} of {dims}")
    return chain._replace(
        q=chain.k,
        k=chain.q,
        sizes=chain.sizes[::-1],
        changes=tuple(turned(x) for x in chain.changes),
        order=exchanged(chain.order, dims),
        swapped=not chain.swapped,
    )


def log_softmax(chain: Chain, dim: int) -> Chain:
    """The logarithms of weights."""
    return softmax(chain, dim)._replace(weights=False, halfway=LOGARITHMS)


def exponential(chain: Chain, dtype: torch.dtype) -> Chain:
    """exp of scores, in ``dtype``, or of the logarithms of weights."""
    if chain.halfway == LOGARITHMS:
        return chain._replace(halfway="", weights=True)
    chain.expect_scores("softmax")
    chain.expect_order("exponentials")
    if chain.sinks is not None:
        raise LeftError("exponentials of sinks")
    found = torch.finfo(dtype)
    exponents = min(math.log(found.max), -math.log(found.tiny)) - 1
    within = math.inf if chain.shifted else exponents
    within = within / 2 if chain.final else within  # less a maximum that is hidden by now
    return chain._replace(halfway=EXPONENTIALS, range=within, exponents=exponents)


def over_sums(chain: Chain) -> Chain:
    """Exponentials divided by the sum of their row."""
    return chain._replace(halfway="", weights=True)


def less_maximum(chain: Chain) -> Chain:
    """Scores less the largest of each row."""
    if chain.weights or chain.halfway:
        raise LeftError(f"a difference of {chain.halfway or 'weights'}")
    return chain._replace(final=True, shifted=True)


def dropped(chain: Chain, noise: Noise) -> Chain:
    """Weights after dropout."""
    if chain.joined:
        raise LeftError("dropout of sinks")
    if not chain.weights or chain.dropout is not None:
        raise LeftError("dropout of scores" if not chain.weights else "dropout of dropped weights")
    return chain._replace(dropout=noise)


def without_nan(chain: Chain, replacement: float) -> Chain:
    """Weights with a number for NaN. They are in [0, 1], or [0, 1 / (1 - p)] after dropout, so never infinite."""
    if not chain.weights or chain.is_gated or chain.sinks is not None or replacement != 0:
        raise LeftError(f"nan_to_num of scores, of gated weights, beside sinks or to {replacement}")
    return chain._replace(nan_is_zero=True)


def gated(chain: Chain, factor: Tensor | float, *, divides: bool) -> Chain:
    """Weights times a number, or a tensor that is the same for all keys: a mask or a gate of heads or of queries."""
    name = "divided by" if divides else "times"
    if not isinstance(factor, Tensor):
        gain, numbers = chain.gain / factor if divides else chain.gain * factor, torch.finfo(chain.now)
        if not math.isfinite(factor) or not (0 in (factor, chain.gain) or numbers.tiny <= abs(gain) <= numbers.max):
            raise LeftError(f"weights {name} {factor}")
        return chain._replace(gain=gain)
    gate = Gate(Read.of(_first_key(factor, chain)), divides, chain.leads[-1], chain.order)
    if gate.tensor.dim() and gate.tensor.shape[-1] != 1:
        raise LeftError(f"weights {name} a tensor")
    if _is_known(factor) and not bool((1 / gate.tensor if divides else gate.tensor).isfinite().all()):
        raise LeftError(f"weights {name} a tensor that makes some infinite or NaN")
    return chain._replace(gates=(*chain.gates, gate))


def _first_key(factor: Tensor, chain: Chain) -> Tensor:
    """The numbers of ``factor`` for one key, where its values show that they are those of all."""
    known = chain.order is None and _is_known(factor) and factor.dim() > 0
    first = factor[..., :1] if known else factor
    return first if known and bool((factor == first).all()) else factor


def _is_known(factor: Tensor) -> bool:
    """Whether the values of ``factor`` can be read, and are not learned."""
    return not (factor.requires_grad or isinstance(factor, FakeTensor))
