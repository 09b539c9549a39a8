"""Decoding: queries that every rank has, over a sequence whose keys lie in the caches of several ranks."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from pyattn import cached
from pyattn.arguments import check_tensor, check_type, int64_of, refuse_positional
from pyattn.cache import KVCache
from pyattn.distributed.call import facts_of
from pyattn.distributed.ranks import Group, Ranks, agree, gather_words, ranks_of
from pyattn.key_ranges import check_ranges, plain
from pyattn.ops.schema import LEARNED, Options
from pyattn.options import AttentionOptions
from pyattn.parse import parse, takes_options


@takes_options
def attention_with_cache(
    q: Tensor,
    cache: KVCache,
    group: Group = None,
    *positional: object,
    return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`pyattn.attention_with_cache` over a sequence whose keys lie in the caches of several ranks.

    Rank 0's cache holds the first keys of each sequence, the next rank's those after them, and so on. Each rank
    computes the queries over its own keys; one exchange merges the results, in the order of the ranks, so all ranks get
    the same bits. To continue a text, only the last rank appends the keys of the new tokens.

    Args:
        q: (B, Hq, Sq, D), the same on all ranks: the newest Sq positions.
        cache: this rank's keys and values: a :class:`pyattn.KVCache` without a ring buffer.
        group: the ranks: a process group or a mesh of one dimension; None: all.
        return_lse: also return lse.
        options: as for :func:`pyattn.attention_with_cache`, with positions of the whole sequence and these differences.
            q_offset: after an append with lengths, pass it: the ranks do not know that append. mask, bias: the columns
            of this rank's own cache, max_seqlen of them.

    Returns:
        ``out`` (B, Hq, Sq, Dv) or ``(out, lse)``, on every rank, without a gradient.

    Raises:
        ValueError, TypeError: as for :func:`pyattn.attention_with_cache`. If the arguments of ranks differ, or one
            rank's are wrong, every rank raises.
        NotImplementedError: dropout, a ring buffer, an argument that requires a gradient.
    """
    if positional:
        refuse_positional(attention_with_cache, positional)
    ranks, error = ranks_of(group), None
    known, facts, words = Options(), dict[str, Any](), [0, 0]
    try:
        known = _checked(q, cache, options)
        facts = {"dtype": str(q.dtype), "shape of q": list(q.shape), "cache's sizes": _sizes(cache)} | facts_of(known)
        words = [int(end) for end in cache.lengths.aminmax()] if len(cache.lengths) else words
    except (TypeError, ValueError, NotImplementedError) as problem:  # all ranks must hear of it
        error = problem
    rows = agree("attention_with_cache", ranks, facts, words, error)
    lengths = _lengths(cache, rows, ranks)
    out = cache.v.new_empty(*q.shape[:3], cache.v.shape[-1])
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(out.dtype, torch.float32))
    try:
        own = _over_own_keys(q, lengths, ranks.own, options)
        with torch.no_grad():
            out, lse = cached.attention_with_cache(q, cache, return_lse=True, **own)
    except (TypeError, ValueError, NotImplementedError) as problem:
        error = problem
    parts = _exchanged(out, lse, ranks, error)
    out, lse = _merged(parts)
    return (out, lse) if return_lse else out


def _checked(q: Tensor, cache: KVCache, options: AttentionOptions) -> Options:
    """The options of a call, parsed; raises if this rank's arguments can't be used on several ranks."""
    check_tensor("q", q)
    check_type("cache", cache, KVCache)
    if q.dim() != 4:
        raise ValueError(f"pyattn: q must be (batch, heads, positions, head_dim), got shape {tuple(q.shape)}")
    if cache.window is not None:
        raise NotImplementedError("pyattn: a ring buffer on several ranks is not implemented; its keys fit one rank")
    known = Options(*parse(attention_with_cache, options, q.device))
    if known.dropout_p:
        raise NotImplementedError(
            f"pyattn: dropout over caches on several ranks is not implemented, got dropout_p {known.dropout_p}"
        )
    if torch.is_grad_enabled():
        for name in LEARNED:
            _refuse_gradient(name, getattr(known, name))
        _refuse_gradient("q", q)
    return known


def _refuse_gradient(name: str, tensor: Tensor | None) -> None:
    if tensor is not None and tensor.requires_grad:
        raise NotImplementedError(
            f"pyattn: attention_with_cache on several ranks has no derivatives, but {name} requires one; call it "
            "under torch.no_grad()"
        )


def _sizes(cache: KVCache) -> list[int]:
    """The sizes that the ranks' caches must have in common: batch, KV heads, columns of k and v."""
    k, paged = cache.k, cache.block_table is not None
    return [len(cache.lengths), k.shape[2] if paged else k.shape[1], k.shape[-1], cache.v.shape[-1]]


def _lengths(cache: KVCache, rows: list[list[int]], ranks: Ranks) -> Tensor:
    """(ranks, B): the keys that each rank has of each sequence, given the shortest and the longest of each rank."""
    if all(shortest == longest for shortest, longest in rows):
        found = [[length] * len(cache.lengths) for length, _ in rows]
    else:
        found = gather_words(cache.lengths.tolist(), ranks)
    return cache.lengths.new_tensor(found)


def _over_own_keys(q: Tensor, lengths: Tensor, rank: int, options: AttentionOptions) -> AttentionOptions:
    """The options of this rank's call: positions count from its first key."""
    before, length, total = lengths[:rank].sum(0), lengths[rank], lengths.sum(0)
    q_offset, key_ranges = options.get("q_offset"), plain(options.get("key_ranges"), options.get("causal", True))
    if q_offset is None:
        q_offset = total - q.shape[2]
    own: AttentionOptions = {
        **options,
        "q_offset": (int64_of(q_offset) if isinstance(q_offset, Tensor) else q_offset) - before,
    }
    if key_ranges is not None and key_ranges.dim() in (3, 4):  # attention refuses others
        if not key_ranges.is_cuda:
            check_ranges(key_ranges, int(total.max()))
        each = (slice(None), *(None,) * (key_ranges.dim() - 1))
        own["key_ranges"] = (key_ranges - before[each]).clamp(min=0).minimum(length[each])
    if rank:
        own["sinks"] = None  # rank 0 counts them
    return own


def _exchanged(out: Tensor, lse: Tensor, ranks: Ranks, error: Exception | None) -> list[tuple[Tensor, Tensor]]:
    """The results of all ranks; raises on all if one has an error. Bytes, because gloo knows few dtypes."""
    mine = torch.cat(
        [t.contiguous().view(-1).view(torch.uint8) for t in (lse, out)]
        + [out.new_full((1,), error is not None, dtype=torch.uint8)]
    )
    found = [torch.empty_like(mine) for _ in range(ranks.size)]
    dist.all_gather(found, mine, group=ranks.group)
    if any(bool(part[-1]) for part in found):
        agree("attention_with_cache", ranks, {}, [], error)
    sizes = [lse.numel() * lse.element_size(), out.numel() * out.element_size(), 1]
    split = (part.split(sizes) for part in found)
    return [(outs.view(out.dtype).view_as(out), lses.view(lse.dtype).view_as(lse)) for lses, outs, _ in split]


def _merged(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The results over all keys, merged in float32 or more."""
    lses = torch.stack([lse for _, lse in parts])
    most = lses.amax(0)
    weights = torch.exp(lses - most.masked_fill(most == -math.inf, 0.0))
    total = weights.sum(0)
    weights = (weights / total).masked_fill(total == 0, 0.0).unsqueeze(-1)
    out = torch.zeros_like(parts[0][0], dtype=lses.dtype)
    for weight, (part, _) in zip(weights, parts, strict=True):
        out += weight * part
    return out.to(parts[0][0].dtype), most + torch.log(total)
