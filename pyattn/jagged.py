"""Jagged nested tensors (B, heads, j, head_dim): :func:`pyattn.attention` computes them as packed sequences.

The values of a jagged tensor are packed already and its offsets are cu_seqlens, so nothing is copied or padded.
"""

from typing import Any

from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor, nested_view_from_values_offsets_lengths

from pyattn.arguments import check_type
from pyattn.attention import attention
from pyattn.parse import check_known
from pyattn.takers import TAKERS
from pyattn.varlen import attention_varlen

POSITIONS = 2
"""The jagged dimension of q, k and v."""


def _check(name: str, tensor: object, dims: int, jagged: int, shape: str) -> None:
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


def _check_same(name: str, size: Any, other: str, expected: Any) -> None:
    if size != expected:
        raise ValueError(
            f"pyattn: {name} must have the offsets of {other}, the same tensor, got jagged sizes {size} and {expected}"
        )


def _packed(tensor: Any) -> Tensor:
    """(B, heads, j, head_dim) -> (tokens, heads, head_dim), the same memory."""
    values: Tensor = tensor.values()
    return values.transpose(0, 1)


def _max_seqlen(tensor: Any) -> int:
    """An upper bound on the lengths. Only a GPU's speed depends on it; the host reads the longest length there."""
    count: int = tensor._get_max_seqlen() if tensor.is_cuda else tensor.values().shape[POSITIONS - 1]
    return count


def _like(values: Tensor, q: Any) -> Tensor:
    """(heads, tokens, ...) -> (B, heads, j, ...), with q's offsets and so its j."""
    known = {"min_seqlen": q._maybe_min_seqlen, "max_seqlen": q._maybe_max_seqlen}
    result: Tensor = nested_view_from_values_offsets_lengths(values, q.offsets(), None, ragged_idx=POSITIONS, **known)
    return result


def _attention(
    q: Any, k: Any, v: Any, *, return_lse: bool, return_max_score: bool, **options: Any
) -> Tensor | tuple[Tensor, ...]:
    """:func:`pyattn.attention` over jagged tensors; ``out`` and lse are jagged, max_score is (B, Hq)."""
    check_known(attention, options)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _check(name, tensor, 4, POSITIONS, "(batch, heads, j, head_dim)")
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"pyattn: q and k must have the same batch, got {q.shape[0]} and {k.shape[0]}")
    _check_same("v", v.shape[POSITIONS], "k", k.shape[POSITIONS])
    ranges = options.get("key_ranges")
    if isinstance(ranges, NestedTensor):
        _check("key_ranges", ranges, 4 if ranges.dim() == 4 else 3, 1, "(batch, j, 2) or (batch, j, n, 2)")
        _check_same("key_ranges", ranges.shape[1], "q", q.shape[POSITIONS])
        options["key_ranges"] = ranges.values()
    tensors = _packed(q), _packed(k), _packed(v), q.offsets(), k.offsets()
    out, lse, *most = attention_varlen(
        *tensors, _max_seqlen(q), _max_seqlen(k), return_lse=True, return_max_score=return_max_score, **options
    )
    result = _like(out.transpose(0, 1), q)
    if return_lse:
        return result, _like(lse, q), *most
    return (result, *most) if most else result


TAKERS[NestedTensor] = {"attention": _attention}
