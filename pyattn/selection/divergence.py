"""The divergence of an indexer's distribution from attention's, in blocks of the queries of one sequence."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding

from pyattn.derivatives.recomputing import recomputing
from pyattn.options.checks import has_values
from pyattn.selection.ranking import visible_counts

NUMBERS_AT_ONCE = 2**21
"""Numbers in the largest tensor of a block of queries: 8 MB in float32."""


class Attention(NamedTuple):
    """q (Hq, Sq, D) and k (Hkv, Sk, D), without gradients, and the factor on their products."""

    q: Tensor
    k: Tensor
    scale: float


class Indexer(NamedTuple):
    """q (Hi, Sq, Di), k (Sk + 1, Di), whose last row is 0, and weights (Hi, Sq), in float32 or float64."""

    q: Tensor
    k: Tensor
    weights: Tensor


class Block(NamedTuple):
    """Some queries and their keys: a list for each, or the first ``last``.

    Attributes:
        rows: the queries.
        counts: int64 (rows,), how many keys each of them sees.
        last: the largest count.
        keys: int64 (rows, n), Sk for none; None without lists.
    """

    rows: slice
    counts: Tensor
    last: int
    keys: Tensor | None


def divergences(attention: Attention, indexer: Indexer, lists: Tensor | None, causal: bool, offset: int) -> Tensor:
    """(Sq,): KL(p || softmax(score)) of each query over its list (Sq, n), or over all keys that it sees."""
    heads, seqlen_q, head_dim = attention.q.shape
    heads_kv, seqlen_k, _ = attention.k.shape
    if not seqlen_k:
        lists = None
    columns = max(heads, len(indexer.q))
    finite = all(bool(t.isfinite().all()) for t in indexer) if all(map(has_values, indexer)) else None  # not known
    if lists is not None or finite is False:
        columns = max(columns, heads_kv * head_dim, indexer.k.shape[1])
    step = max(1, NUMBERS_AT_ONCE // max(1, columns * (seqlen_k if lists is None else lists.shape[1])))
    compute = recomputing(_divergence, (*indexer, *attention))
    found = []
    for start in range(0, max(1, seqlen_q), step):  # a block without queries keeps the graph
        rows = slice(start, min(start + step, seqlen_q))
        counts = visible_counts(start + offset, rows.stop - start, seqlen_k, causal, attention.q.device)
        last = max(0, min(rows.stop + offset, seqlen_k)) if causal else seqlen_k
        keys = None if lists is None else _listed(lists[rows], counts, seqlen_k)
        block = Block(rows, counts, last, keys)
        target = partial(_weights, attention, block)
        if keys is not None:
            known = target()  # (rows, n): small enough to keep for the backward
            target = partial(lambda weights: weights, known)
        found.append(compute(target, indexer, block, finite))
    return torch.cat(found)


def _listed(lists: Tensor, counts: Tensor, none: int) -> Tensor:
    """int64 (rows, n): the visible keys of each list, each once, and ``none`` elsewhere."""
    keys = lists.to(torch.int64).sort(dim=-1).values
    repeated = torch.zeros_like(keys, dtype=torch.bool)
    repeated[:, 1:] = keys[:, 1:] == keys[:, :-1]
    return keys.masked_fill_(repeated | (keys < 0) | (keys >= counts[:, None]), none)


def _visible(block: Block, seqlen_k: int) -> Tensor:
    """bool (rows, n), or (rows, last) without lists."""
    if block.keys is not None:
        return block.keys < seqlen_k
    return torch.arange(block.last, device=block.counts.device) < block.counts[:, None]


def _softmax_input(scores: Tensor, visible: Tensor) -> Tensor:
    """The scores, -inf at hidden keys; 0 where a query sees none."""
    empty = ~visible.any(-1, keepdim=True)
    return scores.masked_fill(~visible, -math.inf).masked_fill(empty, 0.0)


@torch.no_grad()
def _weights(attention: Attention, block: Block) -> Tensor:
    """p (rows, keys) in float32 or float64: attention's weights, averaged over its heads; 0 at hidden keys."""
    heads_kv, seqlen_k, _ = attention.k.shape
    wide = torch.promote_types(attention.q.dtype, torch.float32)
    visible = _visible(block, seqlen_k)
    q = attention.q[:, block.rows].to(wide) * attention.scale
    q = q.unflatten(0, (heads_kv, -1)) if heads_kv else q.unsqueeze(0)  # (Hkv, group, rows, D)
    if block.keys is None:
        k = attention.k[:, : block.last].to(wide)
        scores = (q.flatten(1, 2) @ k.mT).unflatten(1, q.shape[1:3])
    else:
        k = attention.k[:, block.keys.clamp(max=seqlen_k - 1)].to(wide)  # (Hkv, rows, n, D)
        scores = (q.transpose(1, 2) @ k.mT).transpose(1, 2)
    weights = torch.softmax(_softmax_input(scores, visible), -1).mean((0, 1))
    return weights.masked_fill(~visible, 0.0)


def _divergence(target: Callable[[], Tensor], indexer: Indexer, block: Block, finite: bool | None) -> Tensor:
    """(rows,): the divergences of a block."""
    seqlen_k = len(indexer.k) - 1
    visible = _visible(block, seqlen_k)
    keys = block.keys
    if keys is None and finite is False:  # the gradient of a hidden pair is 0, and 0 * NaN would be NaN
        keys = torch.arange(block.last, device=visible.device).where(visible, seqlen_k)
    q, factors = indexer.q[:, block.rows], indexer.weights[:, block.rows]
    broken = None
    if keys is None:
        k = indexer.k[: block.last]
        if finite is None:
            whole = [t.isfinite() for t in (q, factors, k)]
            broken = visible & ~((whole[0].all(-1) & whole[1]).all(0)[:, None] & whole[2].all(-1))
            q, factors, k = (t.where(known, 0.0) for t, known in zip((q, factors, k), whole, strict=True))
        pairs = torch.relu(q @ k.mT).transpose(0, 1)  # (rows, Hi, keys)
    else:
        pairs = torch.relu(q.transpose(0, 1) @ embedding(keys, indexer.k).mT)
    scores = (factors.t().unsqueeze(1) @ pairs).squeeze(1)
    if broken is not None:
        scores = scores.masked_fill(broken, math.nan)
    logs = torch.log_softmax(_softmax_input(scores, visible), -1)
    weights = target().to(logs.dtype)
    return (torch.xlogy(weights, weights) - weights * logs.masked_fill(weights == 0, 0.0)).sum(-1)
