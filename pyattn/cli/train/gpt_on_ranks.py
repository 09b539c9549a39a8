"""The part of a GPT on one rank: some sequences of the batch, some positions of these, some heads of each block."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pyattn.cli.gpt import GPT, Attend, Block, Drop, attend_pyattn
from pyattn.cli.train import tensor_parallel
from pyattn.distributed.attention import ring_attention
from pyattn.distributed.layout import shard
from pyattn.options.attention_options import Draws
from pyattn.options.dropout import draw_seed


class Sharded(GPT):
    """Takes over the weights of ``whole``, and computes this rank's share of its loss and gradients.

    Dropout drops what one process would: its masks are those of the whole batch, of which each rank draws all and uses
    its part, and attention's weights have their own coordinates.
    """

    def __init__(self, whole: GPT, data: DeviceMesh, context: DeviceMesh, tensor: DeviceMesh) -> None:
        nn.Module.__init__(self)
        vars(self).update(vars(whole))
        self.data: DeviceMesh = data
        self.context: DeviceMesh = context
        self.tensor: DeviceMesh = tensor
        if tensor.size() > 1:
            for block in self.blocks:
                tensor_parallel.divide(cast(Block, block), tensor)
        alone = context.size() == 1 and not self.config.dropout
        self.attend: Attend = whole.attend if alone or whole.attend is not attend_pyattn else self._attend
        self.drop: Drop = self._drop
        self._layout = "zigzag" if context.size() > 1 else "contiguous"
        self._shape, self._rows = torch.Size(), range(0)

    def loss(self, windows: Tensor) -> Tensor:
        """This rank's share of the mean cross entropy of ``windows`` (B, S + 1), which every rank has."""
        ids, labels = windows[:, :-1], windows[:, 1:]
        own, size = self.data.get_local_rank(), self.data.size()
        self._shape = ids.shape
        self._rows = range(len(ids) * own // size, len(ids) * (own + 1) // size)
        positions = shard(torch.arange(ids.shape[1], device=ids.device), 0, self.context, layout=self._layout)
        logits = self(self._own(ids), positions=positions)
        losses = nn.functional.cross_entropy(logits.flatten(0, 1).float(), self._own(labels).flatten(), reduction="sum")
        return losses / labels.numel()

    def _own(self, whole: Tensor) -> Tensor:
        """This rank's sequences and positions of a tensor (B, S, ...)."""
        rows = whole[self._rows.start : self._rows.stop]
        return shard(rows, 1, self.context, layout=self._layout)

    def _drop(self, x: Tensor, dropout_p: float, training: bool) -> Tensor:
        if not training or not dropout_p:
            return x
        mask = nn.functional.dropout(x.new_ones(*self._shape, x.shape[-1]), dropout_p)
        return x * self._own(mask)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, dropout_p: float, **options: Any) -> Tensor:
        if dropout_p:
            origin = [[self._rows.start, self.config.heads, q.shape[1] * self.tensor.get_local_rank(), 0, 0]]
            seed = Draws(draw_seed(q.device), torch.tensor(origin, device=q.device))
            options |= {"dropout_p": dropout_p, "dropout_seed": seed}
        out = ring_attention(q, k, v, self.context, layout=self._layout, **options)
        assert isinstance(out, Tensor)
        return out

    def weights(self) -> dict[str, Tensor]:
        """The weights of the whole model, on every rank."""
        return {name: tensor_parallel.joined(name, part, self.tensor) for name, part in self.state_dict().items()}
