"""The differences between dense and packed attention that derivatives need, and the tensors they are taken in."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from pyattn.options.checks import has_values
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

    def gradients(self, *args: Any) -> tuple[Tensor | None, ...]:
        """The native backward's results, to which rows of weight 0 add nothing.

        A row whose visible keys all have scores of -inf has NaN weights. If it is merged with other keys, the gradients
        of its out and lse are 0, and 0 times NaN would be NaN in dk and dv. The values are read on a CPU alone.
        """
        dout, dlse, q, k, v, out, row_max, row_sum, *rest = args
        learned, seen = rest[self.before : self.before + len(LEARNED)], (dout, dlse, out, row_sum)
        if all(t is None for t in learned) or not all(t is None or (t.is_cpu and has_values(t)) for t in seen):
            return self.backward(*args)
        idle, dense = row_sum == 0, out.dim() == 4
        if idle.any():
            idle = idle & by_row(out[..., :1].isnan().any(-1) & (dout == 0).all(-1), dense)
            idle = idle if dlse is None else idle & (dlse == 0)
        if not idle.any():
            return self.backward(*args)
        rows = out.masked_fill(by_row(idle, dense).unsqueeze(-1), 0.0), row_max.masked_fill(idle, 0.0)
        part = True  # the weights of such a row are 0, not those of softmax
        found = self.backward(dout, dlse, q, k, v, *rows, row_sum.masked_fill(idle, 1.0), *rest, part)
        return *(g.to(t.dtype) for g, t in zip(found, (q, k, v), strict=False) if g is not None), *found[3:]

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


def by_row(numbers: Tensor, dense: bool) -> Tensor:
    """Numbers of rows in the order of lse in that of out, or the reverse: packed sequences have heads first in lse."""
    return numbers if dense else numbers.mT


def added(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The sum of two gradients, either of which may be None for 0."""
    return b if a is None else a if b is None else a + b
