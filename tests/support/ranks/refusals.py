"""The code that ranks run for test_refusals.py: calls with wrong arguments."""

import functools
from typing import Any

import torch
import torch.distributed as dist
from support.ranks.ranks import mesh_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional

from pyattn import KVCache, distributed
from pyattn.distributed import shard


def refusal(group: dist.ProcessGroup, changes: dict[int, dict[str, Any]], name: str = "ring_attention") -> str:
    """The error of a call whose arguments some ranks change."""
    rank = dist.get_rank(group)
    arguments = {"q": torch.zeros(1, 2, 4, 8), "k": torch.zeros(1, 2, 4, 8), "v": torch.zeros(1, 2, 4, 8)}
    try:
        getattr(distributed, name)(**arguments | changes.get(rank, {}), group=group)
    except (TypeError, ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def packed_refusal(group: dist.ProcessGroup, qkv: Tensor, begins: Tensor, ranges: Tensor) -> str:
    """The error of key_ranges over packed sequences."""
    parts = [distributed.shard(t, 0, group, layout="contiguous") for t in (*qkv, ranges)]
    try:
        distributed.ring_attention_varlen(
            *parts[:3], begins, begins, group, layout="contiguous", causal=False, key_ranges=parts[3]
        )
    except ValueError as error:
        return str(error)
    return "no error"


def transformed(group: dist.ProcessGroup, name: str, transform: str) -> str:
    """The error of a call within a transform of torch.func; on the last rank alone if it is "one rank"."""
    x, begins = torch.zeros(1, 2, 3, 8), [torch.tensor([0, 2])] * 2 if name == "ring_attention_varlen" else []
    cache = KVCache(1, 2, 8, 8)
    cache.append(x, x)

    def call(q: Tensor) -> Tensor:
        if name == "attention_with_cache":
            return distributed.attention_with_cache(q, cache, group).sum()
        q = q[0] if begins else q
        return getattr(distributed, name)(q, q, q, *begins, group).sum()

    alone = transform == "one rank"
    last = dist.get_rank(group) == dist.get_world_size(group) - 1
    run = torch.vmap(call) if transform == "vmap" else torch.func.grad(call)
    try:
        (call if alone and not last else run)(x[None] if transform == "vmap" else x)
    except (ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def of_one_rank(group: dist.ProcessGroup, name: str, changes: dict[str, Any]) -> str:
    """The error of a call whose arguments the last rank changes; of ``name``, or if it changes that, of another."""
    x, begins = torch.zeros(1, 2, 4, 8), torch.tensor([0, 8])
    cache = KVCache(1, 2, 8, 8)
    if dist.get_rank(group) < dist.get_world_size(group) - 1:
        changes = {}
    name = changes.get("name", name)
    q = {"q": x[0].transpose(0, 1)} if name == "ring_attention_varlen" else {"q": x}
    given: dict[str, dict[str, Any]] = {
        "ring_attention": q | {"k": x, "v": x},
        "ring_attention_varlen": q | {"k": q["q"], "v": q["q"], "cu_seqlens_q": begins, "cu_seqlens_k": begins},
        "attention_with_cache": q | {"cache": cache},
        "unshard": {"tensor": x, "dim": 2},
    }
    own = {key: value for key, value in changes.items() if key != "name"}
    try:
        if name == "context_parallel":
            with distributed.context_parallel(DeviceMesh.from_group(group, "cpu")):
                functional.scaled_dot_product_attention(**{"query": x, "key": x, "value": x} | own)
        else:
            getattr(distributed, name)(**given[name] | own, group=group)
    except (TypeError, ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def misfit(group: dist.ProcessGroup, name: str, how: str) -> tuple[str, Tensor]:
    """The error of a call that does not fit the function's parameters on the last rank, and a right call's result.

    ``how``: "missing", "twice" or "more" arguments, or for usp_attention a "group" or another "mesh" of all ranks.
    """
    x, begins, cache = torch.ones(1, 2, 4, 8), torch.tensor([0, 4 * dist.get_world_size(group)]), KVCache(1, 2, 8, 8)
    cache.append(x, x)
    mesh = mesh_of("mesh 2x4") if name == "usp_attention" else None
    parts: dict[str, list[Any]] = {"unshard": [x, 2], "attention_with_cache": [x, cache]}
    parts["ring_attention_varlen"] = [*[x[0].transpose(0, 1)] * 3, begins, begins]
    right = [*parts.get(name, [x, x, x]), mesh or group]
    function, wrong, given = getattr(distributed, name), [*right], dict[str, Any]()
    if how == "missing":
        wrong, given = right[:1], {"mesh" if mesh else "group": right[-1]}
    elif how == "twice":
        given = {"tensor" if name == "unshard" else "q": x}
    elif how == "more":
        wrong.append(1.0)
    else:
        wrong[-1] = dist.group.WORLD if how == "group" else init_device_mesh("cpu", (dist.get_world_size(),))
    error, last = "", dist.get_rank(group) == dist.get_world_size(group) - 1
    try:
        function(*wrong, **given) if last else function(*right)
    except (TypeError, ValueError) as problem:
        error = f"{type(problem).__name__}: {problem}"
    return error, function(*right)


OF_CONTEXT = {"layout", "buffers", "buffer_seq_dims", "no_restore_buffers", "buffer"}
"""Arguments of a context, and one that it does not have."""


def in_a_context(group: dist.ProcessGroup, changes: dict[str, Any], positional: tuple[Any, ...]) -> str:
    """The error of a context and a call of torch's function in it, of which the last rank changes arguments."""
    x = torch.ones(1, 2, 8, 8)
    last = dist.get_rank(group) == dist.get_world_size(group) - 1
    context = {name: value for name, value in changes.items() if last and name in OF_CONTEXT}
    call = {name: value for name, value in changes.items() if last and name not in context}
    mesh = DeviceMesh.from_group(group, "cpu")
    try:
        with distributed.context_parallel(mesh, **{"buffers": [x], "buffer_seq_dims": [2]} | context):
            arguments = positional if last and positional else (x, x, x)
            functional.scaled_dot_product_attention(*arguments, **call)
    except (TypeError, ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def group_refusals(group: dist.ProcessGroup) -> list[str]:
    """The errors of groups that don't exist or that lack this rank, and of a mesh that lacks it."""
    others = dist.new_group([0] if dist.get_rank() else [1])
    mesh = DeviceMesh("cpu", [0] if dist.get_rank() else [1])
    q, found = torch.zeros(1, 2, 4, 8), list[str]()
    for place in (others, mesh, "world"):
        for call in (lambda place: distributed.ring_attention(q, q, q, place), lambda place: shard(q, 2, place)):
            try:
                call(place)
                found.append("no error")
            except (TypeError, ValueError) as error:
                found.append(f"{type(error).__name__}: {error}")
    return found


def layout_refusals(group: dist.ProcessGroup) -> list[str]:
    """The errors of layouts of packed sequences: of shard, then of the ring."""
    x, begins, found = torch.zeros(9, 2, 8), torch.tensor([0, 1, 2, 3, 9]), []
    each = {"layout": "zigzag_varlen"}
    parts = [distributed.shard(x, 0, group, cu_seqlens=begins, **each)] * 3
    uneven = x[: 3 + 3 * dist.get_rank(group)]
    packed = functools.partial(distributed.ring_attention_varlen, group=group)
    calls = (
        lambda: distributed.shard(x, 3, group),
        lambda: distributed.unshard(x, -4, group),
        lambda: distributed.shard(x, 0, group, layout="zig"),
        lambda: distributed.shard(x, 0, group, **each),
        lambda: distributed.shard(x, 0, group, cu_seqlens=begins),
        lambda: distributed.shard(x, 0, group, cu_seqlens=begins.float(), **each),
        lambda: distributed.shard(x, 0, group, cu_seqlens=begins[None], **each),
        lambda: distributed.shard(x, 0, group, cu_seqlens=begins + 1, **each),
        lambda: distributed.unshard(uneven, 0, group, cu_seqlens=begins, **each),
        lambda: distributed.ring_attention(*(t.transpose(0, 1)[None] for t in parts), group, **each),
        lambda: packed(*parts, begins, begins, layout="zig"),
        lambda: packed(*parts, begins, begins[:-1], **each),
        lambda: packed(*parts, begins, begins + 1, **each),
        lambda: packed(uneven, *parts[1:], begins, begins, **each),
        lambda: packed(*parts, begins, begins, q_offset=torch.zeros(3).long(), **each),
    )
    for call in calls:
        try:
            call()
            found.append("no error")
        except (TypeError, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def refused_then_right(group: dist.ProcessGroup, arguments: dict[str, Any]) -> tuple[str, Tensor]:
    """The error of wrong arguments, and then the result of a right call."""
    error = refusal(group, dict.fromkeys(range(dist.get_world_size(group)), arguments))
    torch.manual_seed(0)
    parts = [distributed.shard(t, 2, group) for t in torch.randn(3, 1, 2, 12, 8)]
    return error, distributed.unshard(distributed.ring_attention(*parts, group), 2, group)
