"""Lists of keys per query, the option ``selected``, as numbers of keys and as a bool mask."""

from typing import NamedTuple

import torch
from torch import Tensor

from pyattn.options.checks import has_values


def keys_of(selected: Tensor, block: int) -> Tensor:
    """The keys of each entry, int64 (B or 1, lists, Sq, n * block); -1 for none.

    Args:
        selected: (B or 1, lists, Sq, n), -1 for none.
        block: how many neighbouring keys an entry stands for.
    """
    entries = selected.to(torch.int64).unsqueeze(-1)
    keys = entries * block + torch.arange(block, device=entries.device)
    return torch.where(entries < 0, -1, keys).flatten(3)


def check_packed(selected: Tensor, tokens: int) -> None:
    """ValueError unless these are lists (lists, tokens, n) of packed sequences."""
    if selected.dim() != 3 or selected.shape[1] != tokens:
        raise ValueError(f"pyattn: selected must have shape (lists, {tokens}, count), got {tuple(selected.shape)}")


def check_entries(selected: Tensor, block: int, seqlen_k: int) -> None:
    """ValueError for the first entry that names no key and no block of keys, with the operator's message.

    Arguments are those of :func:`keys_of`.
    """
    block = min(block, max(1, seqlen_k))
    count = -(-seqlen_k // block)
    wrong = (selected < -1) | (selected >= count)
    if has_values(wrong) and wrong.any():
        sequence, lists, query, entry = at = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(
            f"pyattn: selected must hold {'keys' if block == 1 else 'blocks of keys'} from 0 to {count - 1}, or -1 for "
            f"none, got {int(selected[at])} in entry {entry} of query {query}, sequence {sequence}, list {lists}"
        )


def in_first_keys(selected: Tensor, block: int, first: int, seqlen_k: int) -> Tensor:
    """Lists of ``seqlen_k`` keys for the ``first`` ones, -1 for entries past these. See :func:`check_entries`."""
    integers = isinstance(selected, Tensor) and selected.dtype in (torch.int32, torch.int64)
    if not integers or selected.dim() != 4 or not isinstance(block, int) or block < 1:
        return selected  # attention refuses them
    if selected.is_cpu:
        check_entries(selected, block, seqlen_k)
    return torch.where(selected >= -(-first // block), -1, selected)


def as_mask(selected: Tensor, block: int, seqlen_k: int, num_heads: int) -> Tensor:
    """bool (B or 1, num_heads or 1, Sq, Sk): the pairs of a query and a key that its list has.

    Entries below 0 or past the last key list none. Arguments are those of :func:`keys_of`.
    """
    block = min(block, max(1, seqlen_k))
    count = -(-seqlen_k // block)
    places = torch.where((selected < 0) | (selected >= count), count, selected).to(torch.int64)
    listed = torch.zeros(*places.shape[:-1], count + 1, dtype=torch.bool, device=places.device)
    listed = listed.scatter(-1, places, True)[..., :count]
    if block > 1:
        listed = listed.repeat_interleave(block, -1)[..., :seqlen_k]
    lists = listed.shape[1]
    return listed if lists == 1 else listed.repeat_interleave(num_heads // max(1, lists), 1)


class Listed(NamedTuple):
    """The keys that some queries list.

    Attributes:
        keys: int64 (B or 1, lists, rows, n): their numbers; 0 where there is none.
        none: bool, shaped like keys: entries of -1, keys past the last one, and keys that the list has before.
        seqlen_k: how many keys there are to list.
    """

    keys: Tensor
    none: Tensor
    seqlen_k: int

    def of_heads(self, num_heads: int) -> "Listed":
        """With the lists of each head: keys and none (B or 1, num_heads or 1, rows, n)."""
        lists = self.keys.shape[1]
        if lists in (1, num_heads):
            return self
        keys, none = (t.repeat_interleave(num_heads // lists, 1) for t in (self.keys, self.none))
        return Listed(keys, none, self.seqlen_k)


def listed(selected: Tensor, block: int, seqlen_k: int) -> Listed:
    """The keys of the lists, each once; arguments as for :func:`keys_of`."""
    keys = keys_of(selected, block)
    order = keys.argsort(dim=-1, stable=True)
    in_order = keys.gather(-1, order)
    again = torch.zeros_like(keys, dtype=torch.bool)
    again = again.scatter(-1, order[..., 1:], in_order[..., 1:] == in_order[..., :-1])
    none = again | (keys < 0) | (keys >= seqlen_k)
    return Listed(torch.where(none, 0, keys), none, seqlen_k)
