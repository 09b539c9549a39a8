"""Selected keys and sinks of each query, as models with an indexer and Inkling 2 give them to the attention function.

DeepSeek V3.2 and its relatives list keys for each query, MiniMax M3 lists blocks of keys. On a GPU, and where the
weights of all keys are wanted, the lists become a bool mask.
"""

from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from pyattn import AttentionOptions, attention
from pyattn.options.checks import check_size, check_tensor, has_values
from pyattn.options.selected_keys import as_mask


class Lists(NamedTuple):
    """The keys of each query.

    Attributes:
        entries: (B, lists, Sq, n), keys or blocks of keys; -1 lists none.
        block: how many keys an entry has.
    """

    entries: Tensor
    block: int = 1

    def options(self) -> AttentionOptions:
        """The options of attention over these keys."""
        return {"selected": self.entries, "selected_block": self.block}

    def mask(self, query: Tensor, key: Tensor) -> Tensor:
        """bool (B, 1 or Hq, Sq, Sk), True = listed."""
        return as_mask(self.entries, self.block, key.shape[2], query.shape[1])


def by_indices(indices: Tensor, query: Tensor, key: Tensor) -> Lists:
    """Lists of keys, from indices (B, Sq, n)."""
    check_tensor("indices", indices)
    batch, _, seqlen_q, _ = query.shape
    if indices.dim() != 3 or indices.shape[:2] != (batch, seqlen_q):
        _refuse("indices must be (B, Sq, n)", (batch, seqlen_q), indices)
    _check_below("indices", indices, key.shape[2])
    return Lists(indices[:, None])


def by_blocks(block_indices: Tensor, size: object, query: Tensor, key: Tensor) -> Lists:
    """Lists of blocks of ``size`` keys, from block_indices (B, H, Sq, n); each serves Hq / H heads in a row."""
    check_tensor("block_indices", block_indices)
    check_size("module.config.index_block_size", size, least=1)
    assert isinstance(size, int)
    batch, heads, seqlen_q, _ = query.shape
    fits = block_indices.dim() == 4 and block_indices.shape[::2] == (batch, seqlen_q)
    if not fits or not block_indices.shape[1] or heads % block_indices.shape[1]:
        _refuse("block_indices must be (B, H, Sq, n), H a divisor of Hq", (batch, heads, seqlen_q), block_indices)
    _check_below("block_indices", block_indices, -(-key.shape[2] // size))
    if block_indices.shape[1] not in (1, key.shape[1]):
        block_indices = block_indices.repeat_interleave(heads // block_indices.shape[1], 1)
    return Lists(block_indices, size)


def with_sinks(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Attention with sinks (B, Hq, Sq, 1), and (B, Hq, Sq, 1), the share of each softmax that its keys have.

    ::

        out_i = share_i * attention_i        share_i = 1 / (1 + exp(sinks_i - lse_i))
    """
    check_tensor("sinks", sinks)
    if sinks.shape != (*query.shape[:3], 1):
        _refuse("sinks must be (B, Hq, Sq, 1)", query.shape[:3], sinks)
    out, lse = attention(query, key, value, return_lse=True, **options)
    hidden = (lse == -torch.inf)[..., None]
    share = torch.sigmoid(lse[..., None].masked_fill(hidden, 0.0) - sinks).masked_fill(hidden, 0.0)
    return (out * share).to(out.dtype), share


def _check_below(name: str, indices: Tensor, count: int) -> None:
    if has_values(indices) and indices.numel() and int(indices.max()) >= count:
        raise ValueError(f"pyattn: {name} must be below {count}, got {int(indices.max())}")


def _refuse(rule: str, sizes: tuple[int, ...], tensor: Tensor) -> NoReturn:
    raise ValueError(f"pyattn: {rule}, got shape {tuple(tensor.shape)} for queries of {tuple(sizes)}")
