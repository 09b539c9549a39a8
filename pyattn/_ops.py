"""The native operators with their vmap rules and FLOP formulas, which only Python can register."""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from pyattn import _C
from pyattn.options import Options

attention_forward = torch.ops.pyattn.attention_forward.default
attention_backward = torch.ops.pyattn.attention_backward.default


def _fold(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """Moves the mapped dimension into the batch: (size, B, ...) -> (size * B, ...)."""
    tensor = tensor.unsqueeze(0).expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    if tensor.dim() < 2:
        raise ValueError(f"pyattn: under vmap each tensor keeps its batch dimension, got {tuple(tensor.shape[1:])}")
    return tensor.flatten(0, 1)


def _register_vmap(op: torch._ops.OpOverload[..., Any], name: str) -> None:
    """vmap folds the mapped dimension into the batch. With dropout, whose draws depend on the batch, it loops."""
    seed = [argument.name for argument in op._schema.arguments].index("dropout_seed")

    def rule(
        info: Any, in_dims: tuple[int | None, ...], *args: Any
    ) -> tuple[tuple[Tensor | None, ...], tuple[int | None, ...]]:
        size = info.batch_size
        if args[seed : seed + 1] not in ((), (None,)) and size:
            calls = (
                [arg if dim is None else arg.select(dim, i) for arg, dim in zip(args, in_dims, strict=True)]
                for i in range(size)
            )
            results = tuple(
                None if parts[0] is None else torch.stack(parts)
                for parts in zip(*(op(*call) for call in calls), strict=True)
            )
            return results, tuple(None if t is None else 0 for t in results)
        folded = [
            _fold(arg, dim, size) if isinstance(arg, Tensor) else arg for arg, dim in zip(args, in_dims, strict=True)
        ]
        batch = args[0].shape[1 if in_dims[0] == 0 else 0]
        results = tuple(None if t is None else t.unflatten(0, (size, batch)) for t in op(*folded))
        return results, tuple(None if t is None else 0 for t in results)

    torch.library.register_vmap(name, rule)


_register_vmap(attention_forward, "pyattn::attention_forward")
_register_vmap(attention_backward, "pyattn::attention_backward")


def visible_pairs(seqlen_q: int, seqlen_k: int, q_offset: int) -> int:
    """Pairs of query and key that a causal mask leaves: the sum over i of ``i + q_offset + 1``, clamped to seqlen_k."""
    first = min(max(-q_offset, 0), seqlen_q)
    full = min(max(seqlen_k - q_offset, first), seqlen_q)  # from here on, rows see all keys
    return (full - first) * (first + full + 1 + 2 * q_offset) // 2 + (seqlen_q - full) * seqlen_k


def _pairs(q: Tensor, k: Tensor, options: Options) -> int:
    """Pairs that are seen, over batch and query heads; all pairs where q_offsets have no values yet."""
    batch, heads, seqlen_q = q.shape[:3]
    seqlen_k = k.shape[2]
    if not options.causal or isinstance(options.q_offsets, FakeTensor):
        return batch * heads * seqlen_q * seqlen_k
    q_offset = _C.default_q_offset(seqlen_q, seqlen_k) if options.q_offset is None else options.q_offset
    q_offsets = [q_offset] * batch if options.q_offsets is None else options.q_offsets.tolist()
    return heads * sum(visible_pairs(seqlen_q, seqlen_k, q_offset) for q_offset in q_offsets)


@register_flop_formula(torch.ops.pyattn.attention_forward, get_raw=True)
def forward_flops(q: Tensor, k: Tensor, v: Tensor, *options: Any, out_val: object = None, **named: Any) -> int:
    """Q K^T and P V: for each pair that the mask leaves, two operations a column."""
    return 2 * _pairs(q, k, Options(*options, **named)) * (q.shape[3] + v.shape[3])


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
    return 2 * _pairs(q, k, known) * (3 * q.shape[3] + 2 * v.shape[3])
