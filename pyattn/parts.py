"""Attention over keys split into parts: merges the results of two parts and computes gradients part by part."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from pyattn import ops
from pyattn.derivatives import autograd
from pyattn.derivatives.merge import merge
from pyattn.derivatives.second_order import Last, Leaf, leaves, never
from pyattn.derivatives.transforms import transforming
from pyattn.ops.row_invariance import row_invariant
from pyattn.options.attention_options import AttentionOptions
from pyattn.options.checks import check_tensor, refuse_positional
from pyattn.options.parse import parse, takes_options
from pyattn.options.schema import LEARNED, Options
from pyattn.options.tensor_types import check_outside

__all__ = ["Gradients", "attention_backward", "merge"]


class Gradients(NamedTuple):
    """The results of :func:`attention_backward`, each in its tensor's dtype and shape; None without such a tensor."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    relative_bias: Tensor | None


@takes_options
def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | tuple[Tensor, Tensor],
    *positional: object,
    dlse: Tensor | None = None,
    **options: Unpack[AttentionOptions],
) -> Gradients:
    """One part's share of the gradients of attention over all keys.

    With P_ij = exp(score_ij - lse_i), the weight that key j of the part has among all keys, and D the dropout factors::

        dv = (P * D)^T dout        dp = dout v^T * D        ds = P * (dp - rowsum(dout * out) + dlse)
        dq = softmax_scale * ds k       dk = softmax_scale * ds^T q       dbias = ds

    Summed over the parts, dq and the slopes' gradient are those of the whole; dk, dv and dbias are the part's own.
    Use it for the backward of attention whose keys are on several devices, or come one part after another.

    Args:
        dout: (B, Hq, Sq, Dv), gradient of the merged out.
        q, k, v: as for :func:`pyattn.attention`; k and v hold the part's keys.
        out: the merged out, like dout.
        lse: the merged lse (B, Hq, Sq), as :func:`merge` returns it; or (row_max, row_sum), each query's largest score,
            or any number near it, and its sum of exp(score - row_max), over all keys. float32; float64 for float64.
        dlse: gradient of the merged lse, if it has one.
        options: as in the part's forward, with these differences. sinks: as in the merged forward, for exactly one of
            the parts: its gradient of sinks is then complete. dropout_seed: required if dropout_p is above 0.

    Returns:
        :class:`Gradients`.
    Raises:
        ValueError, TypeError, NotImplementedError: as for :func:`pyattn.attention`; dropout without a seed raises
            ValueError.

    Not differentiable: in a transform of torch.func, derivatives raise NotImplementedError; vmap works. lse is rounded,
    so each P has a relative error of at most 2 eps |lse|, eps that of lse's dtype; from (row_max, row_sum) it is as
    exact as in the backward of :func:`pyattn.attention`.

    Source: Liu et al. 2023 (Ring Attention), algorithm 1.

    >>> from pyattn import attention
    >>> q, k, v, dout = torch.randn(4, 1, 8, 100, 64)
    >>> first, second = (k[:, :, :60], v[:, :, :60]), (k[:, :, 60:], v[:, :, 60:])
    >>> out, lse = merge(
    ...     *attention(q, *first, q_offset=0, return_lse=True), *attention(q, *second, q_offset=-60, return_lse=True)
    ... )
    >>> parts = [
    ...     attention_backward(dout, q, *first, out, lse, q_offset=0),
    ...     attention_backward(dout, q, *second, out, lse, q_offset=-60),
    ... ]
    >>> whole = torch.autograd.grad(attention(q.requires_grad_(), k, v), q, dout)[0]
    >>> torch.allclose(parts[0].q + parts[1].q, whole, atol=1e-5)
    True
    """
    if positional:
        refuse_positional(attention_backward, positional)
    check_outside("attention_backward")
    if isinstance(lse, tuple) and len(lse) != 2:
        raise ValueError(f"pyattn: lse must be a Tensor or (row_max, row_sum), got a tuple of {len(lse)}")
    pair = {"row_max": lse[0], "row_sum": lse[1]} if isinstance(lse, tuple) else {"lse": lse}
    for name, tensor in ({"dout": dout, "q": q, "k": k, "v": v, "out": out} | pair).items():
        check_tensor(name, tensor)
    row_max, row_sum = lse if isinstance(lse, tuple) else (lse, torch.ones_like(lse))
    known = Options(*parse(attention_backward, options, q.device))
    if known.dropout_p and options.get("dropout_seed") is None:
        raise ValueError(f"pyattn: dropout_seed must be that of the forward, got None with dropout_p {known.dropout_p}")
    wanted = tuple(getattr(known, name) is not None for name in LEARNED)
    rows = dout, dlse, q, k, v, out, row_max, row_sum
    if transforming():
        last = autograd.deterministic(), Leaf(wanted), True, row_invariant()
        found = _Transformable.apply(*rows, *leaves(known), *last)  # type: ignore[no-untyped-call]
    else:
        with torch.no_grad():
            found = ops.attention_backward(*rows, *known, autograd.deterministic(), wanted, True, row_invariant())
    return Gradients(*(gradient.to(t.dtype) for gradient, t in zip(found, (q, k, v), strict=False)), *found[3:])


class _Transformable(Last):
    """The native backward for transforms of torch.func: only vmap has a rule."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor | None, ...]:
        return ops.attention_backward(*args)

    backward = jvp = never("pyattn: derivatives of attention_backward are not implemented")
