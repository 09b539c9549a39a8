"""The formula, step by step, for every feature that the native function has."""

import math
from typing import Any

import torch
from torch import Tensor

from pyattn.options.dropout import draw_seed, dropout_factor, dropout_mask


def default_scale(head_dim: int) -> float:
    """``1 / sqrt(head_dim)``, or 1 if there is nothing to sum over."""
    return 1.0 / math.sqrt(head_dim) if head_dim else 1.0


def _bounded(q_offset: int | Tensor, shift: int, low: int, high: int, device: torch.device | None) -> int | Tensor:
    """``q_offset + shift`` clamped to [low, high] in Python ints, which don't overflow; a tensor as (B, 1, 1, 1)."""
    if isinstance(q_offset, Tensor):
        offsets = [min(max(offset + shift, low), high) for offset in q_offset.tolist()]
        return torch.tensor(offsets, dtype=torch.int64, device=device)[:, None, None, None]
    return min(max(q_offset + shift, low), high)


def visible(
    seqlen_q: int,
    seqlen_k: int,
    *,
    causal: bool = True,
    q_offset: int | Tensor | None = None,
    window: tuple[int, int] = (-1, -1),
    key_ranges: Tensor | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """The keys that are visible to each query: bool, True = takes part.

    Query ``i`` is at key position ``i + q_offset``. Key ``j`` is visible to it if all of these hold::

        causal                 j <= i + q_offset
        window[0] >= 0         j >= i + q_offset - window[0]
        window[1] >= 0         j <= i + q_offset + window[1]
        key_ranges             key_ranges[b, i, n, 0] <= j < key_ranges[b, i, n, 1] for some n

    The default offset ``seqlen_k - seqlen_q`` aligns the last query with the last key::

        seqlen_q 2, seqlen_k 4     q_offset 2 (default)     q_offset 0 (upper left)     q_offset 2, window (1, -1)
                                   1 1 1 0                  1 0 0 0                     0 1 1 0
                                   1 1 1 1                  1 1 0 0                     0 0 1 1

    Returns:
        (seqlen_q, seqlen_k), and (B or 1, 1, seqlen_q, seqlen_k) where ``q_offset`` or ``key_ranges`` is a tensor.
    """
    offset = seqlen_k - seqlen_q if q_offset is None else q_offset
    query = torch.arange(seqlen_q, device=device)[:, None]
    key = torch.arange(seqlen_k, device=device)
    visible_pairs = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    # Bounds for query 0: one beyond [-seqlen_q, seqlen_k] hides no more keys from any query.
    around = -seqlen_q - 1, seqlen_k + 1
    left, right = window
    if causal:
        visible_pairs = visible_pairs & (key <= query + _bounded(offset, 0, *around, device))
    if right >= 0:
        visible_pairs = visible_pairs & (key <= query + _bounded(offset, right, *around, device))
    if left >= 0:
        visible_pairs = visible_pairs & (key >= query + _bounded(offset, -left, *around, device))
    if key_ranges is not None:
        intervals = key_ranges if key_ranges.dim() == 4 else key_ranges[:, :, None]
        begin, end = intervals.to(device)[:, None, :, :, None].unbind(-1)
        visible_pairs = visible_pairs & ((begin <= key) & (key < end)).any(3)
    return visible_pairs


def selected_pairs(selected: Tensor, selected_block: int, num_heads: int, seqlen_k: int) -> Tensor:
    """The pairs of a query and a key that its list has: key j is in the list's entry ``j // selected_block``.

    Args:
        selected: (B or 1, lists, Sq, n), entries -1 stand for none; neighbouring heads share each of the lists.
        selected_block: how many neighbouring keys an entry stands for.
        num_heads: a multiple of the number of lists.
        seqlen_k: the number of keys.

    Returns:
        bool (B or 1, num_heads, Sq, Sk).
    """
    entry = torch.arange(seqlen_k, device=selected.device) // selected_block
    found = (selected.unsqueeze(-1) == entry).any(-2)
    return found.repeat_interleave(num_heads // max(1, selected.shape[1]), 1)


def distances(
    seqlen_q: int, seqlen_k: int, *, q_offset: int | Tensor | None = None, device: torch.device | None = None
) -> Tensor:
    """``j - (i + q_offset)`` for query i and key j, float64: (seqlen_q, seqlen_k), or (B, 1, ...) for (B,) offsets."""
    offset = seqlen_k - seqlen_q if q_offset is None else q_offset
    if isinstance(offset, Tensor):
        offset = offset.to(device, torch.float64)[:, None, None, None]
    query = torch.arange(seqlen_q, dtype=torch.float64, device=device)[:, None]
    return torch.arange(seqlen_k, device=device) - (query + offset)


def _scores(q: Tensor, k: Tensor, visible_pairs: Tensor, finite: bool) -> Tensor:
    """``q k^T`` over the last dimension. Unless all is finite, masked pairs are set to 0 first: 0 * nan is nan."""
    if finite:
        return q @ k.mT
    pair = visible_pairs.unsqueeze(-1)
    return (torch.where(pair, q.unsqueeze(-2), 0) * torch.where(pair, k.unsqueeze(-3), 0)).sum(-1)


def _combine(weights: Tensor, v: Tensor, visible_pairs: Tensor, finite: bool) -> Tensor:
    """``weights v`` over the keys; unless all is finite, masked values are set to 0 first."""
    if finite:
        return weights @ v
    return (weights.unsqueeze(-1) * torch.where(visible_pairs.unsqueeze(-1), v.unsqueeze(-3), 0)).sum(-2)


def _log_sum_exp(scores: Tensor) -> Tensor:
    """``log sum_j exp(s_j)``; torch.logsumexp's gradient, ``exp(s_j - lse)``, is wrong where lse loses log n."""
    if scores.shape[-1] == 0:
        return torch.logsumexp(scores, -1)
    top = scores.detach().amax(-1, keepdim=True)
    top = top.masked_fill(top.isinf(), 0.0)
    return (scores - top).exp().sum(-1).log() + top.squeeze(-1)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    q_offset: int | Tensor | None = None,
    window: tuple[int, int] = (-1, -1),
    key_ranges: Tensor | None = None,
    mask: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    relative_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    selected: Tensor | None = None,
    selected_block: int = 1,
    return_lse: bool = False,
    return_max_score: bool = False,
    return_weights: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """``out = dropout(softmax(score))[..., :Sk] v``, where the score of query i and key j is, in this order::

        s = softmax_scale <q_i, k_j>
        s = softcap tanh(s / softcap)                  if softcap > 0
        s = s + bias_ij
        s = s + relative_bias[clamp(j - (i + q_offset), -R, R) + R]
        s = s - alibi_slope |i + q_offset - j|
        s = -inf                                       if j is hidden from i: visible(), mask_ij False, bias_ij -inf
        and an extra column without a value, the head's sink

    Args:
        q: (B, Hq, Sq, D).
        k: (B, Hkv, Sk, D); query head ``h`` reads KV head ``h // (Hq // Hkv)``.
        v: (B, Hkv, Sk, Dv).
        causal, q_offset, window, key_ranges: see :func:`visible`.
        softmax_scale: default ``1 / sqrt(D)``.
        softcap: default 0: no cap.
        mask: bool, True = takes part; broadcastable to (B, Hq, Sq, Sk).
        bias: added to the scores; broadcasts in the same way. NaN at a masked key has no effect.
        alibi_slopes: (Hq) or (B, Hq).
        sinks: (Hq); -inf means no sink.
        relative_bias: (Hq or 1, 2 R + 1) or (B, Hq or 1, 2 R + 1).
        dropout_p, dropout_seed: drops weights by :func:`pyattn.dropout_mask`; the seed is drawn if None.
        selected, selected_block: see :func:`selected_pairs`.
        return_lse: also return the natural log of the softmax denominator, (B, Hq, Sq), float32 or float64.
        return_max_score: also return the largest score of each head after the mask and before sinks, (B, Hq), in
            lse's dtype: -inf where no key is visible.
        return_weights: also return the weights that multiply ``v``, (B, Hq, Sq, Sk), after dropout.

    Returns:
        ``out`` (B, Hq, Sq, Dv), then lse, max_score and weights if requested. A row without a visible key has out 0
        and lse -inf; with a sink, lse is the sink. Masked positions never affect the result, even if they hold NaN;
        compiled code can't inspect values and takes all of them as finite.
    """
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    scale = default_scale(q.shape[3]) if softmax_scale is None else softmax_scale
    where: dict[str, Any] = {"causal": causal, "q_offset": q_offset, "window": window, "key_ranges": key_ranges}
    visible_pairs = visible(seqlen_q, seqlen_k, **where, device=q.device)
    if mask is not None:
        visible_pairs = visible_pairs & mask
    if selected is not None:
        visible_pairs = visible_pairs & selected_pairs(selected, selected_block, q.shape[1], seqlen_k)
    if bias is not None:
        visible_pairs = visible_pairs & (bias != -math.inf)
    finite = torch.compiler.is_compiling() or q.is_meta or all(bool(t.isfinite().all()) for t in (q, k, v))

    scores = _scores(q, k, visible_pairs, finite) * scale
    if softcap > 0.0:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + torch.where(visible_pairs, bias, 0.0)
    if relative_bias is not None:
        batch, reach = len(q), relative_bias.shape[-1] // 2
        ahead = distances(seqlen_q, seqlen_k, q_offset=q_offset, device=q.device).clamp(-reach, reach).long()
        places = (ahead + reach).expand(batch, 1, seqlen_q, seqlen_k)
        tables = relative_bias.expand(batch, *relative_bias.shape[-2:])
        values = torch.stack([table[:, own[0]] for table, own in zip(tables, places, strict=True)])
        scores = scores + torch.where(visible_pairs, values, 0.0)
    if alibi_slopes is not None:
        far = distances(seqlen_q, seqlen_k, q_offset=q_offset, device=q.device).abs()
        dtype = torch.promote_types(scores.dtype, alibi_slopes.dtype)
        scores = scores - alibi_slopes[..., None, None].to(dtype) * far.to(dtype)
    columns = visible_pairs.expand(scores.shape)
    if sinks is not None:
        sink = sinks[:, None, None].expand(*scores.shape[:3], 1)
        scores, columns = torch.cat([scores, sink], -1), torch.cat([columns, sink != -math.inf], -1)
    empty = ~columns.any(-1, keepdim=True)
    scores = scores.masked_fill(~columns, -math.inf).masked_fill(empty, 0.0)
    weights = torch.softmax(scores, -1)[..., :seqlen_k].masked_fill(~visible_pairs, 0.0).to(q.dtype)
    if dropout_p > 0.0:
        seed = draw_seed(q.device) if dropout_seed is None else dropout_seed
        batch, num_heads_q = q.shape[:2]
        kept = dropout_mask(seed, batch, num_heads_q, seqlen_q, seqlen_k, dropout_p)
        weights = weights.masked_fill(~kept.to(q.device), 0.0) * dropout_factor(dropout_p)
    out = _combine(weights, v, visible_pairs, finite)

    results: tuple[Tensor, ...] = (out,)
    if return_lse:
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
        results += (_log_sum_exp(wide).masked_fill(empty.squeeze(-1), -math.inf),)
    if return_max_score:
        pairs = scores[..., :seqlen_k].masked_fill(~visible_pairs, -math.inf).flatten(2)
        largest = torch.nn.functional.pad(pairs, (0, 1), value=-math.inf).amax(-1)
        results += (largest.to(torch.promote_types(largest.dtype, torch.float32)),)
    if return_weights:
        results += (weights,)
    return results if len(results) > 1 else out
