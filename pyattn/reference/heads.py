"""The heads of the plain modules: masked attention over tensors that are already projected."""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    masked: Tensor | None = None,
    key_ranges: Tensor | None = None,
    dropout: nn.Module | None = None,
    softmax_scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """``dropout(softmax(softmax_scale q k^T)) v`` and the weights; ``masked``: bool, True = masked out.

    ``key_ranges`` (batch or 1, seqlen_q, 2): query i also sees the keys [begin, end) alone; if it sees none, it gets 0.
    """
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    unseen = None
    if key_ranges is not None:
        begin, end = (bound if q.dim() == 3 else bound[:, None] for bound in key_ranges[..., None].unbind(-2))
        key = torch.arange(k.shape[-2], device=k.device)
        outside = (key < begin) | (key >= end)
        masked = outside if masked is None else masked | outside
        unseen = masked.all(-1, keepdim=True)
    if masked is not None:
        scores = scores.masked_fill(masked, -torch.inf)
    weights = torch.softmax(scores, dim=-1)
    if unseen is not None:
        weights = weights.masked_fill(unseen, 0.0)
    if dropout is not None:
        weights = dropout(weights)
    return weights @ v, weights


def future(context_length: int) -> Tensor:
    """The causal mask (context_length, context_length): 1 above the diagonal, masked out, and else 0."""
    return torch.triu(torch.ones(context_length, context_length), diagonal=1)


def causal_heads(
    q: Tensor, k: Tensor, v: Tensor, num_heads: int, dropout: nn.Module, key_ranges: Tensor | None = None
) -> Tensor:
    """Causal attention over (B, T, num_heads * head_dim); all queries see the keys after the last query's."""
    q, k, v = (x.unflatten(-1, (num_heads, -1)).transpose(1, 2) for x in (q, k, v))
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    masked = torch.ones(seqlen_q, seqlen_q, dtype=torch.bool, device=q.device).triu(1)
    masked = pad(masked, (0, seqlen_k - seqlen_q))
    return attend(q, k, v, masked=masked, key_ranges=key_ranges, dropout=dropout)[0].transpose(1, 2).flatten(2)
