"""Products of query heads that share keys: a group's query heads are rows of one product, and no key is repeated.

Query head h reads KV head ``h // (Hq // Hkv)``.
"""

import math

import torch
from torch import Tensor

from pyattn.options.checks import has_values


def _group(queries: Tensor, keys: Tensor) -> int:
    return queries.shape[1] // max(1, keys.shape[1])


def _folded(rows: Tensor, group: int) -> Tensor:
    """(B, Hq, rows, C) -> (B, Hkv, group * rows, C)."""
    return rows if group <= 1 else rows.unflatten(1, (-1, group)).flatten(2, 3)


def _unfolded(rows: Tensor, group: int) -> Tensor:
    return rows if group <= 1 else rows.unflatten(2, (group, -1)).flatten(1, 2)


def products(q: Tensor, k: Tensor) -> Tensor:
    """``q k^T``: (B, Hq, rows, D) and (B, Hkv, Sk, D) -> (B, Hq, rows, Sk)."""
    group = _group(q, k)
    return _unfolded(_folded(q, group) @ k.mT, group)


def listed_products(q: Tensor, k: Tensor, keys: Tensor) -> Tensor:
    """The products of rows with the keys that they list, whose rows of k are gathered: (B, Hq, rows, n).

    Args:
        q: (B, Hq, rows, D).
        k: (B, Hkv, Sk, D).
        keys: int64 (B or 1, 1 or Hkv or Hq, rows, n), at least 0 and below Sk.
    """
    batch, heads = q.shape[:2]
    shared = min(max(keys.shape[1], k.shape[1]), heads)  # lists of different KV heads
    keys = keys[:, : max(1, shared)].expand(batch, shared, -1, -1)
    tracing = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    if tracing or not (has_values(q) and has_values(k) and has_values(keys)):
        return _gathered_products(q, k, keys)
    # One KV head at a time stays in a core's L2 cache while its rows are gathered.
    group = heads // max(1, shared)
    each = range(0, heads, max(1, group))
    of_kv = heads // max(1, k.shape[1])
    found = [
        _gathered_products(
            q[b : b + 1, h : h + group], k[b : b + 1, h // of_kv : h // of_kv + 1], keys[b : b + 1, h // group, None]
        )
        for b in range(batch)
        for h in each
    ]
    if not found:
        return _gathered_products(q, k, keys)
    joined: Tensor = torch.unflatten(torch.cat(found, 1), 1, (batch, heads))[0]
    return joined


def _gathered_products(q: Tensor, k: Tensor, keys: Tensor) -> Tensor:
    """:func:`listed_products` in one product; keys (B, lists, rows, n), no fewer lists than KV heads."""
    batch, num_heads_kv, seqlen_k, _ = k.shape
    lists = keys.shape[1]
    head = torch.arange(lists, device=keys.device) * num_heads_kv // max(1, lists)
    first = (torch.arange(batch, device=keys.device)[:, None] * num_heads_kv + head) * seqlen_k
    index = keys + first[..., None, None]
    gathered: Tensor = torch.unflatten(k.flatten(0, 2).index_select(0, index.flatten()), 0, index.shape)
    queries: Tensor = q.unflatten(1, (lists, q.shape[1] // max(1, lists))).transpose(2, 3)
    return (queries @ gathered.mT).transpose(2, 3).flatten(1, 2)


def sum_over_keys(weights: Tensor, v: Tensor) -> Tensor:
    """``weights v``: (B, Hq, rows, Sk) and (B, Hkv, Sk, C) -> (B, Hq, rows, C)."""
    group = _group(weights, v)
    return _unfolded(_folded(weights, group) @ v, group)


def sum_over_rows(weights: Tensor, rows: Tensor, num_heads_kv: int) -> Tensor:
    """``weights^T rows``: (B, Hq, rows, Sk) and (B, Hq, rows, C) -> (B, Hkv, Sk, C), summed over a group's heads."""
    group = rows.shape[1] // max(1, num_heads_kv)
    return _folded(weights, group).mT @ _folded(rows, group)


def sum_over_visible_keys(weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """``weights v`` for weights that are 0 where not ``visible``; a row is NaN if it sees a key that is not finite."""
    finite = v.isfinite()
    if has_values(finite) and finite.all():
        return sum_over_keys(weights, v)
    broken = (~finite.all(-1)).repeat_interleave(_group(weights, v), 1)[:, :, None]
    return sum_over_keys(weights.masked_fill(visible & broken, math.nan), torch.where(finite, v, 0.0))


def sum_over_visible_rows(weights: Tensor, rows: Tensor, visible: Tensor, num_heads_kv: int) -> Tensor:
    """``weights^T rows`` for weights that are 0 where not ``visible``; a key is NaN if a row not finite sees it."""
    finite = rows.isfinite()
    if has_values(finite) and finite.all():
        return sum_over_rows(weights, rows, num_heads_kv)
    broken = ~finite.all(-1, keepdim=True)
    return sum_over_rows(weights.masked_fill(visible & broken, math.nan), torch.where(finite, rows, 0.0), num_heads_kv)
