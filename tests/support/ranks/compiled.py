"""The code that ranks run for test_compiled.py: eager and compiled calls of the same function on parts."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from support.ranks.parallel import D_IN, made, step
from support.ranks.ranks import mesh_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import pyattn
from pyattn import KVCache, distributed

LEARNED = ("bias", "alibi_slopes", "sinks", "relative_bias")


def both(
    group: dist.ProcessGroup,
    name: str,
    meshed: bool,
    whole: Sequence[Tensor],
    cu_seqlens: Sequence[Tensor],
    options: dict[str, Any],
) -> list[list[Tensor]]:
    """out, lse, max_score and all gradients: eager, then from one compiled graph."""
    function, dim = getattr(distributed, name.partition(" ")[0]), 0 if cu_seqlens else 2
    place = mesh_of(name) or (DeviceMesh.from_group(group, "cpu") if meshed else group)
    given = {
        key: value.detach().clone().requires_grad_() if key in LEARNED else value for key, value in options.items()
    }
    cut: dict[str, Any] = {"layout": "zigzag_varlen"} if cu_seqlens else {}
    begins = {"cu_seqlens": cu_seqlens[0]} if cu_seqlens else {}
    leaves = [distributed.shard(t, dim, place, **cut, **begins).requires_grad_() for t in whole]
    learned = [given[key] for key in LEARNED if key in given]

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        wanted = {"return_lse": True, "return_max_score": True}
        out, lse, most = function(q * 2, k, v, *cu_seqlens, place, **wanted, **cut, **given)
        assert not most.requires_grad
        return out.sin(), lse, most

    torch.compiler.reset()  # its limit of graphs counts those of other cases
    found = []
    for run in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(dist.get_rank(group))
        results = run(*leaves)
        gradients = torch.autograd.grad(results[:2], [*leaves, *learned], [torch.ones_like(t) for t in results[:2]])
        found.append([*(t.detach() for t in results), *gradients])
    return found


def error_of(group: dist.ProcessGroup, name: str, graphs: int, trains: bool, softcaps: Sequence[float]) -> str:
    """The error of a call that several ranks compile, each with its own softcap; "" if there is none."""
    rank = dist.get_rank(group)
    q, cache = torch.zeros(1, 2, 4, 8, requires_grad=trains), KVCache(1, 2, 8, 8)
    arguments = (cache,) if name == "attention_with_cache" else (q, q)
    attend = partial(getattr(distributed, name), group=group, window=(3, 0), softcap=softcaps[rank])

    def call(q: Tensor) -> Any:
        return attend(q, *arguments)

    try:
        (torch.compile(call, fullgraph=True, backend="aot_eager") if rank < graphs else call)(q)
    except ValueError as error:
        return str(error)
    return ""


def strided(group: dist.ProcessGroup, whole: Sequence[Tensor]) -> list[list[Tensor]]:
    """out and all gradients: eager, then by Inductor; heads are outermost in memory."""
    parts = (distributed.shard(t, 2, group) for t in whole)
    leaves = [t.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for t in parts]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return distributed.ring_attention(q, k, v, group)

    outs = [run(*leaves) for run in (call, torch.compile(call, fullgraph=True))]
    return [[out.detach(), *torch.autograd.grad(out.sum(), leaves)] for out in outs]


def decoded(
    group: dist.ProcessGroup,
    k: Tensor,
    v: Tensor,
    q: Tensor,
    page_size: int | None,
    options: dict[str, Any],
) -> list[list[Tensor]]:
    """The same over this rank's part of a cache, with and without gradients."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    given = {
        key: value.detach().clone().requires_grad_() if key in LEARNED else value for key, value in options.items()
    }
    leaves = [q.clone().requires_grad_(), *(given[key] for key in LEARNED if key in given)]

    def call(q: Tensor, cache: KVCache) -> tuple[Tensor, Tensor, Tensor]:
        wanted = {"return_lse": True, "return_max_score": True}
        out, lse, most = distributed.attention_with_cache(q * 2, cache, group, **wanted, **given)
        assert not most.requires_grad
        return out.sin(), lse, most

    torch.compiler.reset()  # its limit of graphs counts those of other cases
    found = []
    for run in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(rank)
        cache = KVCache(k.shape[0], k.shape[1], k.shape[2], k.shape[3], dtype=k.dtype, page_size=page_size)
        cache.append(*(distributed.shard(t, 2, group, layout="contiguous") for t in (k[:, :, :-1], v[:, :, :-1])))
        if rank == size - 1:
            cache.append(k[:, :, -1:], v[:, :, -1:])
        results = run(leaves[0], cache)
        if page_size is not None:
            cache.reset()
            cache.append(v[:, :, :16], k[:, :, :16])  # into the same pages
        gradients = torch.autograd.grad(results[:2], leaves, [torch.ones_like(t) for t in results[:2]])
        found.append([*(t.detach() for t in results), *gradients])
        with torch.no_grad():
            found[-1] += run(leaves[0], cache)
    return found


def changed_after(group: dist.ProcessGroup, page_size: int | None) -> list[Tensor]:
    """dq over a cache, eager; then by Inductor, in a graph that replaces rows of the cache after attention."""
    generator = torch.Generator().manual_seed(dist.get_rank(group))
    rows = torch.randn(4, 1, 2, 5, 8, generator=generator)
    q = torch.linspace(-1, 1, 160).view(1, 4, 5, 8).requires_grad_()

    def call(q: Tensor, cache: KVCache, changes: bool) -> Tensor:
        out = distributed.attention_with_cache(q, cache, group)
        assert isinstance(out, Tensor)
        if changes:
            cache.truncate(2)
            cache.append(*rows[2:])
        return out.sin().sum()

    torch.compiler.reset()
    found = []
    for run in (call, torch.compile(call, fullgraph=True)):
        cache = KVCache(1, 2, 20, 8, page_size=page_size)
        cache.append(*rows[:2])
        found += torch.autograd.grad(run(q, cache, run is not call), q)
    return found


def of_dtensors(
    group: dist.ProcessGroup,
    name: str,
    dims: Sequence[int],
    whole: Sequence[Tensor],
    packing: Sequence[Any],
    options: dict[str, Any],
) -> list[list[Tensor]]:
    """out, max_score and all gradients of DTensors that are sharded in these dimensions: eager, then from one graph."""
    mesh = mesh_of("mesh 4x2") if len(dims) > 1 else DeviceMesh.from_group(group, "cpu")
    leaves = [distribute_tensor(t, mesh, [Shard(dim) for dim in dims]).requires_grad_() for t in whole]
    slopes = options["alibi_slopes"].clone().requires_grad_()

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        given = options | {"alibi_slopes": slopes, "return_max_score": True}
        out, most = getattr(pyattn, name)(q * 2, k, v, *packing, **given)
        return out.sin(), most

    torch.compiler.reset()  # its limit of graphs counts those of other cases
    found = []
    for run in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(dist.get_rank(group))
        out, most = run(*leaves)
        results = out.detach(), most, *torch.autograd.grad(out.sum(), [*leaves, slopes])
        found.append([t.full_tensor() if isinstance(t, DTensor) else t for t in results])
    return found


def of_module(group: dist.ProcessGroup, name: str) -> list[list[Tensor]]:
    """The results of :func:`parallel.step` of a divided module, and those of one graph of it."""
    module = distributed.tensor_parallel(made(name, torch.float64, 0.3, {}), DeviceMesh.from_group(group, "cpu"))
    x = torch.randn(2, 7, D_IN, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    torch.compiler.reset()
    graph = torch.compile(module, fullgraph=True, backend="aot_eager")
    return [[*step(each, x, {}).values()] for each in (module, graph)]
