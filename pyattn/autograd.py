"""The differentiable operator: autograd Functions over the native operators.

:func:`attention` takes the cheapest way that serves the call. Overheads measured with torch 2.13: 6 us for the raw
operator, 13 with :class:`Attention`, 29 with :class:`TransformableAttention`.

- no gradient wanted, or ``torch.jit.trace`` tracing, which can't save a Function: the raw operator;
- a gradient wanted, or ``torch.compile`` tracing: :class:`Attention`, whose ``forward`` takes the context;
- a functorch transform active (``torch.func.grad``, ``vmap``, ``jacrev``), or forward-mode differentiation:
  :class:`TransformableAttention`, with ``setup_context``.

A backward that may be differentiated itself (``create_graph=True``, any transform), and forward mode, run as the
Functions of :mod:`pyattn.second_order`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import FunctionCtx

from pyattn import _ops
from pyattn.options import Options, Packing
from pyattn.second_order import DENSE, PACKED, Backward, Kind, Tangents, leaves

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


def _recorded() -> bool:
    """Whether a backward that runs now may be differentiated itself."""
    return not torch.compiler.is_compiling() and (torch.is_grad_enabled() or transforming())


def _run_backward(kind: Kind, *args: Any) -> tuple[Tensor | None, ...]:
    if not _recorded():
        return kind.backward(*args)
    gradients: tuple[Tensor | None, ...] = Backward.apply(kind, *leaves(args))  # type: ignore[no-untyped-call]
    return gradients


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if dout is None and dlse is None:
        return (None,) * len(ctx.needs_input_grad)
    q, k, v, out, row_max, row_sum, *tensors = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    options = ctx.options.with_tensors(*tensors)
    passed = len(ctx.needs_input_grad) - 3
    if passed <= BEFORE_BIAS and _deterministic and not _recorded():
        arguments: tuple[Any, ...] = options[:passed]  # and the rest are defaults, here too
    else:
        wanted = ctx.needs_input_grad[3 + BEFORE_BIAS : 6 + BEFORE_BIAS] or (False, False, False)
        arguments = *options, _deterministic, wanted
    tensors = [dout, dlse, q, k, v, out, row_max, row_sum]
    dq, dk, dv, *of_score = _run_backward(DENSE, *tensors, *arguments)
    if passed <= BEFORE_BIAS:
        return dq, dk, dv, *(None,) * passed
    return dq, dk, dv, *(None,) * BEFORE_BIAS, *of_score, *(None,) * AFTER_SINKS


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    q, k, v, *rest = inputs
    options = Options(*rest)
    out, _, row_max, row_sum = output
    ctx.set_materialize_grads(False)
    tensors = q, k, v, out, row_max, row_sum, *options.tensors
    ctx.save_for_backward(*tensors)
    ctx.options = options.with_tensors()
    return tensors


def _save_for_both(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_forward(*_save(ctx, inputs, output))


def _no_change(*rows: Tensor) -> tuple[Tensor, ...]:
    """Tangents of row_max and row_sum, whose derivatives nobody uses: vmap's generated rules take no None for them."""
    return tuple(torch.zeros_like(row) for row in rows)


def _jvp(ctx: Any, *tangents: Any) -> tuple[Tensor | None, ...]:
    q, k, v, out, row_max, row_sum, *tensors = ctx.saved_tensors
    direction = DENSE.learned(tangents[:3], tangents[3:])
    options = ctx.options.with_tensors(*tensors)
    moved = Tangents.apply(DENSE, *direction, q, k, v, out, row_max, row_sum, *leaves(options))  # type: ignore[no-untyped-call]
    return *moved, *_no_change(row_max, row_sum)


class Attention(torch.autograd.Function):
    """The Function for training loops: one object is context and graph node."""

    @staticmethod
    def forward(ctx: FunctionCtx, *args: Any) -> tuple[Tensor, ...]:  # noqa: D102
        output: tuple[Tensor, ...] = _ops.attention_forward(*args)
        _save(ctx, args, output)
        ctx.mark_non_differentiable(output[2], output[3])
        return output

    backward = staticmethod(_backward)


class TransformableAttention(torch.autograd.Function):
    """The Function that functorch can transform. Its ``jvp`` would break ``torch.compile``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:  # noqa: D102
        output: tuple[Tensor, ...] = _ops.attention_forward(*args)
        return output

    setup_context = staticmethod(_save_for_both)
    backward = staticmethod(_backward)
    jvp = staticmethod(_jvp)


def _saved_varlen(ctx: Any) -> tuple[Any, ...]:
    """q, k, v, out, row_max, row_sum, packing and options."""
    q, k, v, out, row_max, row_sum, cu_seqlens_q, cu_seqlens_k, seqused_k, *tensors = ctx.saved_tensors
    max_seqlen_q, max_seqlen_k = ctx.max_seqlens
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k)
    return q, k, v, out, row_max, row_sum, packing, ctx.options.with_tensors(*tensors)


def _backward_varlen(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if dout is None and dlse is None:
        return (None,) * len(ctx.needs_input_grad)
    q, k, v, out, row_max, row_sum, packing, options = _saved_varlen(ctx)
    if dout is None:
        dout = torch.zeros_like(out)
    before = 3 + len(packing) + BEFORE_BIAS
    arguments = *packing, *options, _deterministic, ctx.needs_input_grad[before : before + 3]
    rows = dout, dlse, q, k, v, out, row_max, row_sum
    dq, dk, dv, *of_score = _run_backward(PACKED, *rows, *arguments)
    return dq, dk, dv, *(None,) * (before - 3), *of_score, *(None,) * AFTER_SINKS


def _save_varlen(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    q, k, v, *rest = inputs
    count = len(Packing._fields)
    packing, options = Packing(*rest[:count]), Options(*rest[count:])
    out, _, row_max, row_sum = output
    ctx.set_materialize_grads(False)
    lengths = packing.cu_seqlens_q, packing.cu_seqlens_k, packing.seqused_k
    tensors = q, k, v, out, row_max, row_sum, *lengths, *options.tensors
    ctx.save_for_backward(*tensors)
    ctx.max_seqlens, ctx.options = (packing.max_seqlen_q, packing.max_seqlen_k), options.with_tensors()
    return tensors


def _save_varlen_for_both(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_forward(*_save_varlen(ctx, inputs, output))


def _jvp_varlen(ctx: Any, *tangents: Any) -> tuple[Tensor | None, ...]:
    q, k, v, out, row_max, row_sum, packing, options = _saved_varlen(ctx)
    direction = PACKED.learned(tangents[:3], tangents[3:])
    rows = q, k, v, out, row_max, row_sum
    moved = Tangents.apply(PACKED, *direction, *rows, *packing, *leaves(options))  # type: ignore[no-untyped-call]
    return *moved, *_no_change(row_max, row_sum)


class VarlenAttention(torch.autograd.Function):
    """:class:`Attention` of packed sequences."""

    @staticmethod
    def forward(ctx: FunctionCtx, *args: Any) -> tuple[Tensor, ...]:  # noqa: D102
        output: tuple[Tensor, ...] = _ops.attention_varlen_forward(*args)
        _save_varlen(ctx, args, output)
        ctx.mark_non_differentiable(output[2], output[3])
        return output

    backward = staticmethod(_backward_varlen)


class TransformableVarlenAttention(torch.autograd.Function):
    """:class:`TransformableAttention` of packed sequences."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:  # noqa: D102
        output: tuple[Tensor, ...] = _ops.attention_varlen_forward(*args)
        return output

    setup_context = staticmethod(_save_varlen_for_both)
    backward = staticmethod(_backward_varlen)
    jvp = staticmethod(_jvp_varlen)


def _distinct(arguments: tuple[Any, ...]) -> list[Any]:
    """The arguments as views where a tensor comes again: the compiler refuses one as two arguments of a Function."""
    distinct: list[Any] = []
    for argument in arguments:
        again = isinstance(argument, Tensor) and any(argument is other for other in distinct)
        distinct.append(argument.view_as(argument) if again else argument)
    return distinct


def transforming() -> bool:
    """Whether a transform of torch.func or forward-mode differentiation is active."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _keep_transforms_eager() -> None:
    """A transform of torch.func runs outside of compiled graphs, which know of first derivatives alone."""
    if torch._C._are_functorch_transforms_active():
        torch._dynamo.graph_break()


def attention(q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` of the native operator, differentiable in q, k, v, bias, slopes and sinks.

    ``options`` are :class:`Options`, or the first of their values if the rest are defaults: each that is passed costs
    0.1 us.
    """
    apply: Callable[..., tuple[Tensor, ...]]
    if torch.compiler.is_compiling():
        _keep_transforms_eager()
        apply = Attention.apply
        q, k, v, *rest = _distinct((q, k, v, *options))
        options = tuple(rest)
    elif transforming():
        apply = TransformableAttention.apply
        options = tuple(leaves(options))
    elif (
        torch.is_grad_enabled()
        and (
            q.requires_grad
            or k.requires_grad
            or v.requires_grad
            or any(t is not None and t.requires_grad for t in options[BEFORE_BIAS : BEFORE_BIAS + 3])
        )
        and not torch._C._is_tracing()
    ):
        apply = Attention.apply
    else:
        apply = _ops.attention_forward
    results = apply(q, k, v, *options)  # type: ignore[no-untyped-call]  # torch leaves Function.apply untyped
    return results[0], results[1]


def attention_varlen(q: Tensor, k: Tensor, v: Tensor, packing: Packing, options: Options) -> tuple[Tensor, Tensor]:
    """:func:`attention` of packed sequences."""
    arguments = q, k, v, *packing, *options
    learned = q, k, v, options.bias, options.alibi_slopes, options.sinks
    apply: Callable[..., tuple[Tensor, ...]] = _ops.attention_varlen_forward
    if torch.compiler.is_compiling():
        _keep_transforms_eager()
        apply, arguments = VarlenAttention.apply, tuple(_distinct(arguments))
    elif transforming():
        apply, arguments = TransformableVarlenAttention.apply, tuple(leaves(arguments))
    elif (
        torch.is_grad_enabled()
        and any(t is not None and t.requires_grad for t in learned)
        and not torch._C._is_tracing()
    ):
        apply = VarlenAttention.apply
    results = apply(*arguments)
    return results[0], results[1]
