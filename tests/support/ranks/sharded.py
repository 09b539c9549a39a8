"""The code of each process of test_sharding.py, in a separate module because a process starts by importing it."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from pyattn import attention
from pyattn.ops import dtensor_rules


def calls() -> list[dict[str, Tensor]]:
    """Tensors for 2 sequences and 4 heads; options that are shared, per sequence or per head."""
    ranges = torch.tensor([[[0, 5], [1, 4], [2, 2], [0, 3], [0, 2]]])
    shared = {"bias": torch.randn(2, 1, 5, 5), "alibi_slopes": torch.rand(4), "sinks": torch.randn(4)}
    own = {"bias": torch.randn(4, 1, 5), "alibi_slopes": torch.rand(2, 4), "key_ranges": ranges}
    return [{}, shared, own, {"q_offset": torch.tensor([1, -1])}, {"dropout_seed": torch.tensor(3)}]


def loss(options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """A scalar that depends on out, and on lse where a row sees a key; then out itself."""
    dropout_p = 0.4 if "dropout_seed" in options else 0.0
    out, lse = attention(**options, dropout_p=dropout_p, return_lse=True)
    return out.sin().sum() + lse.masked_fill(lse.isinf(), 0.0).cos().sum(), out


def compare(rank: int, processes: int, rendezvous: str) -> None:
    """Results and gradients of sharded tensors equal those of whole ones, and stay sharded where possible."""
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=processes)
    dtensor_rules.register()
    mesh = init_device_mesh("cpu", (processes,))
    torch.manual_seed(0)
    for num_heads_kv, dim, options in [(h, dim, options) for options in calls() for dim in (0, 1) for h in (2, 1)]:
        heads = {"q": 4, "k": num_heads_kv, "v": num_heads_kv}
        whole = {name: torch.randn(2, h, 5, 3) for name, h in heads.items()} | options
        sharded = {}
        for name, t in whole.items():
            place = Shard(dim) if name in heads and t.shape[dim] > 1 else Replicate()
            sharded[name] = distribute_tensor(t, mesh, [place])
        learned = [name for name, t in whole.items() if t.is_floating_point()]
        results = []
        for tensors in (whole, sharded):
            leaves = {name: tensors[name].requires_grad_() for name in learned}
            value, out = loss(tensors | leaves)
            results.append([out, *torch.autograd.grad(value, list(leaves.values()))])
        together = "dropout_seed" in options or (dim == 1 and num_heads_kv == 1)
        assert results[1][0].placements == (Replicate() if together else Shard(dim),)
        found = [t.full_tensor() if isinstance(t, DTensor) else t for t in results[1]]
        torch.testing.assert_close(found, results[0])
    dist.destroy_process_group()
