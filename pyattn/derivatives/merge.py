"""Attention over two sets of keys, from the results over each."""

import math

import torch
from torch import Tensor

from pyattn.options.checks import check_names, check_tensor


@check_names
def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys from ``(out, lse)`` over each: exact and differentiable.

    ::

        lse = log(exp(lse_a) + exp(lse_b))
        out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

    Call :func:`pyattn.attention` for the same queries with ``return_lse=True``, once over keys [0, n) and once over
    keys [n, Sk). Key positions count from the first key of the part, so the second part's ``q_offset`` is smaller by n,
    and each part has its own ``key_ranges`` and columns of ``mask`` and ``bias``. Pass sinks to exactly one part.
    Dropout counts keys within a part: each part with dropout needs its own seed, and other weights are dropped than in
    one call.

    Args:
        out_a, out_b: (B, Hq, Sq, Dv), or (total, Hq, Dv) of packed sequences, of one dtype.
        lse_a, lse_b: (B, Hq, Sq), or (Hq, total), float32; float64 for float64 outs.

    Returns:
        ``(out, lse)``, shaped like the arguments. If a part has lse -inf for a query, it has weight 0: whatever its out
        holds, the query's row is that of the other part. If the query sees no key in either, out is 0, lse -inf and
        every gradient 0; if it sees keys, all with scores of -inf, out is NaN, as in one call. NaN propagates, and so
        does an lse of inf, as NaN, unless the query sees no key in the other part.

    Raises:
        ValueError: the wrong number of dimensions, shapes that differ (nothing broadcasts), several devices.
        TypeError: an argument that is not a tensor, an unsupported dtype.
        NotImplementedError: nested tensors.

    16-bit outs are added in float32 and rounded once per merge: to merge many parts, convert them to float32 first. A
    weight exp(lse_a - lse) has a relative error of at most 2 eps(float32) |lse|, because lse is rounded.

    Source: Dao et al. 2022 (FlashAttention), section 3.1; between devices, Liu et al. 2023 (Ring Attention).

    >>> from pyattn import attention
    >>> q, k, v = torch.randn(3, 1, 8, 100, 64)
    >>> whole = attention(q, k, v)
    >>> first = attention(q, k[:, :, :60], v[:, :, :60], q_offset=0, return_lse=True)
    >>> second = attention(q, k[:, :, 60:], v[:, :, 60:], q_offset=-60, return_lse=True)
    >>> torch.allclose(merge(*first, *second)[0], whole, atol=1e-5)
    True
    """
    _check(out_a, lse_a, out_b, lse_b)
    only_a, only_b = alone(out_a, lse_a, out_b, lse_b)
    neither = (lse_a == -math.inf) & (lse_b == -math.inf)
    # An infinite difference would make gradients NaN. In these rows, nothing depends on it.
    difference = (lse_a - lse_b).masked_fill((lse_a == math.inf) | (lse_b == math.inf), math.nan)
    decided = only_a | only_b | neither
    difference = difference.masked_fill(decided, 0.0)
    both = torch.logaddexp(lse_a.masked_fill(decided, 0.0), lse_b.masked_fill(decided, 0.0))
    both = both.masked_fill(difference.isnan(), math.nan)
    lse = torch.where(only_a, lse_a, torch.where(only_b, lse_b, torch.where(neither, lse_a + lse_b, both)))
    lse = lse.masked_fill(only_a & only_b, -math.inf)
    parts = (only_a, only_b, difference, out_a), (only_b, only_a, -difference, out_b)
    first, second = (
        by_row(torch.where(own, 1.0, torch.sigmoid(d))) * out.masked_fill(by_row(other), 0.0)
        for own, other, d, out in parts
    )
    return (first + second).to(out_a.dtype), lse


def alone(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that one part decides, because the other has weight 0: ``(only a, only b)``, bool, shaped like lse.

    Weight 0 selects: out may be NaN there, and 0 times NaN is NaN. A row with lse -inf has out 0 if it sees no key of
    the part, which then changes nothing; if it sees keys, all with scores of -inf, out is NaN, and this is the merged
    result unless the other part has a finite lse. Both are true if a row sees no key in either part.

    Args:
        out_a, out_b: as for :func:`merge`.
        lse_a, lse_b: each row's lse, or its largest score.
    """
    none_a, none_b = lse_a == -math.inf, lse_b == -math.inf
    hidden_a, hidden_b = (none & ~_is_nan(out) for none, out in ((none_a, out_a), (none_b, out_b)))
    return hidden_b | (none_b & lse_a.isfinite()), hidden_a | (none_a & lse_b.isfinite())


def _is_nan(out: Tensor) -> Tensor:
    """Whether each row of out begins with NaN, shaped like lse."""
    rows = out[..., :1].isnan().any(-1)
    return rows if out.dim() == 4 else rows.mT


def by_row(numbers: Tensor) -> Tensor:
    """``numbers``, shaped like lse, as a column for out: packed sequences have heads first in lse, not in out."""
    return (numbers if numbers.dim() == 3 else numbers.mT).unsqueeze(-1)


def _check(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    tensors = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
        if tensor.device != out_a.device:
            raise ValueError(f"pyattn: {name} must be on out_a's device, got {tensor.device} and {out_a.device}")
    if not out_a.is_floating_point():
        raise TypeError(f"pyattn: out_a must be a floating-point tensor, got {out_a.dtype}")
    if out_a.dim() not in (3, 4):
        raise ValueError(
            f"pyattn: out_a must be (batch, num_heads, seqlen_q, head_dim_v) or, packed, (total_q, num_heads, "
            f"head_dim_v), got shape {tuple(out_a.shape)}"
        )
    rows = out_a.shape[:3] if out_a.dim() == 4 else out_a.shape[1::-1]
    row_dtype = torch.promote_types(out_a.dtype, torch.float32)
    for name, shape, dtype in (
        ("out_b", out_a.shape, out_a.dtype),
        ("lse_a", rows, row_dtype),
        ("lse_b", rows, row_dtype),
    ):
        tensor = tensors[name]
        if tensor.dtype != dtype:
            raise TypeError(f"pyattn: {name} must have dtype {dtype} beside out_a of {out_a.dtype}, got {tensor.dtype}")
        if tensor.shape != shape:
            raise ValueError(f"pyattn: {name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}")
