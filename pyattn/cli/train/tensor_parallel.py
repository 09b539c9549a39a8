"""Blocks whose heads and features are split over the ranks of a tensor axis.

::

    qkv, up         rows of the weight: each rank computes its heads, its features of the MLP
    project, down   columns of the weight: each rank's products are summed, then the bias is added

Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
"""

import re
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from pyattn.cli.gpt import Block
from pyattn.distributed.agreement.ranks import Ranks

SPLIT = {
    "qkv.weight": (0, 3),
    "qkv.bias": (0, 3),
    "sinks": (0, 1),
    "project.weight": (1, 1),
    "up.weight": (0, 1),
    "up.bias": (0, 1),
    "down.weight": (1, 1),
}
"""The weights of a block of which each rank has a part: the dimension, and how many tensors are stacked along it."""


def split_of(name: str) -> tuple[int, int] | None:
    """The entry of ``SPLIT`` for a weight of the model, or for a moment of it; None: every rank has the whole."""
    found = re.search(r"blocks\.\d+\.(.*)", name)
    return SPLIT.get(found[1]) if found else None


def cut(name: str, whole: Tensor, ranks: Ranks) -> Tensor:
    """This rank's part of a weight."""
    if (place := split_of(name)) is None:
        return whole
    dim, stacked = place
    parts: Tensor = whole.unflatten(dim, (stacked, ranks.size, -1))
    return parts.select(dim + 1, ranks.own).flatten(dim, dim + 1).contiguous()


def joined(name: str, part: Tensor, ranks: Ranks) -> Tensor:
    """The whole weight, of which each rank has a part."""
    if ranks.size == 1 or (place := split_of(name)) is None:
        return part
    dim, stacked = place
    part = part.contiguous()
    parts = [torch.empty_like(part) for _ in range(ranks.size)]
    dist.all_gather(parts, part, group=ranks.group)
    return torch.stack([x.unflatten(dim, (stacked, -1)) for x in parts], dim + 1).flatten(dim, dim + 2)


def piece(name: str, part: Tensor, mesh: DeviceMesh) -> Tensor:
    """A part as a DTensor, which knows its place in the whole; its dimension is split into (stacked, size)."""
    part = part.detach().contiguous()
    if (place := split_of(name)) is None:
        return part
    dim, stacked = place
    return DTensor.from_local(part.unflatten(dim, (stacked, -1)), mesh, [Shard(dim + 1)], run_check=False)


def of_piece(name: str, whole: Tensor) -> Tensor:
    """A whole weight that was stored by its :func:`piece`."""
    place = split_of(name)
    return whole if place is None else whole.flatten(place[0], place[0] + 1)


def _summed(x: Tensor, ranks: Ranks) -> Tensor:
    """The sum over the ranks in float32, without a gradient."""
    total = x.detach().to(torch.float32, copy=True)
    dist.all_reduce(total, group=ranks.group)
    return total


class _Copied(torch.autograd.Function):
    """A tensor that every rank has and uses: the gradient is the sum of the ranks'."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _summed(gradient.contiguous(), ctx.ranks).to(gradient.dtype), None


class _Summed(torch.autograd.Function):
    """The sum of the ranks' tensors in float32, which every rank uses in the same way: the gradient is theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.dtype = x.dtype
        return _summed(x, ranks)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None


class _Part(nn.Linear):
    """A rank's part of the linear layer ``whole``, which is called ``name``."""

    def __init__(self, name: str, whole: nn.Linear, ranks: Ranks) -> None:
        nn.Module.__init__(self)
        self.weight: nn.Parameter = nn.Parameter(cut(f"blocks.0.{name}.weight", whole.weight.detach(), ranks))
        self.bias: nn.Parameter = nn.Parameter(cut(f"blocks.0.{name}.bias", whole.bias.detach(), ranks))
        self.ranks: Ranks = ranks


class Columnwise(_Part):
    """Each rank computes some of the outputs."""

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return super().forward(_Copied.apply(x, self.ranks))  # type: ignore[no-untyped-call]


class Rowwise(_Part):
    """Each rank has some of the inputs."""

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        product = nn.functional.linear(x, self.weight)
        total: Tensor = _Summed.apply(product, self.ranks)  # type: ignore[no-untyped-call]
        return (total + self.bias).to(product.dtype)


def split(block: Block, ranks: Ranks) -> None:
    """Leaves this rank's heads and features in the block."""
    if ranks.size == 1:
        return
    block.heads //= ranks.size
    block.qkv, block.up = (Columnwise(name, getattr(block, name), ranks) for name in ("qkv", "up"))
    block.project, block.down = (Rowwise(name, getattr(block, name), ranks) for name in ("project", "down"))
    heads = slice(block.heads * ranks.own, block.heads * (ranks.own + 1))
    if block.sinks is not None:
        block.sinks = nn.Parameter(block.sinks.detach()[heads].clone())
    if isinstance(block.slopes, Tensor):
        block.slopes = block.slopes[heads].clone()
