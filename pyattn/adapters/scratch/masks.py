"""Proofs that a fill or a sum hides keys: which weights are exactly 0 in the code as it is written.

A score that is replaced by, or has added, ``value`` gives weight exp(value - row maximum) = 0 if value + 2 bound < -104
(float64: -746), ``bound`` being the largest size of any other score, and some key of its row is not so.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pyattn.adapters.scratch.recording.chain import Chain, Fill, LeftError, Term
from pyattn.adapters.scratch.recording.leading import Shape, refined

_ZERO_WEIGHT = {torch.float64: -746.0}
"""exp(x) is 0 below this; -104 for float32, in which 16-bit softmaxes are computed, too."""


class Masks(NamedTuple):
    """Hidden keys (True = hidden) and biases, each (1 or full of *fine, 1 or Sq, Sk).

    ``blind`` are the queries whose results are NaN, since no key is visible, if that is not known to be none of them.
    """

    hidden: Tensor | None
    biases: tuple[Tensor, ...]
    blind: Tensor | None = None


class _Terms(NamedTuple):
    """The changes of the scores: fills with their values; sums with coefficient, least and largest entry."""

    fills: list[tuple[Tensor, float]]
    sums: list[tuple[Tensor, float, float, float]]


def _terms(chain: Chain, fine: Shape) -> _Terms:
    fills: list[tuple[Tensor, float]] = []
    sums: list[tuple[Tensor, float, float, float]] = []
    for x in chain.changes:
        if isinstance(x, Fill):
            fills.append((refined(x.mask, x.lead, fine), x.value))
        else:
            least, largest = (float(y) * x.coefficient for y in torch.aminmax(x.read.tensor.detach()))
            added = refined(x.read.tensor, x.lead, fine)
            sums.append((added, x.coefficient, min(least, largest), max(least, largest)))
    return _Terms(fills, sums)


def _bound(chain: Chain, q: Tensor, k: Tensor) -> float:
    """No product of queries and keys is larger, in size, than this."""
    if chain.capped:
        return chain.factor
    sizes = [max(abs(float(y)) for y in torch.aminmax(x.detach())) for x in (q, k)]
    return chain.scale * q.shape[-1] * math.prod(sizes)


def unread(chain: Chain, q: Tensor, k: Tensor, fine: Shape) -> Masks:
    """The masks and biases of compiled code, which can't depend on their values: every fill must be with -inf."""
    fills = [x for x in chain.changes if isinstance(x, Fill)]
    if any(x.value > -math.inf for x in fills):
        raise LeftError("a fill with a finite number, in compiled code")
    hiding = [refined(x.mask, x.lead, fine) for x in fills]
    biases = [refined(x.read.tensor, x.lead, fine) * x.coefficient for x in chain.changes if isinstance(x, Term)]
    none_seen = _any_of([*hiding, *(x.detach() == -math.inf for x in biases)])
    blind = None if none_seen is None else none_seen.all(-1, keepdim=True)
    return Masks(_any_of(hiding), tuple(biases), blind)


def proved(chain: Chain, q: Tensor, k: Tensor, fine: Shape) -> Masks:
    """The masks and biases that give the weights of the code as it is written; LeftError if there are none."""
    if not chain.changes:
        return Masks(None, ())
    fills, sums = _terms(chain, fine)
    dtype = q.dtype
    limit = _ZERO_WEIGHT.get(dtype, -104.0)
    candidates = [(x, c, low, high) for x, c, low, high in sums if not x.requires_grad and low < limit and high == 0]
    candidates = [each for each in candidates if _two_valued(*each)]
    biases = [x for x in sums if not any(x is y for y in candidates)]
    finite = [v for _, v in fills if v > -math.inf] + [low for _, _, low, _ in candidates if low > -math.inf]
    if finite:
        others = sum(max(abs(y) for y in (low, high) if abs(y) < math.inf) for _, _, low, high in biases)
        bound = _bound(chain, q, k) + others
        hides = [c for c in candidates if c[2] + 2 * bound < limit]
    else:
        bound, hides = 0.0, candidates
    biases = [x for x in sums if not any(x is y for y in hides)]
    replaced = [(m, v) for m, v in fills if v + 2 * bound < limit]
    hiding = [m for m, _ in replaced] + [x != 0 for x, *_ in hides]
    hidden = _any_of(hiding)
    for m, v in fills:
        if not v + 2 * bound < limit and bool((m if hidden is None else m & ~hidden).any()):
            raise LeftError(f"a fill with {v}, which may not hide a key")
    endless = [x * c == -math.inf for x, c, low, _ in biases if low == -math.inf]
    nothing_seen = _any_of([*hiding, *endless])
    if nothing_seen is not None and bool(nothing_seen.all(-1).any()):
        if replaced or endless or len(hides) > 1 or any(low == -math.inf for _, _, low, _ in hides):
            raise LeftError("a query that sees no key")
        biases, hidden = sums, None  # their large numbers are equal in a row: it averages all its values
    return Masks(hidden, tuple(x if c == 1 else x * c for x, c, _, _ in biases))


def _two_valued(x: Tensor, coefficient: float, low: float, high: float) -> bool:
    """Whether a sum adds 0 or one number."""
    return bool(((x == 0) | (x * coefficient == low)).all())


def _any_of(conditions: list[Tensor]) -> Tensor | None:
    made: Tensor | None = None
    for condition in conditions:
        made = condition if made is None else made | condition
    return made
