"""Positions of a cache in the forms that callers name them, as tensors for the operators."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pyattn.options.checks import check_64_bits, check_integers, check_type


def lengths_of(lengths: int | Sequence[int] | Tensor, like: Tensor) -> Tensor:
    """int64 (B,), one int for all sequences included; ``like`` has the cache's own lengths."""
    if isinstance(lengths, int | torch.SymInt):
        check_type("lengths", lengths, int, torch.SymInt)
        check_64_bits("lengths", lengths)
        return torch.full_like(like, lengths)
    return check_integers("lengths", lengths, like.device)


def indices_of(indices: Sequence[Sequence[int] | Tensor] | Tensor, like: Tensor) -> Tensor:
    """int64 (B, n), rows of a list padded with -1."""
    check_type("indices", indices, Sequence, Tensor)
    if not isinstance(indices, Tensor):
        rows = [check_integers(f"indices[{b}]", row, like.device) for b, row in enumerate(indices)]
        indices = pad_sequence(rows, batch_first=True, padding_value=-1) if rows else like.new_empty(0, 0)
    return check_integers("indices", indices, dims=2)
