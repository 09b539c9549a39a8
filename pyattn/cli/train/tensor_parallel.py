"""Blocks whose heads and features are divided among the ranks of a tensor axis.

::

    qkv, up         rows of the weight: each rank computes its heads, its features of the MLP
    project, down   columns of the weight: each rank's products are summed, then the bias is added

A rank's model and optimizer hold plain tensors, its parts of the weights and moments. torch's DTensors cut these from
the whole, join them, and tell a checkpoint where they belong.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
"""

from itertools import chain

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from pyattn.cli.gpt import Block

DIVIDED = {
    "qkv.weight": (0, 3),
    "qkv.bias": (0, 3),
    "slopes": (0, 1),
    "sinks": (0, 1),
    "project.weight": (1, 1),
    "up.weight": (0, 1),
    "up.bias": (0, 1),
    "down.weight": (1, 1),
}
"""The tensors of a block of which each rank has a part: the dimension, and how many are stacked along it."""


def place_of(name: str) -> tuple[int, int] | None:
    """The entry of ``DIVIDED`` for a weight of the model, or for a moment of it; None: every rank has the whole."""
    return next((place for ending, place in DIVIDED.items() if name.endswith(ending)), None)


def unstacked(name: str, x: Tensor) -> tuple[Tensor, Placement]:
    """``x`` with its divided dimension as two, (stacked, size), and that ranks divide the second of them."""
    if (place := place_of(name)) is None:
        return x, Replicate()
    dim, count = place
    return x.unflatten(dim, (count, -1)), Shard(dim + 1)


def stacked(name: str, x: Tensor) -> Tensor:
    """The tensor that :func:`unstacked` gave as ``x``."""
    place = place_of(name)
    return x if place is None else x.flatten(place[0], place[0] + 1)


def cut(name: str, whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's part of a weight."""
    apart, placement = unstacked(name, whole)
    return stacked(name, distribute_tensor(apart, mesh, [placement], src_data_rank=None).to_local())


def placed(name: str, part: Tensor, mesh: DeviceMesh) -> DTensor:
    """A rank's part as a DTensor, which knows its place in the :func:`unstacked` whole."""
    apart, placement = unstacked(name, part.detach())
    return DTensor.from_local(apart.contiguous(), mesh, [placement], run_check=False)


def joined(name: str, part: Tensor, mesh: DeviceMesh) -> Tensor:
    """The whole weight, of which each rank has a part."""
    return stacked(name, placed(name, part, mesh).full_tensor())


class Columnwise(nn.Linear):
    """Each rank computes some of the outputs from the whole x, whose gradient is the ranks' sum, in float32."""

    mesh: DeviceMesh

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        whole = DTensor.from_local(x.float(), self.mesh, [Replicate()], run_check=False)
        return super().forward(whole.to_local(grad_placements=[Partial()]).to(x.dtype))


class Rowwise(nn.Linear):
    """Each rank has some of the inputs, and the products are summed in float32."""

    mesh: DeviceMesh

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        product = nn.functional.linear(x, self.weight)
        total = DTensor.from_local(product.float(), self.mesh, [Partial()], run_check=False).full_tensor()
        return (total + self.bias).to(product.dtype)


def divide(block: Block, mesh: DeviceMesh) -> None:
    """Leaves this rank's heads and features in the block."""
    block.heads //= mesh.size()
    for name, whole in chain(block.named_parameters(), block.named_buffers()):
        whole.data = cut(name, whole.data, mesh)
    for linear in (block.qkv, block.up, block.project, block.down):
        linear.__class__ = Columnwise if linear in (block.qkv, block.up) else Rowwise
        vars(linear)["mesh"] = mesh
