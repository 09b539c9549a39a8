"""FlashAttention 3's and 4's formulas for one sequence, written out: masks by index, float64."""

import math

import torch


def plain(q, k, v, qv=None, causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, sink=None, scale=None):
    """q (Sq, Hq, D), k (Sk, Hkv, D), v (Sk, Hkv, Dv) -> out (Sq, Hq, Dv), lse (Hq, Sq); -inf for a row without keys."""
    seqlen_q, seqlen_k, groups = q.shape[0], k.shape[0], q.shape[1] // max(1, k.shape[1])
    k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k)
    columns = q.shape[2]
    if qv is not None:
        scores, columns = scores + torch.einsum("ihd,jhd->hij", qv, v), columns + v.shape[2]
    scores = scores * (1 / math.sqrt(columns) if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    seen = torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool)
    for i in range(seqlen_q):
        place = i + seqlen_k - seqlen_q
        for j in range(seqlen_k):
            left, right = window_size
            seen[i, j] = not (
                (causal and j > place)
                or (left >= 0 and j < place - left)
                or (right >= 0 and j > place + right)
                or (attention_chunk and j // attention_chunk != place // attention_chunk)
            )
    weights = torch.where(seen, scores.exp(), 0.0)
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + sink.exp()[:, None, None]
    weights = weights / torch.where(total > 0, total, 1.0)
    lse = torch.where(total > 0, total.log(), -math.inf)[..., 0]
    return torch.einsum("hij,jhd->ihd", weights, v), lse


def batched(q, k, v, qv=None, **options):
    """:func:`plain` of each sequence of a batch: out (B, Sq, Hq, Dv), lse (B, Hq, Sq)."""
    found = [plain(q[b], k[b], v[b], None if qv is None else qv[b], **options) for b in range(len(q))]
    return torch.stack([out for out, _ in found]), torch.stack([lse for _, lse in found])
