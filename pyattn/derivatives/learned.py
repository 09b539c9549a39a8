"""The differences between dense and packed attention that derivatives need, and the tensors they are taken in."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from pyattn.options.schema import DEFAULTS, LEARNED

VALUES = tuple(DEFAULTS.values())


class Learned(NamedTuple):
    """A tangent or gradient for each tensor that attention is differentiable in; None where there is none."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    relative_bias: Tensor | None = None


@dataclass(frozen=True)
class Kind:
    """Dense or packed attention.

    Attributes:
        forward, backward: the native operators.
        tangents: ``tangents(q, k, v, rest, direction, other=None)``.
        gradient_tangents: ``gradient_tangents(dout, dlse, q, k, v, rest, direction)``.
        before: how many arguments of ``rest``, which follow v, precede LEARNED.
        count: how many arguments ``rest`` has, defaults included.
    """

    forward: Callable[..., tuple[Tensor, ...]]
    backward: Callable[..., tuple[Tensor | None, ...]]
    tangents: Callable[..., tuple[Tensor, Tensor]]
    gradient_tangents: Callable[..., tuple[Any, ...]]
    before: int
    count: int

    def learned(self, rows: Sequence[Any], rest: Sequence[Any]) -> Learned:
        """The entries of differentiable tensors, given those of q, k and v and of all arguments of ``rest``."""
        return Learned(*rows, *rest[self.before : self.before + len(LEARNED)])

    def spread(self, learned: Sequence[Tensor | None], count: int) -> tuple[Tensor | None, ...]:
        """Gradients of the first ``count`` arguments of ``rest``."""
        gradients = *(None,) * self.before, *learned[3:], *(None,) * count
        return gradients[:count]

    def complete(self, rest: Sequence[Any]) -> tuple[Any, ...]:
        """``rest`` with the defaults that were left out at its end."""
        missing = self.count - len(rest)
        return *rest, *VALUES[len(VALUES) - missing :]


def added(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The sum of two gradients, either of which may be None for 0."""
    return b if a is None else a if b is None else a + b
