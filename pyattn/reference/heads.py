"""The heads of the plain modules: masked attention over tensors that are already projected."""

from typing import TypedDict

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from typing_extensions import Unpack


class Masks(TypedDict, total=False):
    """The masks that a caller adds to a module's own: see :func:`attend`."""

    key_ranges: Tensor | None
    mask: Tensor | None
    bias: Tensor | None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    masked: Tensor | None = None,
    dropout: nn.Module | None = None,
    softmax_scale: float | None = None,
    **masks: Unpack[Masks],
) -> tuple[Tensor, Tensor]:
    """``dropout(softmax(softmax_scale q k^T + bias)) v`` and the weights, over (batch, T, D) or (batch, heads, T, D).

    ``masked``: bool, True = masked out. More masks go on top of it; a query without a visible key then gets 0:

    - ``key_ranges`` (batch or 1, seqlen_q or 1, 2): only the keys [begin, end) are visible to query i; with a
      dimension of intervals before the last one, those in any of its intervals.
    - ``mask``, bool, True = takes part, and ``bias``, added to the scores, where -inf masks a key. Their shapes
      broadcast to (batch, heads, seqlen_q, seqlen_k), with heads = 1 where q has none.
    """
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    outside = []
    mask, bias = masks.get("mask"), masks.get("bias")
    if (key_ranges := masks.get("key_ranges")) is not None:
        intervals = key_ranges if key_ranges.dim() == 4 else key_ranges[:, :, None]
        begin, end = (bound if q.dim() == 3 else bound[:, None] for bound in intervals[..., None].unbind(-2))
        key = torch.arange(k.shape[-2], device=k.device)
        outside.append(((key < begin) | (key >= end)).all(-2))
    if mask is not None:
        outside.append(~_without_heads(mask, q))
    if bias is not None:
        scores = scores + _without_heads(bias, q)
        outside.append(_without_heads(bias, q) == -torch.inf)
    hidden = torch.zeros_like(scores, dtype=torch.bool) if masked is None else masked
    for more in outside:
        hidden = hidden | more
    scores = scores.masked_fill(hidden, -torch.inf)
    without_keys = hidden.all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(without_keys, 0.0) if outside else scores, dim=-1)
    if outside:
        weights = weights.masked_fill(without_keys, 0.0)
    if dropout is not None:
        weights = dropout(weights)
    return weights @ v, weights


def _without_heads(t: Tensor, q: Tensor) -> Tensor:
    return t.squeeze(-3) if t.dim() > 2 and q.dim() == 3 else t


def of_head(t: Tensor | None, head: int) -> Tensor | None:
    """One head's part of a mask or bias (..., heads or 1, seqlen_q, seqlen_k); without heads, all of it."""
    return t if t is None or t.dim() < 3 or t.shape[-3] == 1 else t[..., head : head + 1, :, :]


def split(x: Tensor, num_heads: int) -> Tensor:
    """(B, T, num_heads * head_dim) -> (B, num_heads, T, head_dim)."""
    return torch.unflatten(x, -1, (num_heads, -1)).transpose(1, 2)


def merge(x: Tensor) -> Tensor:
    """The inverse of :func:`split`."""
    return x.transpose(1, 2).flatten(2)


def future(context_length: int) -> Tensor:
    """The causal mask (context_length, context_length): 1 (masked out) above the diagonal, 0 elsewhere."""
    return torch.triu(torch.ones(context_length, context_length), diagonal=1)


def causal_heads(q: Tensor, k: Tensor, v: Tensor, num_heads: int, dropout: nn.Module, **masks: Unpack[Masks]) -> Tensor:
    """Causal attention over (B, T, num_heads * head_dim); keys after the last query's are visible to every query."""
    q, k, v = (split(x, num_heads) for x in (q, k, v))
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    masked = torch.ones(seqlen_q, seqlen_q, dtype=torch.bool, device=q.device).triu(1)
    masked = pad(masked, (0, seqlen_k - seqlen_q))
    return merge(attend(q, k, v, masked=masked, **masks, dropout=dropout)[0])


def rms_norm(layer: nn.RMSNorm, x: Tensor) -> Tensor:
    """The layer's result in the dtype of ``x``, computed in float32 or more: under autocast the two dtypes differ."""
    wide = torch.promote_types(x.dtype, torch.float32)
    scale = torch.rsqrt(x.to(wide).square().mean(-1, keepdim=True) + 1e-6)
    return (x.to(wide) * scale * layer.weight.to(wide)).to(x.dtype)


def turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """The rotary embedding of ``x`` (B, heads, T, D), in its first R columns: ``x cos + rotated(x) sin``.

    ``cos`` and ``sin`` are (T, R) or (B or 1, T, R). ``rotated`` swaps the halves of the R columns, or each two
    neighbours if ``interleaved``, and negates what comes first.
    """
    columns, wide = cos.shape[-1], torch.promote_types(x.dtype, torch.float32)
    cos, sin = (t.to(wide) if t.dim() == 2 else t.to(wide).unsqueeze(1) for t in (cos, sin))
    part = x[..., :columns].to(wide)
    left, right = (part[..., ::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
    rotated = torch.stack([-right, left], -1).flatten(-2) if interleaved else torch.cat([-right, left], -1)
    return torch.cat([(part * cos + rotated * sin).to(x.dtype), x[..., columns:]], -1)
