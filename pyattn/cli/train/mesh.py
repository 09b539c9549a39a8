"""A mesh of ranks, data x context x tensor, by torch.distributed: what they sum, write together and agree on."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pyattn.cli.gpt import GPT
from pyattn.cli.train import checkpoint_shards, tensor_parallel
from pyattn.cli.train.gpt_on_ranks import Sharded
from pyattn.cli.train.one_process import AXES, BOUND, Alone
from pyattn.distributed.agreement.ranks import Ranks, agree, ranks_of


class Mesh(Alone):
    """All processes of torch.distributed, each with its place in the mesh.

    Attributes:
        data, context, tensor: the ranks along each axis from this one: they share batches, positions and heads.
        copies: the ranks that hold the same weights as this one: those of data x context.
        all: all ranks.
    """

    many: bool = True
    data: DeviceMesh
    context: DeviceMesh
    tensor: DeviceMesh

    def __init__(self, sizes: tuple[int, ...], device: str) -> None:
        mesh = init_device_mesh(device, sizes, mesh_dim_names=AXES)
        self.data, self.context, self.tensor = (mesh[axis] for axis in AXES)
        self.copies: Ranks = ranks_of(mesh["data", "context"])
        self.all: Ranks = ranks_of(None)
        self.first: bool = self.all.own == 0

    def part(self, model: GPT) -> Sharded:  # noqa: D102
        return Sharded(model, self.data, self.context, self.tensor)

    def cut(self, name: str, whole: Tensor) -> Tensor:  # noqa: D102
        return tensor_parallel.cut(name, whole, self.tensor)

    def total(self, share: Tensor) -> Tensor:  # noqa: D102
        total = share.detach().clone()
        dist.all_reduce(total, group=self.copies.group)
        return total

    def sum_gradients(self, model: GPT, loss: Tensor) -> Tensor:
        """As for one process, in one message.

        DistributedDataParallel averages where a sum is needed (ranks may have unequal parts), and does not know context
        and tensor ranks. One sum in one order gives the same bits in every run.
        """
        parameters = list(model.parameters())
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([loss.detach().view(1), *(gradient.flatten() for gradient in gradients)])
        dist.all_reduce(flat, group=self.copies.group)
        sums = flat[1:].split([gradient.numel() for gradient in gradients])
        for parameter, gradient in zip(parameters, sums, strict=True):
            parameter.grad = gradient.view_as(parameter)
        return flat[0]

    def clip(self, model: GPT) -> None:  # noqa: D102
        if self.tensor.size() == 1:
            super().clip(model)
            return
        gradients: tuple[list[Tensor], list[Tensor]] = [], []
        for name, parameter in model.named_parameters():
            gradients[tensor_parallel.place_of(name) is not None].append(cast(Tensor, parameter.grad))
        shared, parts = (nn.utils.get_total_norm(found).square() for found in gradients)
        dist.all_reduce(parts, group=self.tensor.get_group())
        nn.utils.clip_grads_with_norm_(model.parameters(), BOUND, (shared + parts).sqrt())

    def write(self, run: Path, steps: int, tensors: dict[str, Tensor]) -> dict[str, str]:  # noqa: D102
        # torch's reader of safetensors takes no scalars, which AdamW's step counts are.
        names = [name for name, tensor in tensors.items() if tensor.dim()]
        pieces = {name: tensor_parallel.placed(name, tensors.pop(name), self.tensor) for name in names}
        return {"shards": checkpoint_shards.save(run, steps, pieces, self)}

    def same(self, value: Any) -> Any:  # noqa: D102
        values = [value]
        dist.broadcast_object_list(values, 0)
        return values[0]

    @contextmanager
    def agreement(self, facts: Mapping[str, Any]) -> Iterator[None]:  # noqa: D102
        error = None
        try:
            yield
        except (TypeError, ValueError) as problem:
            error = problem
        agree("train", self.all, facts, [], error)
