"""The code that ranks run for test_converted.py: converted models whose batch, or parameters too, are shared out."""

import copy
from unittest.mock import patch

import torch
import torch.distributed as dist
from support.adapters.people import GroupedQueryAttention
from support.adapters.written import Model
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from pyattn.adapters import scratch
from pyattn.adapters.scratch import native

STEPS = 3


class Grouped(nn.Module):
    """Two layers of the book's chapter 5, whose keys and values are repeated; recomputed in backward or not."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(GroupedQueryAttention("heads") for _ in range(2))
        self.reentrant = reentrant
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            out, _ = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
            x = x + out
        return x


MODELS = {"heads": (Model, 16), "groups": (Grouped, 24)}
"""Each with the width of its input."""


def shared_out(model: nn.Module, kind: str, group: dist.ProcessGroup) -> nn.Module:
    """``model`` as ``kind`` trains it."""
    if kind == "ddp":
        return DistributedDataParallel(model, process_group=group)
    mesh = DeviceMesh.from_group(group, "cpu")
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(x: Tensor | None) -> Tensor:
    """A parameter or a gradient as one process has it."""
    assert x is not None
    return x.full_tensor() if isinstance(x, DTensor) else x


def compare(group: dist.ProcessGroup, name: str, kind: str, reentrant: bool | None, converted_first: bool) -> None:
    """Outputs, gradients and parameters of a few steps equal those of the plain model with the whole batch."""
    with patch.object(native, "MIN_SCORES", 0):
        _compare(group, name, kind, reentrant, converted_first)


def _compare(group: dist.ProcessGroup, name: str, kind: str, reentrant: bool | None, converted_first: bool) -> None:
    """:func:`compare` with products of any size recorded."""
    scratch.reset_counts()
    made, width = MODELS[name]
    plain = made(reentrant=reentrant)
    model = copy.deepcopy(plain)
    if converted_first:
        model = shared_out(scratch.convert(model), kind, group)
    else:
        model = scratch.convert(shared_out(model, kind, group))
    optimizers = [torch.optim.SGD(x.parameters(), lr=0.1) for x in (plain, model)]
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for step in range(1, STEPS + 1):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(2 * size, 8, width, dtype=torch.float64, generator=generator)
        batch.requires_grad_()  # reentrant checkpointing needs it
        own = batch.detach()[2 * rank : 2 * rank + 2].requires_grad_()
        outs = []
        for x, trained, optimizer in zip((batch, own), (plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            out = trained(x)
            out.square().mean().backward()
            outs.append(out.detach())
        torch.testing.assert_close(outs[1], outs[0][2 * rank : 2 * rank + 2], rtol=1e-10, atol=1e-11)
        for x, y in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(whole(x.grad), y.grad, rtol=1e-10, atol=1e-11)
        for optimizer in optimizers:
            optimizer.step()
        for x, y in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(whole(x), y, rtol=1e-10, atol=1e-11)
        assert scratch.counts() == ((2 if reentrant is None else 4) * step, {})
