"""Lists of keys per query, the option ``selected``, as numbers of keys and as a bool mask."""

import torch
from torch import Tensor


def keys_of(selected: Tensor, block: int) -> Tensor:
    """The keys of each entry, int64 (B or 1, lists, Sq, n * block); -1 for none.

    Args:
        selected: (B or 1, lists, Sq, n), -1 for none.
        block: how many neighbouring keys an entry stands for.
    """
    entries = selected.to(torch.int64).unsqueeze(-1)
    keys = entries * block + torch.arange(block, device=entries.device)
    return torch.where(entries < 0, -1, keys).flatten(3)


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
