"""The code that ranks run for test_cached.py: a text continued over caches that hold its keys together."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from support.ranks.ranks import summed
from torch import Tensor

from pyattn import KVCache, attention_with_cache, distributed
from pyattn.masks import tree

LEARNED = ("bias", "alibi_slopes", "sinks", "relative_bias")


def filled(k: Tensor, v: Tensor, lengths: Tensor, page_size: int | None) -> KVCache:
    """A cache of the first ``lengths`` keys of each sequence."""
    batch, heads, seqlen, dim = k.shape
    cache = KVCache(batch, heads, seqlen + 3, dim, head_dim_v=v.shape[3], dtype=k.dtype, page_size=page_size)
    cache.append(k, v, lengths)
    return cache


def decoded(
    group: dist.ProcessGroup,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    gradients: tuple[Tensor, Tensor],
    options: dict[str, Any],
) -> list[Tensor]:
    """The results over keys of which rank r has ``lengths[r]`` of each sequence, one after the other."""
    rank = dist.get_rank(group)
    first, own = lengths[:rank].sum(0), lengths[rank]
    at = (first[:, None] + torch.arange(max([0, *own.tolist()]))).clamp(max=k.shape[2] - 1)
    parts = [t.gather(2, at[:, None, :, None].expand(-1, t.shape[1], -1, t.shape[3])) for t in (k, v)]
    cache = filled(*parts, own, 16 if rank % 2 else None)
    given = dict(options)
    for name in ("mask", "bias"):
        if name in given and given[name].shape[-1] == k.shape[2]:  # the columns of this cache; the last are never used
            columns = given[name].gather(-1, at[:, None, None].expand(*given[name].shape[:3], -1))
            given[name] = torch.nn.functional.pad(columns, (0, 3))
    found = results(distributed.attention_with_cache, q, cache, gradients, given, group)
    if "bias" in given and given["bias"].shape[-1] == cache.max_seqlen:
        columns = torch.where(torch.arange(at.shape[1]) < own[:, None], 1, 0)[:, None, None] * found[4][..., :-3]
        whole = torch.zeros_like(options["bias"]).scatter_add(-1, at[:, None, None].expand_as(columns), columns)
        found[4] = summed(whole, group)
    return found


def results(
    function: Any, q: Tensor, cache: KVCache, gradients: tuple[Tensor, Tensor], options: dict[str, Any], *group: Any
) -> list[Tensor]:
    """out, lse, max_score, dq and the gradients of LEARNED; q lies in memory as (B, Sq, Hq, D)."""
    leaves = {name: options[name].detach().requires_grad_() for name in LEARNED if name in options}
    q = q.transpose(1, 2).contiguous().transpose(1, 2).detach().requires_grad_()
    found = function(q, cache, *group, return_lse=True, return_max_score=True, **options | leaves)
    differentiated = torch.autograd.grad(found[:2], [q, *leaves.values()], gradients)
    return [*(t.detach() for t in found), *differentiated]


def continued(group: dist.ProcessGroup, k: Tensor, v: Tensor, q: Tensor, prompt: int) -> list[Tensor]:
    """The prompt cut among the ranks, then token by token; the last rank appends."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    parts = [distributed.shard(t[:, :, :prompt], 2, group, layout="contiguous") for t in (k, v)]
    cache = KVCache(k.shape[0], k.shape[1], k.shape[2], k.shape[3], dtype=k.dtype)
    cache.append(*parts)
    found = []
    for i in range(prompt, k.shape[2]):
        if rank == size - 1:
            cache.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
        found.append(distributed.attention_with_cache(q[:, :, i : i + 1], cache, group))
    return found


PARENTS = [-1, 0, 0, 1, 1]
ACCEPTED = [[0, 2, -1], [0, 1, 4]]
"""The tokens of the tree that each of two sequences keeps."""


def drafted(
    group: dist.ProcessGroup, k: Tensor, v: Tensor, q: Tensor, prompt: int, page_size: int | None
) -> list[Tensor]:
    """The results of trees of tokens after a prompt; dropout's seed is rank 0's. A rank alone is one process."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    attend = partial(distributed.attention_with_cache, group=group) if size > 1 else attention_with_cache
    torch.manual_seed(rank)
    cache = KVCache(k.shape[0], k.shape[1], k.shape[2], k.shape[3], dtype=k.dtype, page_size=page_size)
    cache.append(*(distributed.shard(t[:, :, :prompt], 2, group, layout="contiguous") for t in (k, v)))
    accepted, found = torch.tensor(ACCEPTED), list[Tensor]()
    for begin in range(prompt, k.shape[2] - 4, 5):
        new = slice(begin, begin + 5)
        if rank == size - 1:
            cache.append(k[:, :, new], v[:, :, new])
        options = {"mask": tree(PARENTS), "dropout_p": 0.2, "window": (30, -1)}
        found.append(attend(q[:, :, new], cache, **options))
        if rank == size - 1 and begin == prompt:
            cache.truncate(cache.lengths - 5)
        elif rank == size - 1:
            before = cache.lengths[:, None] - 5
            cache.keep(torch.where(accepted < 0, -1, before + accepted))
    return found


def appended_before_backward(group: dist.ProcessGroup, page_size: int | None) -> str:
    """The error of backward if the last rank appends before it."""
    cache = KVCache(1, 2, 8, 4, page_size=page_size)
    tokens = torch.zeros(2, 1, 2, 3, 4)
    cache.append(*tokens)
    out = distributed.attention_with_cache(torch.zeros(1, 2, 1, 4, requires_grad=True), cache, group)
    if dist.get_rank(group) == dist.get_world_size(group) - 1:
        cache.append(*tokens)
    try:
        out.sum().backward()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def refusal(group: dist.ProcessGroup, changes: dict[int, dict[str, Any]], window: tuple[int, int] | None) -> str:
    """The error of a call in which some ranks pass other arguments."""
    cache = KVCache(1, 2, 8, 4, window=window)
    cache.append(*torch.zeros(2, 1, 2, 3, 4))
    arguments = {"q": torch.zeros(1, 2, 1, 4)} | changes.get(dist.get_rank(group), {})
    try:
        distributed.attention_with_cache(cache=cache, group=group, **arguments)
    except (TypeError, ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
