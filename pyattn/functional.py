"""The public functions: documented, thin, over :mod:`pyattn.autograd`."""

from typing import Literal, overload

import torch
from torch import Tensor

from pyattn import autograd
from pyattn.reference import default_scale


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    q_offset: int | Tensor | None = None,
    softmax_scale: float | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    q_offset: int | Tensor | None = None,
    softmax_scale: float | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    q_offset: int | Tensor | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact scaled dot-product attention, causal by default.

    For each batch, query head and query ``i``, with ``j`` running over the keys that query ``i`` sees::

        out_i = sum_j softmax_j(softmax_scale * <q_i, k_j>) v_j
        lse_i = log sum_j exp(softmax_scale * <q_i, k_j>)

    Query ``i`` stands at key position ``i + q_offset`` and, if causal, sees key ``j`` when ``j <= i + q_offset``::

        seqlen_q 2, seqlen_k 4     q_offset = 2 (default)     q_offset = 0 (upper left)
                                   1 1 1 0                    1 0 0 0
                                   1 1 1 1                    1 1 0 0

    Args:
        q: (B, Hq, Sq, D), float64, float32, bfloat16 or float16, any strides (copied only if the last dimension is
            not contiguous). A ``(B, S, H, D).transpose(1, 2)`` view is as good as a contiguous tensor.
        k: (B, Hkv, Sk, D), Hq a multiple of Hkv: query head ``h`` reads KV head ``h // (Hq // Hkv)``.
        v: (B, Hkv, Sk, Dv).
        causal: whether the mask above applies; if not, every query sees every key.
        q_offset: key position of query 0, an int or a (B,) int64 tensor; default ``Sk - Sq``, which puts the last query
            at the last key. May be negative: the first queries then see nothing.
        softmax_scale: finite factor on the scores; default ``1 / sqrt(D)``.
        return_lse: also return lse.

    Returns:
        ``out`` (B, Hq, Sq, Dv) in q's dtype, dense in memory, columns innermost and the other dimensions in q's order.
        With ``return_lse``, ``(out, lse)``: lse (B, Hq, Sq) is float32, or float64 for float64 inputs. Both are
        differentiable. A query that sees no key has out 0, lse -inf and gradient 0. 16-bit inputs are accumulated in
        float32 and rounded once.

    Raises:
        ValueError: shapes that don't fit together, a softmax_scale that is not finite.
        TypeError: other dtypes, or dtypes that differ.

    Under autocast, q, k and v are cast first. The result is the same to the bit from run to run and for every number of
    threads; extra memory is linear in the sequence length, forward and backward.

    Source: Vaswani et al. 2017, equation 1; by blocks as in Dao et al. 2022 (FlashAttention), algorithms 1 and 4.

    >>> q = torch.randn(2, 8, 100, 64, requires_grad=True)
    >>> k, v = torch.randn(2, 2, 2, 100, 64)
    >>> attention(q, k, v).shape
    torch.Size([2, 8, 100, 64])
    """
    device = q.device.type
    if torch.is_autocast_enabled(device) and q.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    scale = default_scale(q.shape[-1]) if softmax_scale is None else float(softmax_scale)
    offset, offsets = 0, None
    if isinstance(q_offset, Tensor):
        offsets = q_offset
    elif q_offset is None:
        offset = k.shape[-2] - q.shape[-2]
    else:
        offset = q_offset
    out, lse = autograd.attention(q, k, v, scale, causal, offset, offsets)
    return (out, lse) if return_lse else out
