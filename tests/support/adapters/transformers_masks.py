"""The keys that a mask of the adapter of transformers makes visible."""

import torch
from torch import Tensor

from pyattn.adapters.transformers.mask import Mask
from pyattn.masks.key_ranges import by_interval


def shown(mask: Tensor | Mask | None, q_length: int, kv_length: int, causal: bool) -> Tensor:
    """bool (2, 1, Sq, Sk): the keys that the attention function makes visible for a mask."""
    keys = torch.arange(kv_length)
    upper_left = keys <= torch.arange(q_length)[:, None]
    if mask is None:
        seen = upper_left if causal and q_length > 1 else keys >= 0
    elif isinstance(mask, Tensor):
        seen = mask
    else:
        assert mask.shape == (mask.shape[0], 1, q_length, kv_length)
        if mask.ranges is not None:
            begin, end = by_interval(mask.ranges)[:, None].split(1, -1)
            seen = ((begin <= keys) & (keys < end)).any(-2)
        else:
            seen = upper_left if mask.pairs is None else mask.pairs
    return seen.expand(2, 1, q_length, kv_length)
