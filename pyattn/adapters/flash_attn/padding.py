"""flash_attn.bert_padding: converts between padded batches (B, S, ...) and packed tokens (total, ...)."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from pyattn.options.checks import check_sizes, check_tensor

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:  # noqa: A002
    """``input[indices]``, (total, ...); the gradients of a repeated index add up."""
    return input[indices]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """(first_axis_dim, ...) with ``values`` at ``indices`` and 0 elsewhere."""
    check_tensor("values", values)
    check_sizes(first_axis_dim=first_axis_dim, columns=values[:1].numel())
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_put((indices,), values)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:  # noqa: A002
    """``input[indices]`` and input."""
    return input[indices], input


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Packs the tokens that ``attention_mask`` marks.

    Args:
        hidden_states: (B, S, ...).
        attention_mask: (B, S), bool or integer, nonzero = a token, whatever its value.
        unused_mask: (B, S), also bool or integer: these tokens are packed too, but not counted in seqused.

    Returns:
        The tokens (total, ...); their indices (total,) among all B * S; cu_seqlens (B + 1,) int32; the longest
        sequence; seqused (B,) int32, how many tokens of each sequence attention_mask marks.

    >>> mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    >>> tokens, indices, cu_seqlens, longest, _ = unpad_input(torch.randn(2, 3, 8), mask)
    >>> tokens.shape, indices.tolist(), cu_seqlens.tolist(), longest
    (torch.Size([5, 8]), [0, 1, 3, 4, 5], [0, 2, 5], 3)
    """
    marked = attention_mask != 0
    packed = marked if unused_mask is None else marked | (unused_mask != 0)
    used = marked.sum(-1, dtype=torch.int32)
    return *_packed(hidden_states, packed, packed.sum(-1, dtype=torch.int32)), used


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """:func:`unpad_input` of rows that hold several sequences each.

    ``attention_mask_in_length`` (B, S) starts each row with the lengths of its sequences, then zeros: [2, 3, 0, 0, 0,
    0] is a sequence of 2 tokens, one of 3, and padding. Returns tokens, indices, cu_seqlens and the longest sequence.
    """
    seqlen = attention_mask_in_length.shape[-1]
    of_rows = attention_mask_in_length.sum(-1, keepdim=True)
    packed = torch.arange(seqlen, device=of_rows.device) < of_rows
    return _packed(hidden_states, packed, attention_mask_in_length[attention_mask_in_length != 0].int())


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """(batch, seqlen, ...) with the tokens ``hidden_states`` (total, ...) at ``indices`` and 0 elsewhere."""
    check_sizes(batch=batch, seqlen=seqlen)
    padded = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return padded.reshape(batch, seqlen, *padded.shape[1:])


def _packed(hidden_states: Tensor, packed: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """Tokens, indices, cu_seqlens and the longest sequence of the tokens that ``packed`` (B, S) marks."""
    indices = packed.flatten().nonzero().flatten()
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    return tokens, indices, pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)), int(lengths.max())
