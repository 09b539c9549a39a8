"""The differentiable operator: two autograd Functions over one pair of native operators.

Which of three ways a call takes depends on what watches it, since each costs a different overhead (measured with torch
2.13: 6 us for the raw operator, 13 with the first Function, 29 with the second):

- no gradient wanted: the raw operator;
- a gradient wanted, or ``torch.compile`` tracing: :class:`Attention`;
- a functorch transform active (``torch.func.grad``, ``vmap``, ``jacrev``): :class:`TransformableAttention`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from pyattn import _ops

_deterministic = True


def set_deterministic(deterministic: bool) -> None:
    """Whether backward on CUDA gives the same bits from run to run; default True.

    False lets it add up the dq of bfloat16 and float16 with atomic additions of float32, in one pass instead of two:
    equal but for the order of rounding. Other dtypes, and the CPU, give the same bits either way. Holds for the whole
    process, when backward runs.

    Raises:
        TypeError: other types than bool.
    """
    global _deterministic
    if not isinstance(deterministic, bool):
        raise TypeError(f"pyattn: deterministic must be a bool, got {type(deterministic).__name__}")
    _deterministic = deterministic


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    q, k, v, out, row_max, row_sum, q_offsets, dropout_seed = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * 9
    if dout is None:
        dout = torch.zeros_like(out)
    options = (ctx.softmax_scale, ctx.causal, ctx.q_offset, q_offsets, ctx.dropout_p, dropout_seed, _deterministic)
    dq, dk, dv = _ops.attention_backward(dout, dlse, q, k, v, out, row_max, row_sum, *options)
    return dq, dk, dv, None, None, None, None, None, None


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, ctx.softmax_scale, ctx.causal, ctx.q_offset, q_offsets, ctx.dropout_p, dropout_seed = inputs
    ctx.set_materialize_grads(False)
    out, _, row_max, row_sum = output
    ctx.mark_non_differentiable(row_max, row_sum)
    ctx.save_for_backward(q, k, v, out, row_max, row_sum, q_offsets, dropout_seed)


class Attention(torch.autograd.Function):
    """The one for training loops: forward and backward share a context."""

    @staticmethod
    def forward(ctx: FunctionCtx, *args: Any) -> tuple[Tensor, ...]:  # noqa: D102
        output: tuple[Tensor, ...] = _ops.attention_forward(*args)
        _save(ctx, args, output)
        return output

    backward = staticmethod(_backward)


class TransformableAttention(torch.autograd.Function):
    """The one that functorch can transform; forward-mode derivatives are not written and raise."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:  # noqa: D102
        output: tuple[Tensor, ...] = _ops.attention_forward(*args)
        return output

    setup_context = staticmethod(_save)
    backward = staticmethod(_backward)

    @staticmethod
    def jvp(ctx: FunctionCtx, *tangents: Any) -> Any:  # noqa: D102
        raise NotImplementedError("pyattn: forward-mode derivatives (jvp) of attention are not implemented")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool,
    q_offset: int | None,
    q_offsets: Tensor | None,
    dropout_p: float,
    dropout_seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` of the native operator, differentiable in q, k and v."""
    apply: Callable[..., tuple[Tensor, ...]]
    if torch.compiler.is_compiling():
        apply = Attention.apply
        k = k.view_as(k) if k is q else k  # for the compiler refuses one tensor as two arguments of a Function
        v = v.view_as(v) if v is q or v is k else v
    elif torch._C._are_functorch_transforms_active():
        apply = TransformableAttention.apply
    elif torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        apply = Attention.apply
    else:
        apply = _ops.attention_forward
    # torch leaves Function.apply untyped
    results = apply(q, k, v, softmax_scale, causal, q_offset, q_offsets, dropout_p, dropout_seed)  # type: ignore[no-untyped-call]
    return results[0], results[1]
