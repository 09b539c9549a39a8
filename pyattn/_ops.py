"""The native operators, with what only Python can give them: batching rules for vmap."""

from typing import Any

import torch
from torch import Tensor

attention_forward = torch.ops.pyattn.attention_forward.default
attention_backward = torch.ops.pyattn.attention_backward.default


def _fold(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """Moves the mapped dimension into the batch: (size, B, ...) -> (size * B, ...)."""
    tensor = tensor.unsqueeze(0).expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    if tensor.dim() < 2:
        raise ValueError(f"pyattn: under vmap each tensor keeps its batch dimension, got {tuple(tensor.shape[1:])}")
    return tensor.flatten(0, 1)


def _register_vmap(op: torch._ops.OpOverload[..., Any], name: str) -> None:
    """vmap over an operator is one call with a larger batch; with dropout, whose mask knows it, many calls."""
    seed = [argument.name for argument in op._schema.arguments].index("dropout_seed")

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        size = info.batch_size
        if args[seed : seed + 1] not in ((), (None,)) and size:
            calls = (
                [arg if dim is None else arg.select(dim, i) for arg, dim in zip(args, in_dims, strict=True)]
                for i in range(size)
            )
            results = tuple(torch.stack(parts) for parts in zip(*(op(*call) for call in calls), strict=True))
            return results, (0,) * len(results)
        folded = [
            _fold(arg, dim, size) if isinstance(arg, Tensor) else arg for arg, dim in zip(args, in_dims, strict=True)
        ]
        batch = args[0].shape[1 if in_dims[0] == 0 else 0]
        return tuple(t.unflatten(0, (size, batch)) for t in op(*folded)), (0,) * len(op._schema.returns)

    torch.library.register_vmap(name, rule)


_register_vmap(attention_forward, "pyattn::attention_forward")
_register_vmap(attention_backward, "pyattn::attention_backward")
