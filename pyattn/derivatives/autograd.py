"""Differentiable attention: native operators that record their own graph, and autograd Functions over them.

:func:`attend` takes the cheapest route that serves the call:

- usually, the native operator of csrc/ops/autograd.h, which records a graph if a gradient is wanted;
- ``torch.jit.trace`` tracing: the operator that records none;
- ``torch.compile`` tracing: :class:`Attention`, whose ``forward`` takes the context;
- a functorch transform active (``torch.func.grad``, ``vmap``, ``jacrev``), or forward-mode differentiation:
  :class:`TransformableAttention`, with ``setup_context``.

A backward that may be differentiated itself (``create_graph=True``, any transform), and forward mode, run as the
Functions of :mod:`pyattn.derivatives.second_order`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from pyattn import ops
from pyattn.derivatives.learned import Kind
from pyattn.derivatives.second_order import Backward, Tangents, apply, leaves, save, saved
from pyattn.derivatives.transforms import check_not_nested, transforming
from pyattn.locks import Lock
from pyattn.ops.row_invariance import row_invariant
from pyattn.options.schema import LEARNED

_deterministic = True
_lock = Lock()


def set_deterministic(deterministic: bool) -> None:
    """Sets whether backward on CUDA gives the same bits from run to run; default True.

    False lets bfloat16 and float16 accumulate dq atomically, in float32 and in one pass instead of two: rounding then
    depends on the order of the additions. Other dtypes and the CPU give the same bits either way. The setting holds for
    the whole process and is read when backward runs.

    Raises:
        TypeError: any type but bool.
    """
    global _deterministic
    if not isinstance(deterministic, bool):
        raise TypeError(f"pyattn: deterministic must be a bool, got {type(deterministic).__name__}")
    with _lock:  # both hold the setting of one thread
        _deterministic = deterministic
        ops.set_deterministic(deterministic)


def deterministic() -> bool:
    """Whether backward on CUDA is deterministic, as :func:`set_deterministic` set it."""
    return _deterministic


def _recorded() -> bool:
    """Whether a backward that runs now may be differentiated itself."""
    return not torch.compiler.is_compiling() and (torch.is_grad_enabled() or transforming())


def _run_backward(kind: Kind, *args: Any) -> tuple[Tensor | None, ...]:
    if not _recorded():
        return Backward.forward(kind, *args)
    return apply(Backward, kind, *leaves(args))


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if dout is None and dlse is None:
        return (None,) * len(ctx.needs_input_grad)
    kind: Kind = ctx.kind
    q, k, v, out, row_max, row_sum, *rest = saved(ctx)
    if dout is None:
        dout = torch.zeros_like(out)
    rows = dout, dlse, q, k, v, out, row_max, row_sum
    if len(rest) <= kind.before and _deterministic and not ctx.row_invariant and not _recorded():
        dq, dk, dv = kind.backward(*rows, *rest)[:3]  # the arguments left out are defaults here too
        return None, dq, dk, dv, *(None,) * len(rest)
    first = 4 + kind.before
    wanted = ctx.needs_input_grad[first : first + len(LEARNED)]
    wanted = *wanted, *(False,) * (len(LEARNED) - len(wanted))
    flags = _deterministic, wanted, ctx.row_invariant
    dq, dk, dv, *of_scores = _run_backward(kind, *rows, *kind.complete(rest), *flags)
    return None, dq, dk, dv, *kind.spread((dq, dk, dv, *of_scores), len(rest))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...], forward_mode: bool = True) -> None:
    ctx.kind, q, k, v, *rest = inputs
    ctx.row_invariant = row_invariant()
    out, _, row_max, row_sum = output
    save(ctx, (q, k, v, out, row_max, row_sum, *rest), forward_mode)


def _jvp(ctx: Any, _: None, *tangents: Any) -> tuple[Tensor | None, ...]:
    q, k, v, out, row_max, row_sum, *rest = saved(ctx)
    direction = ctx.kind.learned(tangents[:3], tangents[3:])
    rows = q, k, v, out, row_max, row_sum
    moved = Tangents.apply(ctx.kind, *direction, *rows, *leaves(ctx.kind.complete(rest)))  # type: ignore[no-untyped-call]
    # The derivatives of row_max and row_sum are unused, but vmap's generated rules take no None for them.
    return *moved, torch.zeros_like(row_max), torch.zeros_like(row_sum)


class Attention(torch.autograd.Function):
    """The Function for training loops: one object is context and graph node."""

    @staticmethod
    def forward(ctx: FunctionCtx, kind: Kind, *args: Any) -> tuple[Tensor, ...]:  # noqa: D102
        output = kind.forward(*args)
        _save(ctx, (kind, *args), output, forward_mode=False)
        ctx.mark_non_differentiable(output[2], output[3])
        return output

    backward: Callable[..., Any] = staticmethod(_backward)


class TransformableAttention(torch.autograd.Function):
    """The Function that functorch can transform. Its ``jvp`` would break ``torch.compile``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(kind: Kind, *args: Any) -> tuple[Tensor, ...]:  # noqa: D102
        return kind.forward(*args)

    setup_context: Callable[..., None] = staticmethod(_save)
    backward: Callable[..., Any] = staticmethod(_backward)
    jvp: Callable[..., Any] = staticmethod(_jvp)


def _distinct(arguments: tuple[Any, ...]) -> list[Any]:
    """The arguments with repeated tensors as views: the compiler refuses one tensor as two arguments of a Function."""
    distinct: list[Any] = []
    for argument in arguments:
        again = isinstance(argument, Tensor) and any(argument is other for other in distinct)
        distinct.append(argument.view_as(argument) if again else argument)
    return distinct


def _keep_transforms_eager() -> None:
    """Runs transforms of torch.func outside of compiled graphs, which have first derivatives only."""
    if torch._C._are_functorch_transforms_active():
        torch._dynamo.graph_break()


def attend(kind: Kind, q: Tensor, k: Tensor, v: Tensor, rest: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """``(out, lse, row_max, row_sum)`` of the native operator; out and lse are differentiable in q, k, v and LEARNED.

    ``rest`` holds the operator's other arguments; defaults at its end may be left out: each argument costs 0.1 us.
    """
    results: tuple[Tensor, ...]
    if torch.compiler.is_compiling():
        _keep_transforms_eager()
        results = Attention.apply(kind, *_distinct((q, k, v, *rest)))  # type: ignore[no-untyped-call]
    elif transforming():
        check_not_nested(q=q, k=k, v=v)
        results = TransformableAttention.apply(kind, q, k, v, *leaves(rest))  # type: ignore[no-untyped-call]
    elif torch._C._is_tracing():
        results = kind.forward(q, k, v, *rest)
    else:
        results = kind.attend(q, k, v, *rest)
    return results


def attend_for_out(kind: Kind, q: Tensor, k: Tensor, v: Tensor, rest: tuple[Any, ...]) -> Tensor:
    """``out`` of :func:`attend`, which costs less with few options: each of the other results 0.2 us."""
    short = kind.attend_for_out
    if short is None or len(rest) > 3 or torch.compiler.is_compiling() or transforming() or torch._C._is_tracing():
        return attend(kind, q, k, v, rest)[0]
    return short(q, k, v, *rest)
