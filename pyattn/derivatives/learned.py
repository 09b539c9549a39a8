"""The differences between dense and packed attention that derivatives need, and the tensors they are taken in."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from pyattn.options.schema import DEFAULTS, LEARNED, PLACES

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
    """Dense or packed attention. An operator's arguments after v are called ``rest`` here.

    Attributes:
        attend: the native operator that is differentiable, once, outside of transforms and compiled graphs.
        forward, backward: the native operators that it consists of.
        call: ``call(q, k, v, *rest)``: the :class:`pyattn.options.call.Call` of forward's arguments.
        tangents: ``tangents(call, direction, other=None)``.
        gradient_tangents: ``gradient_tangents(dout, dlse, call, direction)``.
        options_at: how many arguments of ``rest`` precede the options.
        attend_for_out: ``out`` of attend where ``rest`` is at most softmax_scale, causal and q_offset; None: not there.
    """

    attend: Callable[..., tuple[Tensor, ...]]
    forward: Callable[..., tuple[Tensor, ...]]
    backward: Callable[..., tuple[Tensor | None, ...]]
    call: Callable[..., Any]
    tangents: Callable[..., tuple[Tensor, Tensor]]
    gradient_tangents: Callable[..., tuple[Any, ...]]
    options_at: int
    attend_for_out: Callable[..., Tensor] | None = None

    @property
    def before(self) -> int:
        """How many arguments of ``rest`` precede LEARNED."""
        return self.options_at + PLACES[LEARNED[0]]

    def learned(self, rows: Sequence[Any], rest: Sequence[Any]) -> Learned:
        """The entries of differentiable tensors, given those of q, k and v and of all arguments of ``rest``."""
        return Learned(*rows, *rest[self.before : self.before + len(LEARNED)])

    def spread(self, learned: Sequence[Tensor | None], count: int) -> tuple[Tensor | None, ...]:
        """Gradients of the first ``count`` arguments of ``rest``."""
        gradients = *(None,) * self.before, *learned[3:], *(None,) * count
        return gradients[:count]

    def complete(self, rest: Sequence[Any]) -> tuple[Any, ...]:
        """``rest`` with the defaults that were left out at its end."""
        return *rest, *VALUES[len(rest) - self.options_at :]


def added(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The sum of two gradients, either of which may be None for 0."""
    return b if a is None else a if b is None else a + b
