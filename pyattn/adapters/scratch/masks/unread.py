"""Masks of compiled code, in which no value is known.

Fills with -inf hide keys, and sums are biases. Keys that are filled with numbers are hidden, and have scores apart. The
compiled code finds out by the largest numbers of q and k whether they have weights; if not, they take no part.
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from pyattn.adapters.scratch.masks import blind
from pyattn.adapters.scratch.masks.blind import Blind
from pyattn.adapters.scratch.masks.kinds import Filled, Masks, least_weight
from pyattn.adapters.scratch.recording.chain import Chain, LeftError
from pyattn.adapters.scratch.recording.leading import Shape, refined
from pyattn.adapters.scratch.recording.terms import Fill, Floor, Term


def unread(chain: Chain, q: Tensor, k: Tensor, fine: Shape) -> Masks:
    """The masks and the bias of compiled code; LeftError if they depend on values."""
    _expect_known(chain)
    wide = torch.promote_types(q.dtype, torch.float32)
    found = _Changes.of(chain, fine, wide)
    rows = None if chain.sinks is not None else found.without_keys()
    marked: Blind | None = None
    if rows is not None and found.bias is not None:
        found = _Changes.of(chain, fine, wide, rows)
        hidden = torch.zeros_like(rows) if found.hidden is None else found.hidden
        marked = Blind(rows, hidden, hidden if chain.cleared else None)
    elif rows is not None and not (chain.nan_is_zero or chain.cleared):
        marked = Blind(rows)
    filled: Filled | None = None
    if found.filled is not None and found.scores is not None:
        keys = found.filled & ~_vanish(found, _bound(chain, q, k), least_weight(q.dtype))
        alone = found.bias is None and chain.sinks is None
        scores = found.scores if found.value is None or not alone else found.value
        filled = Filled(keys, scores, bool(chain.cleared))
    bias = found.bias if found.bias is None or not chain.nan_is_zero else _beside_nan(found.bias, k)
    return Masks(found.hidden, bias, marked, filled, chain.nan_is_zero)


def _expect_known(chain: Chain) -> None:
    """Raises LeftError for operators that are a part of attention only where values prove it."""
    floors = [x.value for x in chain.changes if isinstance(x, Floor)]
    fills = [x.value for x in chain.changes if isinstance(x, Fill) and x.value != -math.inf]
    sums = [x for x in chain.changes if isinstance(x, Term)]
    passing = [x for x in chain.changes if isinstance(x, Fill) and x.passes]
    narrow = max(chain.least, torch.finfo(chain.dtype).min) >= torch.finfo(torch.float16).min
    reasons = {
        f"scores of at least {max(floors, default=0)}": floors,
        "a fill of data": passing,
        "a fill of weights": chain.cleared and (chain.final or not _same_masks(chain)),
        "nan_to_num of weights that an overflow may have made NaN": chain.nan_is_zero and narrow,
        "nan_to_num of weights without their maximum": chain.nan_is_zero and chain.final,
        "exponentials that may overflow": chain.range < math.inf,
        f"a fill with {min(fills, default=0)}, which overflows": min(fills, default=0) < chain.least,
        "a sum that a cast may make infinite": any(chain.least > torch.finfo(x.dtype).min for x in sums),
        "a fill beside a sum that is scaled": fills and not all(_is_exact(x.coefficient) for x in sums),
    }
    for reason, found in reasons.items():
        if found:
            raise LeftError(f"{reason}, in compiled code")


def _same_masks(chain: Chain) -> bool:
    """Whether weights are filled where scores were filled."""
    fills = [x for x in chain.changes if isinstance(x, Fill)]
    first, second = (
        {(x.make, id(x.read and x.read.tensor), x.lead, x.order) for x in y} for y in (fills, chain.cleared)
    )
    return first == second


def _is_exact(coefficient: float) -> bool:
    """Whether products with ``coefficient`` are not rounded: the same number in a sum and a fill remains the same."""
    return abs(math.frexp(coefficient)[0]) == 0.5


class _Changes(NamedTuple):
    """Fills and sums together, each (1 or full of *fine, 1 or Sq, 1 or Sk).

    Attributes:
        hidden: keys that are filled.
        bias: the sum for all others.
        filled: keys that are filled with numbers, not with -inf.
        scores: theirs, with the sums after their fills.
        value: the number of all ``scores``, if it is one.
        endless: whether keys are filled with -inf.
    """

    hidden: Tensor | None = None
    bias: Tensor | None = None
    filled: Tensor | None = None
    scores: Tensor | None = None
    value: float | None = None
    endless: bool = False

    @classmethod
    def of(cls, chain: Chain, fine: Shape, dtype: torch.dtype, rows: Tensor | None = None) -> "_Changes":
        """The changes of ``chain``. Weights of the queries ``rows`` are NaN. ``dtype`` holds every number."""
        made = cls()
        for at, x in enumerate(chain.changes):
            if isinstance(x, Fill):
                made = made._after_fill(refined(x.mask, x.lead, fine), x.value, dtype)
            elif isinstance(x, Term):
                summand = refined(x.tensor, x.lead, fine)
                if rows is not None:
                    later = [refined(y.mask, y.lead, fine) for y in chain.changes[at:] if isinstance(y, Fill)]
                    summand = blind.bias_of(summand, rows, functools.reduce(torch.bitwise_or, later, ~rows))
                made = made._after_sum((summand * x.coefficient).to(x.dtype))
        return made

    def _after_fill(self, mask: Tensor, value: float, dtype: torch.dtype) -> "_Changes":
        hidden = mask if self.hidden is None else self.hidden | mask
        if value == -math.inf:
            filled = None if self.filled is None else self.filled & ~mask
            return self._replace(hidden=hidden, filled=filled, endless=True)
        filled = mask if self.filled is None else self.filled | mask
        number = torch.full((1, 1), value, dtype=dtype, device=mask.device)
        if self.scores is None or self.value == value:
            return self._replace(hidden=hidden, filled=filled, scores=number, value=value)
        scores = torch.where(mask, number, self.scores.to(dtype))
        return self._replace(hidden=hidden, filled=filled, scores=scores, value=None)

    def _after_sum(self, summand: Tensor) -> "_Changes":
        bias = summand if self.bias is None else self.bias.to(summand.dtype) + summand
        scores = None if self.scores is None else self.scores.to(summand.dtype) + summand
        return self._replace(bias=bias, scores=scores, value=None)

    def without_keys(self) -> Tensor | None:
        """The queries all of whose scores are -inf, (..., 1 or Sq, 1), unless that is known to be none of them."""
        if self.bias is None and not self.endless:
            return None
        hidden = self.hidden
        if self.bias is not None:
            endless = self.bias.detach() == -math.inf
            hidden = endless if hidden is None else hidden | endless
        assert hidden is not None
        if self.filled is None or self.scores is None:
            return hidden.all(-1, keepdim=True)
        return (hidden & ~(self.filled & (self.scores.detach() != -math.inf))).all(-1, keepdim=True)


def _vanish(found: _Changes, bound: Tensor, limit: float) -> Tensor:
    """The queries whose filled keys have weights of 0 beside another key, as in :mod:`.proofs`, (..., 1 or Sq, 1).

    They are the same where ``found.filled`` is the same.
    """
    assert found.filled is not None
    assert found.scores is not None
    assert found.hidden is not None
    others = torch.zeros_like(found.scores) if found.bias is None else found.bias.detach()
    lowest = torch.where(found.hidden, -math.inf, others).amax(-1, keepdim=True).to(torch.float64)
    highest = torch.where(found.filled, found.scores.detach(), -math.inf).amax(-1, keepdim=True).to(torch.float64)
    remain = ~(highest - lowest + 2 * bound < limit)
    shared = [at for at in range(-remain.dim(), -2) if found.filled.shape[at] == 1 and remain.shape[at] != 1]
    return ~(remain.any(shared, keepdim=True) if shared else remain)


def _beside_nan(bias: Tensor, k: Tensor) -> Tensor:
    """``bias`` that hides no key if a key is NaN or infinite: sums of that and -inf are NaN, like the row's weights."""
    unknown = ~k.detach().isfinite().all()
    return torch.where((bias.detach() == -math.inf) & unknown, torch.finfo(bias.dtype).min, bias)


def _bound(chain: Chain, q: Tensor, k: Tensor) -> Tensor:
    """No product of queries and keys is larger, in size, than this."""
    if chain.capped:
        return torch.full((), chain.factor, dtype=torch.float64, device=q.device)
    largest = [x.detach().abs().amax().to(torch.float64) for x in (q, k)]
    return largest[0] * largest[1] * (chain.scale * q.shape[-1])
