"""The code that ranks run for test_every_option.py: one option, in the parts that its axes give a rank."""

from typing import Any

import torch.distributed as dist
from support.ranks.ranks import mesh_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from pyattn import KVCache, attention, distributed
from pyattn.ops.dtensor_rules import place
from pyattn.options.axes import AXES, dims_of, part


def sequences(group: dist.ProcessGroup, name: str, layout: str, qkv: list[Tensor], given: dict[str, Any]) -> Tensor:
    """out of all positions, of which each rank has some, with the rows of the option that are theirs."""
    where = mesh_of(name) or group

    def own(key: str, value: Any) -> Any:
        dim = dims_of(AXES[key], value).get("q") if isinstance(value, Tensor) else None
        return value if dim is None else distributed.shard(value, dim, where, layout=layout)

    function = getattr(distributed, name.partition(" ")[0])
    parts = [distributed.shard(t, 2, where, layout=layout) for t in qkv]
    out = function(*parts, where, layout=layout, **{key: own(key, value) for key, value in given.items()})
    return distributed.unshard(out, 2, where, layout=layout)


def cached(group: dist.ProcessGroup, q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any]) -> Tensor:
    """out over keys of which each rank's cache holds an even share, with the columns of the option that are its own."""
    count = k.shape[2] // dist.get_world_size(group)
    keys = slice(dist.get_rank(group) * count, (dist.get_rank(group) + 1) * count)
    cache = KVCache(len(k), k.shape[1], count, k.shape[3], dtype=k.dtype)
    cache.append(k[:, :, keys], v[:, :, keys])
    own = {
        key: part(AXES[key], value, {"k": keys}) if isinstance(value, Tensor) else value for key, value in given.items()
    }
    return distributed.attention_with_cache(q, cache, group, **own)


def sharded(group: dist.ProcessGroup, axis: str, qkv: list[Tensor], given: dict[str, Any]) -> Tensor:
    """out of DTensors that are divided along an axis, the option too where it has that axis."""
    mesh = DeviceMesh.from_group(group, "cpu")
    dim = {"b": 0, "h": 1, "q": 2}[axis]
    parts = [distribute_tensor(t, mesh, [Shard(dim)]) for t in qkv]
    placed = {
        key: distribute_tensor(value, mesh, [place(key, value, axis)]) if isinstance(value, Tensor) else value
        for key, value in given.items()
    }
    out: Any = attention(*parts, **placed)
    assert isinstance(out, DTensor)
    assert out.placements != (Replicate(),)
    return out.full_tensor()
