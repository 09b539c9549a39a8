"""The formula, step by step, for every feature that the native function has."""

import math

import torch
from torch import Tensor

from pyattn.dropout import draw_seed, dropout_mask, dropout_threshold


def default_scale(head_dim: int) -> float:
    """``1 / sqrt(head_dim)``, and 1 where there is nothing to sum over."""
    return 1.0 / math.sqrt(head_dim) if head_dim else 1.0


def visible(
    seqlen_q: int,
    seqlen_k: int,
    *,
    causal: bool = True,
    q_offset: int | Tensor | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """The keys that each query sees: bool, True = takes part.

    The shape is (seqlen_q, seqlen_k), and (B, 1, seqlen_q, seqlen_k) where ``q_offset`` is a tensor.

    Query ``i`` stands at key position ``i + q_offset`` and sees key ``j`` when ``j <= i + q_offset``; the default
    offset ``seqlen_k - seqlen_q`` aligns the last query with the last key::

        seqlen_q 2, seqlen_k 4     q_offset = 2 (default)     q_offset = 0 (upper left)
                                   1 1 1 0                    1 0 0 0
                                   1 1 1 1                    1 1 0 0
    """
    if not causal:
        return torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if q_offset is None:
        q_offset = seqlen_k - seqlen_q
    position = torch.arange(seqlen_q, device=device)[:, None]
    if isinstance(q_offset, Tensor):
        position = position + q_offset.to(device)[:, None, None, None]
    else:
        position = position + q_offset
    return torch.arange(seqlen_k, device=device) <= position


def _scores(q: Tensor, k: Tensor, seen: Tensor, finite: bool) -> Tensor:
    """``q k^T`` over the last dimension. Unseen rows that are not finite are selected away, because 0 * nan is nan."""
    if finite:
        return q @ k.mT
    pair = seen.unsqueeze(-1)
    return (torch.where(pair, q.unsqueeze(-2), 0) * torch.where(pair, k.unsqueeze(-3), 0)).sum(-1)


def _combine(weights: Tensor, v: Tensor, seen: Tensor, finite: bool) -> Tensor:
    """``weights v`` over the keys, unseen values selected away."""
    if finite:
        return weights @ v
    return (weights.unsqueeze(-1) * torch.where(seen.unsqueeze(-1), v.unsqueeze(-3), 0)).sum(-2)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    q_offset: int | Tensor | None = None,
    softmax_scale: float | None = None,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    return_lse: bool = False,
    return_weights: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """``dropout(softmax(mask(softmax_scale q k^T))) v``.

    Args:
        q: (B, Hq, Sq, D).
        k: (B, Hkv, Sk, D); query head ``h`` reads KV head ``h // (Hq // Hkv)``.
        v: (B, Hkv, Sk, Dv).
        causal, q_offset: see :func:`visible`.
        softmax_scale: default ``1 / sqrt(D)``.
        mask: bool, True = takes part, broadcastable to (B, Hq, Sq, Sk); on top of ``causal``.
        dropout_p, dropout_seed: drops weights by :func:`pyattn.dropout_mask`; the seed is drawn if None.
        return_lse: also return the natural log of the softmax denominator, (B, Hq, Sq), float32 or float64.
        return_weights: also return the weights that met ``v``, (B, Hq, Sq, Sk), after dropout.

    Returns:
        ``out`` (B, Hq, Sq, Dv), then lse and weights if asked for. A row that sees no key has out 0, lse -inf. Masked
        positions never affect the result, even if they hold NaN; compiled code can't look at values and takes them all
        as finite.
    """
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scale = default_scale(q.shape[-1]) if softmax_scale is None else softmax_scale
    seen = visible(q.shape[2], k.shape[2], causal=causal, q_offset=q_offset, device=q.device)
    if mask is not None:
        seen = seen & mask
    finite = torch.compiler.is_compiling() or q.is_meta or all(bool(t.isfinite().all()) for t in (q, k, v))

    scores = (_scores(q, k, seen, finite) * scale).masked_fill(~seen, -math.inf)
    empty = ~seen.any(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(empty, 0.0), -1).masked_fill(~seen, 0.0)
    if dropout_p > 0.0:
        seed = draw_seed(q.device) if dropout_seed is None else dropout_seed
        batch, num_heads_q, seqlen_q, seqlen_k = weights.shape
        kept = dropout_mask(seed, batch, num_heads_q, seqlen_q, seqlen_k, dropout_p)
        weights = weights.masked_fill(~kept, 0.0) * (65536 / (65536 - dropout_threshold(dropout_p)))
    out = _combine(weights, v, seen, finite)

    results: tuple[Tensor, ...] = (out,)
    if return_lse:
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
        lse = torch.logsumexp(wide.masked_fill(empty, 0.0), -1).masked_fill(empty.squeeze(-1), -math.inf)
        results += (lse,)
    if return_weights:
        results += (weights,)
    return results if len(results) > 1 else out
