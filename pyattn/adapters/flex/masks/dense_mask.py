"""Any mask_mod evaluated exactly, block of rows by block of rows."""

from collections.abc import Callable, Iterator, Set

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import noop_mask

from pyattn.adapters.flex.trace.evaluation import over_distances, over_pairs, uncompiled
from pyattn.adapters.flex.trace.trace import Trace
from pyattn.masks.algebra import from_blocks, from_bool, from_first_to_last
from pyattn.masks.key_ranges import MOST_RANGES, bare

PAIRS_AT_ONCE = 2**18
"""Pairs in a block of rows, over sequences and heads: temporaries of 2 MB as int64, which fit in a cache."""


class Holes:
    """A mask in which some row has too many intervals of keys for key_ranges, or heads differ.

    Args:
        mask_mod: any.
        sizes: (B, Hq, Sq, Sk); B and Hq are 1 if the mask_mod doesn't depend on them.
        reads: which of "q_idx", "kv_idx" and their "distance" it depends on.
        trace: a run of the mask_mod.
    """

    mask_mod: Callable[..., Tensor]
    sizes: tuple[int, int, int, int]
    device: torch.device

    def __init__(
        self,
        mask_mod: Callable[..., Tensor],
        sizes: tuple[int, int, int, int],
        device: torch.device,
        reads: Set[str],
        trace: Trace | None = None,
    ) -> None:
        self.mask_mod, self.sizes, self.device, self._reads = mask_mod, sizes, device, reads
        self._trace = trace
        self._bits: Tensor | None = None
        self._hulls: Tensor | None = None

    @classmethod
    def given(cls, bits: Tensor) -> "Holes":
        """The mask whose bits (B or 1, Hq or 1, Sq, Sk) are known."""
        batch, heads, seqlen_q, seqlen_k = bits.shape
        holes = cls(noop_mask, (batch, heads, seqlen_q, seqlen_k), bits.device, frozenset())
        holes._bits = bits
        return holes

    @property
    def trace(self) -> Trace | None:
        """The run of the mask_mod, None once the whole mask is known: then nothing reads the mask_mod's tensors."""
        return self._trace if self._bits is None else None

    def visible(self, batch: slice, heads: slice, rows: slice) -> Tensor:
        """bool, the mask for these sequences, heads and query rows; 1 sequence or head if they don't differ."""
        asked = batch, heads, rows, slice(None)
        places = [s if size > 1 else slice(None) for s, size in zip(asked, self.sizes, strict=True)]
        if self._bits is not None:
            return self._bits[tuple(places)]
        every = (torch.arange(size, device=self.device) for size in self.sizes)
        b, h, q_idx, kv_idx = (x[s] for x, s in zip(every, places, strict=True))
        if self._reads == {"distance"}:
            seqlen_q, seqlen_k = self.sizes[2:]
            by_distance = over_distances(self.mask_mod, b, h, (seqlen_q, seqlen_k))
            return by_distance.unfold(-1, seqlen_k, 1)[:, :, seqlen_q - 1 - q_idx]
        if self._reads <= {"kv_idx"}:  # rows are alike
            return over_pairs(self.mask_mod, [b, h, q_idx[:1], kv_idx]).expand(-1, -1, len(q_idx), -1)
        return over_pairs(self.mask_mod, [b, h, q_idx, kv_idx])

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """The first row of each block of rows, and the mask for its rows."""
        batch, heads, seqlen_q, seqlen_k = self.sizes
        pairs = batch * heads * seqlen_k  # of a row
        step = max(1, PAIRS_AT_ONCE // max(1, pairs))
        for begin in range(0, seqlen_q if pairs else 0, step):
            yield begin, self.visible(slice(None), slice(None), slice(begin, begin + step))

    def ranges(self) -> Tensor | None:
        """The mask as key_ranges, (B, Sq, 2) or (B, Sq, n, 2), or None if it has holes indeed."""
        batch, heads, seqlen_q, seqlen_k = self.sizes
        if 0 not in self.sizes and self._reads == {"distance"}:
            b, h = (torch.arange(size, device=self.device) for size in (batch, heads))
            by_distance = over_distances(self.mask_mod, b, h, (seqlen_q, seqlen_k))[:, :, None]
            band = from_bool(by_distance, intervals=MOST_RANGES)
            if band is not None:  # else its rows may still be intervals, of fewer distances
                first = torch.arange(seqlen_q, device=self.device).view(-1, *(1,) * (band.dim() - 2)) + 1 - seqlen_q
                moved: Tensor = bare(band) + first
                return moved.clamp_(0, seqlen_k)
        if 0 not in self.sizes and self._reads <= {"kv_idx"}:  # rows are alike
            row = from_blocks([self.visible(slice(None), slice(None), slice(1))], batch, 1, self.device)
            return None if row is None else row.expand(-1, seqlen_q, *row.shape[2:])
        return from_blocks((block for _, block in self.blocks()), batch, seqlen_q, self.device)

    def bits(self) -> Tensor:
        """The whole mask, bool (B, Hq, Sq, Sk), kept for later calls."""
        if self._bits is None:
            self._bits = self._evaluated()
        return self._bits

    def hulls(self) -> Tensor | None:
        """key_ranges (B, Sq, 2) from the first to the last key visible to some head: kernels read no other bits.

        None before :meth:`bits`, or if the whole mask was given.
        """
        return self._hulls

    @uncompiled
    @torch.inference_mode(False)  # so they can be saved for backward
    def _evaluated(self) -> Tensor:
        batch, _, seqlen_q, _ = self.sizes
        bits = torch.empty(self.sizes, dtype=torch.bool, device=self.device)
        self._hulls = torch.zeros(batch, seqlen_q, 2, dtype=torch.int64, device=self.device)
        for begin, block in self.blocks():
            rows = slice(begin, begin + block.shape[2])
            bits[:, :, rows] = block
            self._hulls[:, rows] = from_first_to_last(block.any(1))
        return bits
