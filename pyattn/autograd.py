"""The differentiable operator: autograd Functions over the native operators.

:func:`attention` takes the cheapest way that serves the call. Overheads measured with torch 2.13: 6 us for the raw
operator, 13 with :class:`Attention`, 29 with :class:`TransformableAttention`.

- no gradient wanted: the raw operator;
- a gradient wanted, or ``torch.compile`` tracing: :class:`Attention`, whose ``forward`` takes the context;
- a functorch transform active (``torch.func.grad``, ``vmap``, ``jacrev``), or forward-mode differentiation:
  :class:`TransformableAttention`, with ``setup_context``.

A backward that is itself recorded (``create_graph=True``, nested ``torch.func.grad``) runs as :class:`Backward`.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import FunctionCtx

from pyattn import _ops
from pyattn.options import Options

_deterministic = True

BEFORE_BIAS = Options._fields.index("bias")
AFTER_SINKS = len(Options._fields) - BEFORE_BIAS - 3
"""How many options, which have no gradients, stand before and after bias, alibi_slopes and sinks, which have."""


def set_deterministic(deterministic: bool) -> None:
    """Whether backward on CUDA gives the same bits from run to run; default True.

    False lets bfloat16 and float16 add up dq atomically, in float32 and in one pass instead of two: the result then
    differs by the order of rounding. Other dtypes and the CPU give the same bits either way. The setting holds for the
    whole process and is read when backward runs.

    Raises:
        TypeError: another type than bool.
    """
    global _deterministic
    if not isinstance(deterministic, bool):
        raise TypeError(f"pyattn: deterministic must be a bool, got {type(deterministic).__name__}")
    _deterministic = deterministic


def _refuse_forward_mode(ctx: Any, *tangents: Any) -> Any:
    raise NotImplementedError("pyattn: forward-mode derivatives (jvp) of attention are not implemented")


class Backward(torch.autograd.Function):
    """The backward operator where a graph of it is recorded: its own derivatives raise."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:  # noqa: D102
        gradients: tuple[Tensor, ...] = _ops.attention_backward(*args)
        return gradients

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Nothing is saved, because backward only raises."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> NoReturn:  # noqa: D102
        raise NotImplementedError("pyattn: second derivatives of attention are not implemented")

    jvp = staticmethod(_refuse_forward_mode)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if dout is None and dlse is None:
        return (None,) * len(ctx.needs_input_grad)
    q, k, v, out, row_max, row_sum, *tensors = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    recorded = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    apply: Callable[..., tuple[Tensor, ...]] = Backward.apply if recorded else _ops.attention_backward
    options = ctx.options.with_tensors(*tensors)
    passed = len(ctx.needs_input_grad) - 3
    if passed <= BEFORE_BIAS and _deterministic:
        arguments: tuple[Any, ...] = options[:passed]  # and the rest are defaults, here too
    else:
        wanted = ctx.needs_input_grad[3 + BEFORE_BIAS : 6 + BEFORE_BIAS] or (False, False, False)
        arguments = *options, _deterministic, wanted
    dq, dk, dv, *of_score = apply(dout, dlse, q, k, v, out, row_max, row_sum, *arguments)
    if passed <= BEFORE_BIAS:
        return dq, dk, dv, *(None,) * passed
    return dq, dk, dv, *(None,) * BEFORE_BIAS, *of_score, *(None,) * AFTER_SINKS


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, *rest = inputs
    options = Options(*rest)
    out, _, row_max, row_sum = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(row_max, row_sum)
    ctx.save_for_backward(q, k, v, out, row_max, row_sum, *options.tensors)
    ctx.options = options.with_tensors()


class Attention(torch.autograd.Function):
    """The Function for training loops: one object is context and graph node."""

    @staticmethod
    def forward(ctx: FunctionCtx, *args: Any) -> tuple[Tensor, ...]:  # noqa: D102
        output: tuple[Tensor, ...] = _ops.attention_forward(*args)
        _save(ctx, args, output)
        return output

    backward = staticmethod(_backward)


class TransformableAttention(torch.autograd.Function):
    """The Function that functorch can transform. Its ``jvp``, which only raises, would break ``torch.compile``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:  # noqa: D102
        output: tuple[Tensor, ...] = _ops.attention_forward(*args)
        return output

    setup_context = staticmethod(_save)
    backward = staticmethod(_backward)
    jvp = staticmethod(_refuse_forward_mode)


def attention(q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` of the native operator, differentiable in q, k, v, bias, slopes and sinks.

    ``options`` are :class:`Options`, or the first of their values if the rest are defaults: each that is passed costs
    0.1 us.
    """
    apply: Callable[..., tuple[Tensor, ...]]
    if torch.compiler.is_compiling():
        apply = Attention.apply
        distinct: list[Any] = []  # the compiler refuses one tensor as two arguments of a Function
        for argument in (q, k, v, *options):
            again = isinstance(argument, Tensor) and any(argument is other for other in distinct)
            distinct.append(argument.view_as(argument) if again else argument)
        q, k, v, options = *distinct[:3], tuple(distinct[3:])
    elif torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        apply = TransformableAttention.apply
    elif torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or any(t is not None and t.requires_grad for t in options[BEFORE_BIAS : BEFORE_BIAS + 3])
    ):
        apply = Attention.apply
    else:
        apply = _ops.attention_forward
    results = apply(q, k, v, *options)  # type: ignore[no-untyped-call]  # torch leaves Function.apply untyped
    return results[0], results[1]
