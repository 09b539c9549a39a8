"""Proofs that a fill or a sum hides keys: which weights are exactly 0 in the code as it is written.

A score that is replaced by, or has added, ``value`` gives weight exp(value - row maximum) = 0 if value + 2 bound < -104
(float64: -746), ``bound`` being the largest size of any other score, and some key of its row is not so.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pyattn.adapters.scratch.recording.chain import Chain, Fill, LeftError
from pyattn.adapters.scratch.recording.leading import Shape, refined

_ZERO_WEIGHT = {torch.float64: -746.0}
"""exp(x) is 0 below this; -104 for float32, in which 16-bit softmaxes are computed, too."""


class Masks(NamedTuple):
    """Hidden keys (True = hidden) and biases, each (1 or full of *fine, 1 or Sq, Sk)."""

    hidden: Tensor | None
    biases: tuple[Tensor, ...]


class _Change(NamedTuple):
    """A fill with ``low`` where ``tensor`` (bool) is True, or a sum with ``coefficient * tensor`` in [low, high]."""

    tensor: Tensor
    coefficient: float | None
    low: float
    high: float

    @property
    def is_mask(self) -> bool:
        """Whether it leaves a score as it is, or makes it as low as a hidden key's may be."""
        if self.coefficient is None:
            return True
        if self.tensor.requires_grad or self.high != 0 or self.low == 0:
            return False
        return bool(((self.tensor == 0) | (self.tensor * self.coefficient == self.low)).all())

    @property
    def where(self) -> Tensor:
        """The keys that a mask hides, bool."""
        return self.tensor if self.coefficient is None else self.tensor != 0

    @property
    def size(self) -> float:
        """The largest finite number that it adds to a score, in size."""
        if self.coefficient is None:
            return 0.0
        if math.isfinite(self.low) and math.isfinite(self.high):
            return max(abs(self.low), abs(self.high))
        x = self.tensor.detach()
        return abs(self.coefficient) * float(torch.where(x.isinf(), 0.0, x).abs().max())


def _changes(chain: Chain, fine: Shape) -> list[_Change]:
    found = []
    for x in chain.changes:
        if isinstance(x, Fill):
            found.append(_Change(refined(x.mask(), x.lead, fine), None, x.value, x.value))
        else:
            least, largest = (float(y) * x.coefficient for y in torch.aminmax(x.read.tensor.detach()))
            added = refined(x.read.tensor, x.lead, fine)
            found.append(_Change(added, x.coefficient, min(least, largest), max(least, largest)))
    return found


def _bound(chain: Chain, q: Tensor, k: Tensor) -> float:
    """No product of queries and keys is larger, in size, than this."""
    if chain.capped:
        return chain.factor
    sizes = [max(abs(float(y)) for y in torch.aminmax(x.detach())) for x in (q, k)]
    return chain.scale * q.shape[-1] * math.prod(sizes)


def _proved(changes: list[_Change], bound: float, limit: float) -> list[_Change]:
    """The masks whose keys have weight 0: the others count as sums, which may lower all other scores of a row."""
    found = [x for x in changes if x.is_mask]
    while True:
        sums = bound + sum(x.size for x in changes if not any(x is y for y in found))
        kept = [x for x in found if x.low == -math.inf or x.low + 2 * sums < limit]
        if len(kept) == len(found):
            return found
        found = kept


def masks(chain: Chain, q: Tensor, k: Tensor, fine: Shape) -> Masks:
    """The masks and biases that give the weights of the code as it is written; LeftError if there are none."""
    if not chain.changes:
        return Masks(None, ())
    changes = _changes(chain, fine)
    finite = any(-math.inf < x.low < 0 and x.is_mask for x in changes)
    proved = _proved(changes, _bound(chain, q, k) if finite else 0.0, _ZERO_WEIGHT.get(q.dtype, -104.0))
    hidden: Tensor | None = None
    for x in reversed(changes):
        if any(x is y for y in proved):
            hidden = x.where if hidden is None else hidden | x.where
        elif x.coefficient is None and bool((x.where if hidden is None else x.where & ~hidden).any()):
            raise LeftError(f"a fill with {x.low}, which may not hide a key")
    biases = [x for x in changes if x.coefficient is not None and not any(x is y for y in proved)]
    endless = [x.tensor * x.coefficient == -math.inf for x in biases if x.low == -math.inf]
    nothing_seen = hidden
    for x in endless:
        nothing_seen = x if nothing_seen is None else nothing_seen | x
    if nothing_seen is not None and bool(nothing_seen.all(-1).any()):
        if endless or len(proved) > 1 or any(x.coefficient is None or x.low == -math.inf for x in proved):
            raise LeftError("a query that sees no key")
        biases, hidden = changes, None  # their large numbers are equal in a row: it averages all its values
    if any(-math.inf < x.low < chain.least for x in biases):
        raise LeftError("biases beyond the dtype that scores are cast to")
    return Masks(hidden, tuple(x.tensor if x.coefficient == 1 else x.tensor * x.coefficient for x in biases))
