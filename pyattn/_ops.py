"""The native operators with their vmap rules and FLOP formulas, which only Python can register."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from pyattn.options import Options
from pyattn.visible import pairs

attention_forward = torch.ops.pyattn.attention_forward.default
attention_backward = torch.ops.pyattn.attention_backward.default


SHARED = {"key_ranges": 3, "bias": 4, "alibi_slopes": 2}
"""Tensors that all sequences may share, with the number of their dimensions where they don't."""


def _fold(name: str, tensor: Tensor, dim: int | None, size: int, batch: int) -> Tensor:
    """Moves the mapped dimension into the batch: (size, B, ...) -> (size * B, ...). What all share stays as it is."""
    if dim is None and name in SHARED and (tensor.dim() < SHARED[name] or tensor.shape[0] != batch):
        return tensor
    tensor = tensor.unsqueeze(0).expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    if name in SHARED:
        tensor = tensor[(slice(None), *(None,) * (SHARED[name] + 1 - tensor.dim()))]
        tensor = tensor.expand(size, batch, *tensor.shape[2:])
    if tensor.dim() < 2:
        raise ValueError(f"pyattn: under vmap each tensor keeps its batch dimension, got {tuple(tensor.shape[1:])}")
    return tensor.flatten(0, 1)


def _register_vmap(op: torch._ops.OpOverload[..., Any], name: str) -> None:
    """vmap folds the mapped dimension into the batch.

    It loops where that can't be: with dropout, whose draws depend on the batch; where sinks are mapped, which have no
    batch; where gradients of bias, slopes or sinks are wanted, which are summed over the batch.
    """
    names = [argument.name for argument in op._schema.arguments]

    def rule(
        info: Any, in_dims: tuple[Any, ...], *args: Any
    ) -> tuple[tuple[Tensor | None, ...], tuple[int | None, ...]]:
        size = info.batch_size
        values = dict(zip(names, args, strict=False))
        mapped = {name: dim for name, dim in zip(names, in_dims, strict=False) if isinstance(dim, int)}

        def sliced(select: Callable[[Tensor, int], Tensor]) -> tuple[Tensor | None, ...]:
            """The results of one call on slices of what is mapped."""
            results: tuple[Tensor | None, ...] = op(
                *(select(value, mapped[name]) if name in mapped else value for name, value in values.items())
            )
            return results

        dropout = values.get("dropout_seed") is not None
        if size == 0:  # a call on zeros gives the shapes
            one = sliced(lambda t, dim: t.new_zeros(t.movedim(dim, 0).shape[1:]))
            results = tuple(None if t is None else t[None][:0] for t in one)
        elif dropout or "sinks" in mapped or any(values.get("output_mask", ())):
            many = [sliced(lambda t, dim, i=i: t.select(dim, i)) for i in range(size)]  # type: ignore[misc]
            results = tuple(None if parts[0] is None else torch.stack(parts) for parts in zip(*many, strict=True))
        else:
            batch = values["q"].shape[1 if mapped.get("q") == 0 else 0]
            folded = [
                _fold(name, value, mapped.get(name), size, batch)
                if isinstance(value, Tensor) and name != "sinks"
                else value
                for name, value in values.items()
            ]
            results = tuple(None if t is None else t.unflatten(0, (size, batch)) for t in op(*folded))
        return results, tuple(None if t is None else 0 for t in results)

    torch.library.register_vmap(name, rule)


_register_vmap(attention_forward, "pyattn::attention_forward")
_register_vmap(attention_backward, "pyattn::attention_backward")


@register_flop_formula(torch.ops.pyattn.attention_forward, get_raw=True)
def forward_flops(q: Tensor, k: Tensor, v: Tensor, *options: Any, out_val: object = None, **named: Any) -> int:
    """Q K^T and P V: for each pair that the mask leaves, two operations a column."""
    return 2 * pairs(q, k, Options(*options, **named)) * (q.shape[3] + v.shape[3])


@register_flop_formula(torch.ops.pyattn.attention_backward, get_raw=True)
def backward_flops(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    row_max: Tensor | None,
    row_sum: Tensor | None,
    *options: Any,
    deterministic: bool = True,
    out_val: object = None,
    **named: Any,
) -> int:
    """Q K^T again, dO V^T, dV, dK and dQ, counted likewise."""
    known = Options(*options[: len(Options._fields)], **named)
    return 2 * pairs(q, k, known) * (3 * q.shape[3] + 2 * v.shape[3])
