"""Selection of keys and the indexer's loss, with the scores of all pairs at once."""

import math

import torch
from torch import Tensor

from pyattn.reference.formula import default_scale, visible


def first_in_order(scores: Tensor, visible_keys: Tensor, n: int) -> Tensor:
    """int32 (..., n): visible keys by descending score, the lower one first among equal ones; -1 where there are fewer.

    Args:
        scores: (..., keys); NaN counts as -inf.
        visible_keys: bool, broadcastable to scores.
        n: how many to return.
    """
    known = scores.masked_fill(scores.isnan(), -math.inf)
    seen = visible_keys.expand(scores.shape)
    order = known.sort(dim=-1, descending=True, stable=True).indices
    order = order.gather(-1, seen.gather(-1, order).to(torch.uint8).sort(dim=-1, descending=True, stable=True).indices)
    keys = order.masked_fill(~seen.gather(-1, order), -1)[..., :n]
    return torch.nn.functional.pad(keys, (0, n - keys.shape[-1]), value=-1).to(torch.int32)


def index_scores(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """``sum_h weights_hi relu(<q_hi, k_j>)``: (B, Hi, Sq, Di), (B, Sk, Di) and (B, Hi, Sq) -> (B, Sq, Sk)."""
    pairs = (q.unsqueeze(-2) * k[:, None, None]).sum(-1)
    return (weights.unsqueeze(-1) * torch.relu(pairs)).sum(1)


def top_keys(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    n: int,
    *,
    causal: bool = True,
    q_offset: int | Tensor | None = None,
    k_lengths: Tensor | None = None,
) -> Tensor:
    """As :func:`pyattn.selection.top_keys`."""
    seqlen_q, seqlen_k = q.shape[2], k.shape[1]
    if k_lengths is not None:
        q_offset = k_lengths - seqlen_q if q_offset is None else q_offset
    seen = visible(seqlen_q, seqlen_k, causal=causal, q_offset=q_offset).expand(len(q), 1, seqlen_q, seqlen_k)
    if k_lengths is not None:
        seen = seen & (torch.arange(seqlen_k) < k_lengths[:, None, None, None])
    return first_in_order(index_scores(q, k, weights)[:, None], seen, n)


def top_blocks(
    q: Tensor,
    k: Tensor,
    block: int,
    n: int,
    *,
    causal: bool = True,
    q_offset: int | None = None,
    own: bool = True,
    first: bool = True,
) -> Tensor:
    """As :func:`pyattn.selection.top_blocks`, for an int q_offset and finite scores."""
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    means = [part.mean(2) for part in k.split(block, 2)]
    group = q.shape[1] // k.shape[1]
    scores = (q.unflatten(1, (-1, group)) @ torch.stack(means, 2).unsqueeze(2).mT).sum(2)
    position = torch.arange(seqlen_q)[:, None] + (seqlen_k - seqlen_q if q_offset is None else q_offset)
    begin = torch.arange(len(means)) * block
    seen = begin <= position if causal else torch.ones(seqlen_q, len(means), dtype=torch.bool)
    if first:
        scores = scores.masked_fill(begin == 0, 1e30)
    if own:
        scores = scores.masked_fill((begin <= position) & (position < begin + block), math.inf)
    return first_in_order(scores, seen, n)


def indexer_loss(
    q: Tensor,
    k: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    index_weights: Tensor,
    selected: Tensor | None = None,
    *,
    causal: bool = True,
    q_offset: int | Tensor | None = None,
    softmax_scale: float | None = None,
) -> Tensor:
    """As :func:`pyattn.selection.indexer_loss`."""
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    group = q.shape[1] // k.shape[1]
    seen = visible(seqlen_q, seqlen_k, causal=causal, q_offset=q_offset).expand(len(q), 1, seqlen_q, seqlen_k)
    if selected is not None:
        seen = seen & (selected.unsqueeze(-1) == torch.arange(seqlen_k)).any(-2)
    seen = seen[:, 0]
    scale = default_scale(q.shape[3]) if softmax_scale is None else softmax_scale
    pairs = (q @ k.repeat_interleave(group, 1).mT * scale).masked_fill(~seen[:, None], -math.inf)
    p = torch.softmax(pairs, -1).nan_to_num(0.0).mean(1).detach()
    scores = index_scores(index_q, index_k, index_weights)
    total = torch.logsumexp(torch.where(seen, scores, -1e30), -1, keepdim=True)  # a query without keys has a finite one
    terms = p * (p.clamp(min=1e-300).log() - (scores - total))
    return torch.where(seen & (p > 0), terms, 0.0).sum(-1)
