"""The layout of jagged nested tensors: values without padding, and the offsets of their sequences::

sequences  a0 a1 | b0 b1 b2        values   (..., tokens, ...)    a0 a1 b0 b1 b2
                                   offsets  (B + 1,)              0     2        5
"""

from typing import Any

import torch
from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor, nested_view_from_values_offsets_lengths

from pyattn.derivatives.transforms import NO_NESTED, transforming
from pyattn.options.checks import check_type

POSITIONS = 2
"""The jagged dimension of q, k and v."""


def check_jagged(name: str, tensor: object, dims: int, jagged: int, shape: str) -> None:
    """Raises unless ``tensor`` has ``dims`` dimensions, of which number ``jagged`` is jagged."""
    check_type(name, tensor, Tensor)
    if not isinstance(tensor, NestedTensor):
        layout = tensor.layout if isinstance(tensor, Tensor) and tensor.is_nested else "a dense tensor"
        raise TypeError(f"pyattn: {name} must be a nested tensor of layout torch.jagged like q, got {layout}")
    if tensor.dim() != dims or tensor._ragged_idx != jagged:
        raise ValueError(f"pyattn: {name} must be {shape}, j its jagged dimension, got {tuple(tensor.shape)}")


def check_no_holes(name: str, tensor: Any) -> None:
    """NotImplementedError if a jagged tensor has lengths beside its offsets, as ``torch.nested.narrow`` gives it."""
    if tensor.lengths() is not None:
        raise NotImplementedError(
            f"pyattn: {name} must have no holes, so nest {name}.unbind() again, got lengths beside the offsets"
        )


def without_holes(name: str, tensor: Any) -> Any:
    """A jagged tensor whose tokens lie one after another: ``tensor`` itself, or its tokens gathered, differentiably.

    Raises:
        NotImplementedError: holes in compiled code, which can't read the lengths.
    """
    lengths = tensor.lengths()
    if lengths is None:
        return tensor
    if torch.compiler.is_compiling():
        check_no_holes(name, tensor)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    moved = (tensor.offsets()[:-1] - offsets[:-1]).repeat_interleave(lengths)
    token = torch.arange(len(moved), device=moved.device) + moved
    values = tensor.values().index_select(tensor._ragged_idx - 1, token)
    return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=tensor._ragged_idx)


def check_same(name: str, tensor: Any, other: str, expected: Any) -> None:
    """ValueError unless the jagged tensors have the same offsets; in compiled code, one tensor of offsets."""
    sizes = [t.shape[t._ragged_idx] for t in (tensor, expected)]
    if sizes[0] == sizes[1]:
        return
    if torch.compiler.is_compiling():
        raise ValueError(f"pyattn: {name} must have the tensor of offsets of {other} in compiled code, got another")
    if tensor.offsets().tolist() != expected.offsets().tolist():
        raise ValueError(f"pyattn: {name} must have the offsets of {other}, got jagged sizes {sizes[0]} and {sizes[1]}")


def checked_qk(q: Any, k: Any) -> tuple[Any, Any]:
    """Both without holes; TypeError, ValueError or NotImplementedError unless both are jagged, of as many sequences."""
    for name, tensor in (("q", q), ("k", k)):
        check_jagged(name, tensor, 4, POSITIONS, "(batch, heads, j, head_dim)")
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"pyattn: q and k must have the same batch, got {q.shape[0]} and {k.shape[0]}")
    return without_holes("q", q), without_holes("k", k)


def packed(tensor: Any) -> Tensor:
    """(B, heads, j, head_dim) -> (tokens, heads, head_dim), the same memory."""
    values: Tensor = tensor.values()
    return values.transpose(0, 1)


def packed_ranges(ranges: Any, q: Any) -> Any:
    """``key_ranges`` for packed sequences: jagged (B, j, ..., 2) with q's offsets -> (tokens, ..., 2), or unchanged."""
    if not isinstance(ranges, NestedTensor):
        return ranges
    check_jagged("key_ranges", ranges, 4 if ranges.dim() == 4 else 3, 1, "(batch, j, 2) or (batch, j, n, 2)")
    ranges = without_holes("key_ranges", ranges)
    check_same("key_ranges", ranges, "q", q)
    return ranges.values()


def longest(tensor: Any) -> int:
    """The length of the longest sequence; the host reads the offsets if the tensor does not know it."""
    length: int = tensor._get_max_seqlen() if tensor.shape[0] else 0
    return length


def positions_of(tensor: Any) -> Tensor:
    """int64 (tokens,): each token's position in its sequence."""
    offsets = tensor.offsets().to(torch.int64)
    token = torch.arange(tensor.values().shape[tensor._ragged_idx - 1], device=offsets.device)
    begins: Tensor = offsets[torch.searchsorted(offsets, token, right=True) - 1]
    return token - begins


class _Jagged(torch.autograd.Function):
    """Values as a jagged tensor. The backward of torch's own view has no derivative; this one's has."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, offsets: Tensor, jagged: int, lengths: dict[str, Any]) -> Any:
        return NestedTensor(values.detach(), offsets, _ragged_idx=jagged, _metadata_cache=lengths)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Tensor | None, ...]:
        return gradient.values(), None, None, None


def like(values: Tensor, other: Any, jagged: int = POSITIONS) -> Tensor:
    """``values``, packed in dimension ``jagged - 1``, as a jagged tensor with the offsets of ``other`` and so its j.

    Raises:
        NotImplementedError: in a transform, values that depend on its inputs.
    """
    if torch.compiler.is_compiling() or not transforming():
        return _like(values, other, jagged)
    try:
        return _like(values, other, jagged)
    except RuntimeError as error:  # torch's views lack the transform's rule
        raise NotImplementedError(
            f"{NO_NESTED} and in forward mode, got a jagged result that depends on their inputs"
        ) from error


def _like(values: Tensor, other: Any, jagged: int) -> Tensor:
    if values.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        lengths = dict(other._metadata_cache)
        made: Tensor = _Jagged.apply(values, other.offsets(), jagged, lengths)  # type: ignore[no-untyped-call]
        return made
    known = {"min_seqlen": other._maybe_min_seqlen, "max_seqlen": other._maybe_max_seqlen}
    view: Tensor = nested_view_from_values_offsets_lengths(values, other.offsets(), None, ragged_idx=jagged, **known)
    return view


def tokens(t: Any) -> Tensor:
    """A jagged (B, j, D) as a batch of one, (1, tokens, D)."""
    values: Tensor = t.values()
    return values[None]
