"""The code that ranks run for test_compiled.py: eager and compiled calls of the same function on parts."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from distributed.ranks import mesh_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from pyattn import distributed

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

    found = []
    for run in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(dist.get_rank(group))
        results = run(*leaves)
        gradients = torch.autograd.grad(results[:2], [*leaves, *learned], [torch.ones_like(t) for t in results[:2]])
        found.append([*(t.detach() for t in results), *gradients])
    return found


def wrong(group: dist.ProcessGroup) -> str:
    """The error of a compiled call whose softcap differs between ranks."""
    q = torch.zeros(1, 2, 4, 8)
    softcap = float(dist.get_rank(group))
    try:
        torch.compile(
            lambda q: distributed.ring_attention(q, q, q, group, softcap=softcap), fullgraph=True, backend="aot_eager"
        )(q)
    except ValueError as error:
        return str(error)
    return "no error"
