"""Where a cache holds the positions of each sequence: in its first rows, in chosen rows, or in pages."""

from typing import NamedTuple

import torch
from torch import Tensor

from pyattn import ops
from pyattn.adapters.flash_attn.arguments import WrongValueError, check_dimensions, check_int32
from pyattn.cache import pages
from pyattn.options.checks import check_between, check_size, has_values


class Layout(NamedTuple):
    """Where the cache holds the positions of each sequence.

    Attributes:
        table: (B, pages of a sequence), the pages of each sequence.
        page_size: positions of a page.
        paged: whether the caller gave the table; else a row of the cache is one page.
    """

    table: Tensor
    page_size: int
    paged: bool

    @property
    def capacity(self) -> int:
        """How many positions a sequence has room for."""
        return self.table.shape[1] * self.page_size

    def in_use(self, lengths: Tensor, num_pages: int) -> "Layout":
        """The layout with page 0 for entries that sequences of these lengths do not reach; checks the others."""
        if not self.paged:
            return self
        starts = self.capacity * torch.arange(len(lengths) + 1, device=lengths.device)
        table, _ = ops.pages_in_use(self.table, starts, self.capacity, lengths, num_pages, self.page_size)
        return self._replace(table=table)

    def rows(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """The page and the position in it of each of ``places`` (B, new)."""
        return self.table.gather(1, places // self.page_size), places % self.page_size


def layout_of(
    k_cache: Tensor,
    batch: int,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    block_table: Tensor | None,
) -> Layout | None:
    """The layout of the cache for ``batch`` sequences; None for its first rows in order, in memory that can be read."""
    page_size = k_cache.shape[1]
    for name, tensor in (("cache_batch_idx", cache_batch_idx), ("cache_leftpad", cache_leftpad)):
        if tensor is not None:
            check_int32(name, tensor, (batch,))
            if block_table is not None:
                raise NotImplementedError(f"pyattn: a block_table takes no {name}, got both")
    if block_table is not None:
        check_int32("block_table", block_table)
        check_dimensions("block_table", block_table, "batch, pages")
        check_size("page_size", page_size, least=pages.LEAST)
        return Layout(block_table, page_size, paged=True)
    if cache_batch_idx is not None:
        check_between("cache_batch_idx", cache_batch_idx, 0, k_cache.shape[0] - 1)
        return Layout(cache_batch_idx[:, None].long(), page_size, paged=False)
    if k_cache.shape[0] < batch:
        raise WrongValueError(f"pyattn: k_cache must have q's {batch} sequences, got {k_cache.shape[0]}")
    if has_values(k_cache):
        return None
    return Layout(torch.arange(batch, device=k_cache.device)[:, None], page_size, paged=False)


def sequences_of(cache: Tensor, batch: int) -> Tensor:
    """The cache's first sequences, (B, Hkv, slots, D)."""
    return (cache if cache.shape[0] == batch else cache[:batch]).transpose(1, 2)


def places_of(before: Tensor, new: int) -> Tensor:
    """(B, new): the positions of the new tokens."""
    return before[:, None] + torch.arange(new, device=before.device)


def ranges_of(cache_leftpad: Tensor | None, lengths: Tensor, seqlen_q: int) -> Tensor:
    """The keys [begin, end) of each query, (B, Sq, 2)."""
    begin = torch.zeros_like(lengths) if cache_leftpad is None else cache_leftpad.long()
    if cache_leftpad is not None and has_values(begin) and ((begin < 0) | (begin > lengths)).any():
        raise WrongValueError(
            f"pyattn: each of cache_leftpad must be between 0 and its sequence's length, {lengths.tolist()}, "
            f"got {begin.tolist()}"
        )
    return torch.stack([begin, lengths], -1)[:, None].expand(-1, seqlen_q, -1)
