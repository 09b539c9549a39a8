"""Changes that the recorded operators make to scores, read from the values of their masks and biases."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pyattn.adapters.scratch.recording.chain import Chain
from pyattn.adapters.scratch.recording.leading import Shape, refined
from pyattn.adapters.scratch.recording.terms import Fill, Floor


class Change(NamedTuple):
    """A sum with ``coefficient * tensor`` in [low, high], a fill with ``low`` where ``tensor``, or a floor ``low``."""

    tensor: Tensor | None
    coefficient: float | None
    low: float
    high: float

    @property
    def is_mask(self) -> bool:
        """Whether it leaves a score as it is, or makes it as low as a hidden key's may be."""
        if self.coefficient is None or self.tensor is None:
            return True
        if self.tensor.requires_grad or self.high not in (0, self.low) or self.low == 0:
            return False
        return bool(((self.tensor == 0) | (self.tensor * self.coefficient == self.low)).all())

    @property
    def hidden(self) -> Tensor | None:
        """The keys that a mask hides, bool."""
        return self.tensor if self.coefficient is None or self.tensor is None else self.tensor != 0

    @property
    def size(self) -> float:
        """The largest finite number that it adds to a score or replaces one by, in size."""
        if self.coefficient is None or self.tensor is None:
            return abs(self.low) if math.isfinite(self.low) else 0.0
        if math.isfinite(self.low) and math.isfinite(self.high):
            return max(abs(self.low), abs(self.high))
        x = self.tensor.detach()
        return abs(self.coefficient) * float(torch.where(x.isinf(), 0.0, x).abs().max())

    @property
    def summand(self) -> Tensor:
        """The tensor that a sum adds to the scores."""
        assert self.tensor is not None
        assert self.coefficient is not None
        return self.tensor if self.coefficient == 1 else self.tensor * self.coefficient

    def applied(self, total: Tensor) -> Tensor:
        """The change of scores that vanish beside its fill or floor."""
        low = torch.tensor(self.low, dtype=total.dtype, device=total.device)  # -inf where a number would overflow
        if self.tensor is None:
            return torch.maximum(total, low)
        if self.coefficient is None:
            return torch.where(self.tensor, low, total)
        return total + self.summand


def changes_of(chain: Chain, fine: Shape) -> list[Change]:
    """The changes of ``chain``, in order, each (1 or full of *fine, 1 or Sq, 1 or Sk)."""
    found = []
    for x in chain.changes:
        if isinstance(x, Floor):
            found.append(Change(None, None, x.value, x.value))
        elif isinstance(x, Fill):
            found.append(Change(refined(x.mask, x.lead, fine), None, x.value, x.value))
        else:
            least, largest = (float(y) * x.coefficient for y in torch.aminmax(x.read.tensor.detach()))
            added = refined(x.tensor, x.lead, fine)
            found.append(Change(added, x.coefficient, min(least, largest), max(least, largest)))
    return found
