"""Any mask_mod evaluated exactly, block of rows by block of rows."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from pyattn.adapters.flex.evaluation import over_pairs, uncompiled
from pyattn.key_ranges import MOST_RANGES, bare, by_interval
from pyattn.masks import from_bool

PAIRS_AT_ONCE = 2**18
"""Pairs in a block of rows, over sequences and heads: temporaries of 2 MB as int64, which fit in a cache."""


class Holes:
    """A mask in which some row has too many intervals of keys for key_ranges, or heads differ.

    Args:
        mask_mod: any.
        sizes: (B, Hq, Sq, Sk); B and Hq are 1 if the mask_mod doesn't depend on them.
    """

    mask_mod: Callable[..., Tensor]
    sizes: tuple[int, int, int, int]
    device: torch.device

    def __init__(self, mask_mod: Callable[..., Tensor], sizes: tuple[int, int, int, int], device: torch.device) -> None:
        self.mask_mod, self.sizes, self.device = mask_mod, sizes, device
        self._bits: Tensor | None = None

    def seen(self, batch: slice, heads: slice, rows: slice) -> Tensor:
        """bool, the mask for these sequences, heads and query rows; 1 sequence or head if they don't differ."""
        asked = batch, heads, rows, slice(None)
        kept = [s if size > 1 else slice(None) for s, size in zip(asked, self.sizes, strict=True)]
        if self._bits is not None:
            return self._bits[tuple(kept)]
        every = (torch.arange(size, device=self.device) for size in self.sizes)
        return over_pairs(self.mask_mod, [x[s] for x, s in zip(every, kept, strict=True)])

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """The first row of each block of rows, and the mask for its rows."""
        batch, heads, seqlen_q, seqlen_k = self.sizes
        pairs = batch * heads * seqlen_k  # of a row
        step = max(1, PAIRS_AT_ONCE // max(1, pairs))
        for begin in range(0, seqlen_q if pairs else 0, step):
            yield begin, self.seen(slice(None), slice(None), slice(begin, begin + step))

    def ranges(self) -> Tensor | None:
        """The mask as key_ranges, (B, Sq, 2) or (B, Sq, n, 2), or None if it has holes indeed."""
        batch, _, seqlen_q, seqlen_k = self.sizes
        found = torch.full((batch, seqlen_q, MOST_RANGES, 2), seqlen_k, device=self.device)
        found[:, :, 0] = 0
        count = 1
        for begin, block in self.blocks():
            ranges = from_bool(block, intervals=MOST_RANGES)
            if ranges is None:
                return None
            own = by_interval(bare(ranges))
            found[:, begin : begin + own.shape[1], : own.shape[2]] = own
            count = max(count, own.shape[2])
        return found[:, :, 0] if count == 1 else found[:, :, :count]

    @uncompiled
    def bits(self) -> Tensor:
        """The whole mask, bool (B, Hq, Sq, Sk), kept for later calls."""
        if self._bits is None:
            bits = torch.empty(self.sizes, dtype=torch.bool, device=self.device)
            for begin, block in self.blocks():
                bits[:, :, begin : begin + block.shape[2]] = block
            self._bits = bits
        return self._bits
