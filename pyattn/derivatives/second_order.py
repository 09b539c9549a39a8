"""Derivatives that can be differentiated again, as autograd Functions: backward with a graph, and forward mode.

Attention's backward and its tangent are functions of the same tensors, and each occurs in the other's derivatives::

    Backward(dout, dlse; x) = (dq, dk, dv, ...)     derivatives: Tangents, Backward and GradientTangents
    Tangents(x'; x) = (out', lse')                  derivatives: Backward, GradientTangents, Tangents, SecondTangents
    GradientTangents(dout, dlse, x'; x)             raise: third derivatives
    SecondTangents(x', x*; x)                       raise: third derivatives

Here x is q, k, v, bias, slopes, sinks and relative bias. Unless a backward is differentiated again, no graph is
recorded and none of this runs.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from pyattn import ops
from pyattn.derivatives.learned import Kind, Learned, added
from pyattn.ops.row_invariance import row_invariant
from pyattn.options.autocast import without

COUNT = len(Learned._fields)


def save(ctx: Any, inputs: Sequence[Any], forward_mode: bool = True) -> None:
    """Saves all inputs on the context, tensors by autograd's own functions."""
    ctx.places = [place for place, x in enumerate(inputs) if isinstance(x, Tensor)]
    tensors, ctx.others = [inputs[place] for place in ctx.places], list(inputs)
    for place in ctx.places:
        ctx.others[place] = None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)
    if forward_mode:
        ctx.save_for_forward(*tensors)


def saved(ctx: Any) -> list[Any]:
    """The inputs that :func:`save` saved."""
    inputs = list(ctx.others)
    for place, tensor in zip(ctx.places, ctx.saved_tensors, strict=True):
        inputs[place] = tensor
    return inputs


class Leaf(tuple[Any, ...]):
    """A tuple that torch.func takes as one argument: its rules count the arguments, not what they hold."""


def leaves(args: Iterable[Any]) -> list[Any]:
    """The arguments for ``apply`` of a Function that torch.func may transform."""
    return [Leaf(x) if type(x) in (tuple, list) else x for x in args]


def apply(function: type[torch.autograd.Function], *args: Any) -> tuple[Any, ...]:
    """``function.apply(*args)`` of a Function with several results, which torch does not type."""
    results: tuple[Any, ...] = function.apply(*args)
    return results


class Backward(torch.autograd.Function):
    """The native backward: ``apply(kind, *arguments of kind.backward)``, without ``part``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(kind: Kind, *args: Any) -> tuple[Tensor | None, ...]:  # noqa: D102
        *before, fixed = args
        return kind.backward(*before, False, fixed)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:  # noqa: D102
        save(ctx, inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: D102
        kind, dout, dlse, q, k, v, out, row_max, row_sum, *rest, _, _, _ = saved(ctx)
        direction, needed = Learned(*gradients), ctx.needs_input_grad
        into_dout, into_dlse, moved = None, None, Learned(None, None, None)
        if all(x is None for x in direction):
            return (None,) * len(needed)
        if needed[1] or needed[2]:
            into_dout, into_dlse = apply(Tangents, kind, *direction, q, k, v, out, row_max, row_sum, *rest)
        if any(needed[3:]):
            moved = Learned(*apply(GradientTangents, kind, dout, dlse, *direction, q, k, v, *rest))
        into_dlse = None if dlse is None else into_dlse
        flags = None, None, None
        return None, into_dout, into_dlse, *moved[:3], None, None, None, *kind.spread(moved, len(rest)), *flags

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: D102
        kind, dout, dlse, q, k, v, out, row_max, row_sum, *rest, deterministic, wanted, fixed = saved(ctx)
        moved_dout, moved_dlse, *inputs = tangents
        direction = kind.learned(inputs[:3], inputs[6:])
        results: tuple[Tensor | None, ...] = (None,) * COUNT
        if any(x is not None for x in direction):
            results = apply(GradientTangents, kind, dout, dlse, *direction, q, k, v, *rest)
        if moved_dout is not None or moved_dlse is not None:
            moved_dout = torch.zeros_like(dout) if moved_dout is None else moved_dout
            rows = moved_dout, moved_dlse, q, k, v, out, row_max, row_sum
            more = apply(Backward, kind, *rows, *rest, deterministic, wanted, fixed)
            results = tuple(added(x, y) for x, y in zip(results, more, strict=True))
        asked = True, True, True, *wanted
        return tuple(x if ask else None for x, ask in zip(results, asked, strict=True))


_library = torch.library.Library("pyattn", "IMPL")


def record(kind: Kind, operator: ops.Operator) -> None:
    """Makes :class:`Backward` the operator that is backward of ``kind.attend`` where its derivatives are wanted."""

    def backward(*args: Any) -> tuple[Any, ...]:
        values = ops.arguments_of(operator, args, {})
        del values["part"]
        return apply(Backward, kind, *leaves(values.values()))

    # The second key comes before the transforms of torch.func, which Backward has rules for.
    for key in ("CompositeImplicitAutograd", "FuncTorchDynamicLayerFrontMode"):
        _library.impl(operator.name(), backward, key)


def _parts(args: Sequence[Any]) -> tuple[Learned, Sequence[Any], Sequence[Any]]:
    """The arguments of :class:`Tangents` after kind: direction; q, k, v, out, row_max and row_sum; rest."""
    return Learned(*args[:COUNT]), args[COUNT : COUNT + 6], args[COUNT + 6 :]


class Tangents(torch.autograd.Function):
    """out' and lse': ``apply(kind, *direction, q, k, v, out, row_max, row_sum, *rest)``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(kind: Kind, *args: Any) -> tuple[Tensor, Tensor]:  # noqa: D102
        direction, (q, k, v, *_), rest = _parts(args)
        with without(q.device):
            return kind.tangents(kind.call(q, k, v, *rest), direction)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:  # noqa: D102
        save(ctx, inputs)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: D102
        kind, *args = saved(ctx)
        direction, (q, k, v, *rows), rest = _parts(args)
        needed = ctx.needs_input_grad[1:]
        if dout is None and dlse is None:
            return (None,) * (1 + len(needed))
        dout = torch.zeros_like(rows[0]) if dout is None else dout
        into_direction: tuple[Tensor | None, ...] = (None,) * COUNT
        moved = Learned(None, None, None)
        if any(needed[:COUNT]):
            wanted = Leaf(needed[3:COUNT])
            into_direction = apply(Backward, kind, dout, dlse, q, k, v, *rows, *rest, True, wanted, row_invariant())
        if any(needed[COUNT:]):
            moved = Learned(*apply(GradientTangents, kind, dout, dlse, *direction, q, k, v, *rest))
        into_direction = tuple(x if need else None for x, need in zip(into_direction, needed, strict=False))
        return None, *into_direction, *moved[:3], None, None, None, *kind.spread(moved, len(rest))

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: D102
        kind, *args = saved(ctx)
        direction, (q, k, v, *rows), rest = _parts(args)
        moved_direction, moved_rows, moved_rest = _parts(tangents)
        other = kind.learned(moved_rows[:3], moved_rest)
        results: tuple[Tensor | None, ...] = None, None
        if any(x is not None for x in other):
            results = apply(SecondTangents, kind, *direction, *other, q, k, v, *rest)
        if any(x is not None for x in moved_direction):
            more = apply(Tangents, kind, *moved_direction, q, k, v, *rows, *rest)
            results = tuple(added(x, y) for x, y in zip(results, more, strict=True))
        return results


def never(sentence: str) -> Any:
    """The backward and jvp of a Function without derivatives: they raise NotImplementedError with ``sentence``."""

    def derivative(ctx: Any, *gradients: Any) -> NoReturn:
        raise NotImplementedError(sentence)

    return staticmethod(derivative)


class Last(torch.autograd.Function):
    """A Function whose derivatives raise: nothing is saved for them."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:  # noqa: D102
        pass

    backward: Callable[..., NoReturn] = never("pyattn: third derivatives of attention are not implemented")
    jvp: Callable[..., NoReturn] = backward


class SecondTangents(Last):
    """out'* and lse'*: ``apply(kind, *direction, *other, q, k, v, *rest)``."""

    @staticmethod
    def forward(kind: Kind, *args: Any) -> tuple[Tensor, Tensor]:  # noqa: D102
        direction, other, (q, k, v) = args[:COUNT], args[COUNT : 2 * COUNT], args[2 * COUNT : 2 * COUNT + 3]
        with without(q.device):
            call = kind.call(q, k, v, *args[2 * COUNT + 3 :])
            return kind.tangents(call, Learned(*direction), Learned(*other))


class GradientTangents(Last):
    """The gradients' tangents: ``apply(kind, dout, dlse, *direction, q, k, v, *rest)``."""

    @staticmethod
    def forward(kind: Kind, dout: Tensor, dlse: Tensor | None, *args: Any) -> tuple[Tensor | None, ...]:  # noqa: D102
        direction, (q, k, v), rest = Learned(*args[:COUNT]), args[COUNT : COUNT + 3], args[COUNT + 3 :]
        with without(q.device):
            return kind.gradient_tangents(dout, dlse, kind.call(q, k, v, *rest), direction)
