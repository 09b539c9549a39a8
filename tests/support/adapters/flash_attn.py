"""Attention and rotary embeddings by the formulas in flash-attn's documentation."""

import math

import torch


def plain(q, k, v, kept=None, dropout_p=0.0, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None):
    """q (B, Sq, H, D) -> out, lse, the weights before dropout; ``kept``: those that it keeps."""
    seqlen_q, seqlen_k, groups = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(groups, 2) for t in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[3])
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    key, (left, right) = torch.arange(seqlen_k), window_size
    if alibi_slopes is not None:
        slopes = alibi_slopes.double().expand(q.shape[0], -1)[:, :, None, None]
        scores = scores - slopes * (position - key).abs()
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    seen &= (key <= position) if causal else True
    seen &= (key >= position - left) if left >= 0 else True
    seen &= (key <= position + right) if right >= 0 else True
    weights = torch.where(seen, torch.exp(scores), 0.0)
    total = weights.sum(-1, keepdim=True)
    weights = weights / torch.where(total > 0, total, 1.0)
    lse = torch.where(total > 0, total.log(), math.inf)[..., 0]
    dropped = weights if kept is None else torch.where(kept, weights, 0.0) / (1 - dropout_p)
    return torch.einsum("bhij,bjhd->bihd", dropped, v), lse, weights


def turned(x, positions, angle, interleaved=False):
    """x (..., H, D) rotated: its first columns, read as complex numbers, times e^(i angle of their position)."""
    half = angle.shape[1]
    if not x.numel():  # which torch can't view as complex numbers
        return x
    pairs = x[..., : 2 * half].unflatten(-1, (half, 2) if interleaved else (2, half))
    numbers = torch.view_as_complex((pairs if interleaved else pairs.mT).contiguous())
    pairs = torch.view_as_real(numbers * torch.polar(torch.ones_like(angle), angle)[positions][..., None, :])
    return torch.cat([(pairs if interleaved else pairs.mT).flatten(-2), x[..., 2 * half :]], -1)
