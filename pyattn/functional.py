"""The public functions: documented, thin, over :mod:`pyattn.autograd`."""

from typing import Literal, overload

import torch
from torch import Tensor

from pyattn import autograd
from pyattn.arguments import check_64_bits, check_tensor, check_type, hide_catch_all, refuse
from pyattn.dropout import draw_seed, dropout_mask
from pyattn.options import Options

__all__ = ["attention", "dropout_mask"]


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    q_offset: int | Tensor | None = None,
    window: tuple[int, int] = (-1, -1),
    key_ranges: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
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
    window: tuple[int, int] = (-1, -1),
    key_ranges: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


@hide_catch_all
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *positional: object,
    causal: bool = True,
    q_offset: int | Tensor | None = None,
    window: tuple[int, int] = (-1, -1),
    key_ranges: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    return_lse: bool = False,
    **named: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact scaled dot-product attention, causal by default.

    For each batch, query head and query ``i``, with ``j`` running over the keys that query ``i`` sees::

        out_i = sum_j dropout(softmax_j(softmax_scale * <q_i, k_j>)) v_j
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
        dropout_p: probability of dropping a weight after the softmax, at least 0 and below 1, rounded to 1/65536; the
            others are scaled by 1 / (1 - dropout_p). lse does not change.
        dropout_seed: an int or an int64 scalar tensor. Seed and position decide which weights are dropped, as
            :func:`dropout_mask` shows, the same for any number of threads, instruction set and device. Default: drawn
            from torch's generator, so ``torch.manual_seed`` repeats it and checkpoints recompute it.
        return_lse: also return lse.

    Returns:
        ``out`` (B, Hq, Sq, Dv) in q's dtype, dense in memory, columns innermost and the other dimensions in q's order.
        With ``return_lse``, ``(out, lse)``: lse (B, Hq, Sq) is float32, or float64 for float64 inputs. Both are
        differentiable. A query that sees no key has out 0, lse -inf and gradient 0. 16-bit inputs are accumulated in
        float32 and rounded once.

    Raises:
        ValueError: shapes that don't fit together, a softmax_scale that is not finite, a q_offset or dropout_seed past
            64 bits, a dropout_p outside [0, 1); at the first call, an instruction set in the environment variable
            PYATTN_ISA that this CPU or build does not have.
        TypeError: another dtype, or dtypes that differ; a q_offset or dropout_seed tensor that is not int64; another
            type than listed; an argument that does not exist, such as ``is_causal``, naming the one that stands for it.
        NotImplementedError: tensors that are not dense, or on a device that this build has no kernels for; a head
            dimension above 256 on a GPU; forward-mode and second derivatives, when they are taken.

    Under autocast, q, k and v are cast first unless they are float64. The result has the same bits from run to run and
    for every number of threads; on a GPU, :func:`pyattn.set_deterministic` can waive that for dq. Extra memory is
    linear in the sequence length, forward and backward.

    Source: Vaswani et al. 2017, equation 1; by blocks as in Dao et al. 2022 (FlashAttention), algorithms 1 and 4.

    >>> q = torch.randn(2, 8, 100, 64, requires_grad=True)
    >>> k, v = torch.randn(2, 2, 2, 100, 64)
    >>> attention(q, k, v).shape
    torch.Size([2, 8, 100, 64])
    """
    if positional or named:
        refuse(attention, positional, named)
    plain = type(q) is type(k) is type(v) is Tensor and type(causal) is bool and type(dropout_p) is float
    if not (plain and softmax_scale is None and q_offset is None and dropout_seed is None):  # saves 1 us
        check_tensor("q", q)
        check_tensor("k", k)
        check_tensor("v", v)
        check_type("causal", causal, bool)
        check_type("q_offset", q_offset, int, torch.SymInt, Tensor, type(None))
        check_type("softmax_scale", softmax_scale, int, float, torch.SymInt, torch.SymFloat, type(None))
        check_type("dropout_p", dropout_p, int, float)
        check_type("dropout_seed", dropout_seed, int, torch.SymInt, Tensor, type(None))
        check_64_bits("q_offset", q_offset)
        check_64_bits("dropout_seed", dropout_seed)
    if torch._C._is_any_autocast_enabled():
        q, k, v = _autocast(q), _autocast(k), _autocast(v)
    q_offset, q_offsets = (None, q_offset) if isinstance(q_offset, Tensor) else (q_offset, None)
    if dropout_p == 0:
        dropout_seed = None
    elif dropout_seed is None:
        dropout_seed = draw_seed(q.device)
    elif not isinstance(dropout_seed, Tensor):
        dropout_seed = torch.tensor(dropout_seed, dtype=torch.int64, device=q.device)
    options = Options(
        softmax_scale,
        causal,
        q_offset,
        q_offsets,
        window,
        key_ranges,
        softcap,
        bias,
        alibi_slopes,
        sinks,
        dropout_p,
        dropout_seed,
    )
    out, lse = autograd.attention(q, k, v, options)
    return (out, lse) if return_lse else out


def _autocast(t: Tensor) -> Tensor:
    """``t`` in autocast's dtype where autocast is on; like torch's own, it leaves float64 and integers alone."""
    device = t.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return t.to(torch.get_autocast_dtype(device)) if t.is_floating_point() and t.dtype != torch.float64 else t
    return t
