"""Checks of the arguments of weights: which rows and heads, what is summed, and the call whose weights they are."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from pyattn import ops
from pyattn.masks.key_ranges import check_ranges
from pyattn.options.checks import check_between, check_integers, check_tensor, shown
from pyattn.options.schema import Options
from pyattn.options.selected_keys import check_entries

Reduce = Literal["queries", "heads", "entropy", None]


def chosen(name: str, values: Sequence[int] | Tensor | None, size: int, device: torch.device) -> Tensor:
    """``values`` as indices from 0 to size - 1; None chooses all of them."""
    if values is None:
        return torch.arange(size, device=device)
    indices = check_integers(name, values, device).to(device)
    check_between(name, indices, -size, size - 1)
    return torch.where(indices < 0, indices + size, indices)


def check_reduce(reduce: object) -> None:
    """ValueError for another ``reduce`` than :data:`Reduce` has."""
    if reduce not in get_args(Reduce):
        raise ValueError(f'pyattn: reduce must be "queries", "heads", "entropy" or None, got {shown(reduce)}')


def shape_of(name: str, t: Tensor, device: torch.device) -> Tensor:
    """Checks the device and layout of ``t``; returns a meta tensor without the tangent that ``to("meta")`` keeps."""
    if t.layout != torch.strided:
        raise NotImplementedError(f"pyattn: {name} must be a dense tensor, got layout {t.layout}")
    if t.device != device:
        name = name.replace("offsets", "offset")  # the operators' name for a q_offset of each sequence
        raise ValueError(f"pyattn: {name} must be on q's device, got {t.device} and {device}")
    return torch.empty(t.shape, dtype=t.dtype, device="meta")


def shapes_of(options: Options, device: torch.device) -> list[Any]:
    """The options for an operator on meta tensors, which checks them and computes nothing."""
    named = zip(Options._fields, options, strict=True)
    return [shape_of(name, t, device) if isinstance(t, Tensor) else t for name, t in named]


def check_call(q: Tensor, k: Tensor, lse: Tensor | None, options: Options) -> None:
    """Checks q, k and all options by running the operator on meta tensors, on which it computes nothing."""
    if torch.compiler.is_compiling():
        return
    q_, k_ = shape_of("q", q, q.device), shape_of("k", k, q.device)
    _, rows, *_ = ops.attention_forward(q_, k_, k_[..., :0], *shapes_of(options, q.device))
    if options.key_ranges is not None and options.key_ranges.is_cpu:
        check_ranges(options.key_ranges, k.shape[2])
    if options.selected is not None and options.selected.is_cpu:
        check_entries(options.selected, options.selected_block, k.shape[2])
    if lse is not None:
        check_tensor("lse", lse)
        if lse.shape != rows.shape:
            raise ValueError(f"pyattn: lse must have shape {tuple(rows.shape)}, got {tuple(lse.shape)}")
