"""The queries and new tokens of a cache call: a batch or packed sequences, with their rotary embedding."""

from typing import NamedTuple

import torch
from torch import Tensor

from pyattn.adapters.flash_attn.arguments import (
    WrongValueError,
    check_dimensions,
    check_int32,
    check_together,
    equal_lengths,
    longest,
)
from pyattn.adapters.flash_attn.hopper.arguments import FLOAT8
from pyattn.options.checks import check_tensor


class Tokens(NamedTuple):
    """Packed tokens.

    Attributes:
        values: (total, H, D).
        cu_seqlens: (B + 1,).
        lengths: (B,) int64, how many tokens each sequence has.
        rows: (total,), the sequence of each token.
        places: (total,), its place in the sequence.
    """

    values: Tensor
    cu_seqlens: Tensor
    lengths: Tensor
    rows: Tensor
    places: Tensor

    @property
    def batch(self) -> int:
        """How many sequences there are."""
        return len(self.lengths)

    def longest(self, given: int | None) -> int:
        """max_seqlen_q, ``given`` if the caller packed the queries."""
        return int(self.lengths.max()) if given is None and self.batch else longest("max_seqlen_q", given or 0)


def tokens_of(name: str, x: Tensor, cu_seqlens: Tensor | None) -> Tokens:
    """The tokens of a batch (B, S, H, D), or packed ones (total, H, D) with their cu_seqlens."""
    check_tensor(name, x)
    if cu_seqlens is None:
        check_dimensions(name, x, "batch, seqlen, num_heads, head_dim")
        packing, packed = equal_lengths(x.shape[0], x.shape[1], x.device), x.flatten(0, 1)
    else:
        check_dimensions(f"{name} with cu_seqlens", x, "total, num_heads, head_dim")
        check_int32(f"cu_seqlens of {name}", cu_seqlens)
        check_dimensions(f"cu_seqlens of {name}", cu_seqlens, "batch + 1")
        ends = cu_seqlens.tolist()
        if ends[0] != 0 or ends != sorted(ends) or ends[-1] != len(x):
            raise WrongValueError(
                f"pyattn: cu_seqlens of {name} must begin at 0, never decrease and end at its {len(x)} tokens, got "
                f"{ends}"
            )
        packing, packed = cu_seqlens, x
    lengths = packing.diff().long()
    rows = torch.arange(len(lengths), device=x.device).repeat_interleave(lengths)
    return Tokens(packed, packing, lengths, rows, torch.arange(len(packed), device=x.device) - packing[rows])


def rotary_tables(
    cos: Tensor | None, sin: Tensor | None, q: Tensor, new: object, capacity: int
) -> tuple[Tensor, Tensor]:
    """cos and sin, which fit q's columns and the cache's positions."""
    check_together(rotary_cos=cos, rotary_sin=sin, k=new)
    assert cos is not None and sin is not None  # noqa: PT018
    if q.dtype == FLOAT8:
        raise NotImplementedError(f"pyattn: rotary_cos takes no {q.dtype}, got q in it")
    for name, tensor in (("rotary_cos", cos), ("rotary_sin", sin)):
        check_dimensions(name, tensor, "positions, rotary_dim / 2")
        if tensor.dtype != q.dtype:
            raise TypeError(f"pyattn: {name} must have q's dtype, {q.dtype}, got {tensor.dtype}")
    if cos.shape != sin.shape or 2 * cos.shape[1] > q.shape[-1] or cos.shape[0] < capacity:
        raise WrongValueError(
            f"pyattn: rotary_cos and rotary_sin must have at least the cache's {capacity} positions and at most "
            f"head_dim / 2 = {q.shape[-1] // 2} columns, got {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    return cos, sin
