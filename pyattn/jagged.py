"""Jagged nested tensors (B, heads, j, head_dim): :func:`pyattn.attention` computes them as packed sequences.

The values of a jagged tensor are packed already and its offsets are cu_seqlens, so nothing is copied or padded::

    sequences  a0 a1 | b0 b1 b2        values   (heads, tokens, head_dim)    a0 a1 b0 b1 b2
                                       offsets  (B + 1,)                     0     2        5
"""

from typing import Any

import torch
from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor, nested_view_from_values_offsets_lengths

from pyattn.arguments import check_type
from pyattn.attention import attention
from pyattn.parse import check_known
from pyattn.takers import TAKERS
from pyattn.varlen import attention_varlen

POSITIONS = 2
"""The jagged dimension of q, k and v."""


def check_jagged(name: str, tensor: object, dims: int, jagged: int, shape: str) -> None:
    """Raises unless ``tensor`` has ``dims`` dimensions, of which number ``jagged`` is jagged, and no holes."""
    check_type(name, tensor, Tensor)
    if not isinstance(tensor, NestedTensor):
        layout = tensor.layout if isinstance(tensor, Tensor) and tensor.is_nested else "a dense tensor"
        raise TypeError(f"pyattn: {name} must be a nested tensor of layout torch.jagged like q, got {layout}")
    if tensor.dim() != dims or tensor._ragged_idx != jagged:
        raise ValueError(f"pyattn: {name} must be {shape}, j its jagged dimension, got {tuple(tensor.shape)}")
    if tensor.lengths() is not None:
        raise NotImplementedError(
            f"pyattn: {name} must have no holes, so call contiguous(), got lengths beside the offsets"
        )


def check_same(name: str, size: Any, other: str, expected: Any) -> None:
    """ValueError unless ``name``, of jagged size ``size``, has the offsets of ``other``."""
    if size != expected:
        raise ValueError(
            f"pyattn: {name} must have the offsets of {other}, the same tensor, got jagged sizes {size} and {expected}"
        )


def check_qk(q: Any, k: Any) -> None:
    """TypeError, ValueError or NotImplementedError unless both are jagged, with as many sequences."""
    for name, tensor in (("q", q), ("k", k)):
        check_jagged(name, tensor, 4, POSITIONS, "(batch, heads, j, head_dim)")
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"pyattn: q and k must have the same batch, got {q.shape[0]} and {k.shape[0]}")


def packed(tensor: Any) -> Tensor:
    """(B, heads, j, head_dim) -> (tokens, heads, head_dim), the same memory."""
    values: Tensor = tensor.values()
    return values.transpose(0, 1)


def packed_ranges(ranges: Any, q: Any) -> Any:
    """``key_ranges`` for packed sequences: jagged (B, j, 2) with q's offsets -> (tokens, 2); others as they are."""
    if not isinstance(ranges, NestedTensor):
        return ranges
    check_jagged("key_ranges", ranges, 3, 1, "(batch, j, 2)")
    check_same("key_ranges", ranges.shape[1], "q", q.shape[POSITIONS])
    return ranges.values()


def _max_seqlen(tensor: Any) -> int:
    """An upper bound on the lengths. Only a GPU's speed depends on it; the host reads the longest length there."""
    count: int = tensor._get_max_seqlen() if tensor.is_cuda else tensor.values().shape[POSITIONS - 1]
    return count


class _Jagged(torch.autograd.Function):
    """Values as a jagged tensor. The backward of torch's own view has no derivative; this one's has."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, offsets: Tensor, jagged: int, lengths: dict[str, Any]) -> Any:
        return NestedTensor(values.detach(), offsets, _ragged_idx=jagged, _metadata_cache=lengths)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Tensor | None, ...]:
        return gradient.values(), None, None, None


def like(values: Tensor, other: Any, jagged: int = POSITIONS) -> Tensor:
    """``values``, packed in dimension ``jagged - 1``, as a jagged tensor with the offsets of ``other`` and so its j."""
    if values.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        lengths = dict(other._metadata_cache)
        made: Tensor = _Jagged.apply(values, other.offsets(), jagged, lengths)  # type: ignore[no-untyped-call]
        return made
    known = {"min_seqlen": other._maybe_min_seqlen, "max_seqlen": other._maybe_max_seqlen}
    view: Tensor = nested_view_from_values_offsets_lengths(values, other.offsets(), None, ragged_idx=jagged, **known)
    return view


def _attention(
    q: Any, k: Any, v: Any, *, return_lse: bool, return_max_score: bool, **options: Any
) -> Tensor | tuple[Tensor, ...]:
    """:func:`pyattn.attention` over jagged tensors; ``out`` and lse are jagged, max_score is (B, Hq)."""
    check_known(attention, options)
    check_qk(q, k)
    check_jagged("v", v, 4, POSITIONS, "(batch, heads, j, head_dim)")
    check_same("v", v.shape[POSITIONS], "k", k.shape[POSITIONS])
    options["key_ranges"] = packed_ranges(options.get("key_ranges"), q)
    tensors = packed(q), packed(k), packed(v), q.offsets(), k.offsets()
    out, lse, *most = attention_varlen(
        *tensors, _max_seqlen(q), _max_seqlen(k), return_lse=True, return_max_score=return_max_score, **options
    )
    result = like(out.transpose(0, 1), q)
    if return_lse:
        return result, like(lse, q), *most
    return (result, *most) if most else result


TAKERS[NestedTensor] = {"attention": _attention}
