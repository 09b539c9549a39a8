"""Where a cache holds its sequences: in rows or in pages, what is written to them, and how long they are."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from pyattn.adapters.flash_attn.arguments import WrongValueError, check_dimensions, check_int32, check_together
from pyattn.adapters.flash_attn.hopper.arguments import FLOAT8, check_lengths
from pyattn.adapters.flash_attn.hopper.tokens import Tokens, tokens_of
from pyattn.cache.pages import LEAST
from pyattn.options.checks import check_between, check_size


class Cache(NamedTuple):
    """Where the cache holds the positions of each sequence.

    Attributes:
        table: (B, pages of a sequence) int64; without the caller's page_table a row of the cache is one page.
        page_size: positions of a page.
        num_pages: pages of the cache.
    """

    table: Tensor
    page_size: int
    num_pages: int

    @property
    def capacity(self) -> int:
        """How many positions a sequence has room for."""
        return self.table.shape[1] * self.page_size

    def check_pages(self, lengths: Tensor) -> None:
        """ValueError unless every page that sequences of these lengths reach exists."""
        starts = torch.arange(self.table.shape[1], device=lengths.device) * self.page_size
        check_between("page_table", self.table[starts < lengths[:, None]], 0, self.num_pages - 1)

    def write(self, store: Tensor, places: Tensor, rows: Tensor, tokens: Tensor) -> None:
        """Writes tokens (n, Hkv, D) to the positions ``places`` (n,) of the sequences ``rows``."""
        where = self.table[rows, places // max(1, self.page_size)], places % max(1, self.page_size)
        if store.dtype == FLOAT8:  # torch has no index_put_ for it
            store, tokens = store.view(torch.uint8), tokens.view(torch.uint8)
        store.index_put_(where, tokens)

    def pages(self, k_cache: Tensor, v_cache: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values in pages that attention reads in place, of at least 16 positions, and their table."""
        if self.page_size >= LEAST:
            return k_cache, v_cache, self.table
        starts = torch.arange(self.table.shape[1], device=lengths.device) * self.page_size
        table = self.table.where(starts < lengths[:, None], 0)
        batch, room = len(table), max(LEAST, self.capacity)
        found = []
        for store in (k_cache, v_cache):
            whole = store.view(torch.uint8) if store.dtype == FLOAT8 else store
            rows = whole[table].flatten(1, 2) if self.num_pages else whole.new_zeros(batch, 0, *store.shape[2:])
            found.append(pad(rows, (0, 0, 0, 0, 0, room - rows.shape[1])).view(store.dtype))
        return found[0], found[1], torch.arange(batch, device=lengths.device)[:, None]


def cache_of(
    k_cache: Tensor, v_cache: Tensor, q: Tensor, batch: int, cache_batch_idx: Tensor | None, page_table: Tensor | None
) -> Cache:
    """The layout of the cache for ``batch`` sequences, whose shapes fit those of q."""
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_dimensions(name, tensor, "batch, seqlen, num_heads, head_dim")
        if tensor.dtype != q.dtype:
            raise TypeError(f"pyattn: {name} must have q's dtype, {q.dtype}, got {tensor.dtype}")
    shapes, heads = k_cache.shape[:3] == v_cache.shape[:3], max(1, k_cache.shape[2])
    if not shapes or q.shape[-1] != k_cache.shape[3] or q.shape[-2] % heads:
        raise WrongValueError(
            "pyattn: q, k_cache and v_cache must have shapes (.., Hq, D), (sequences, slots, Hkv, D) and (sequences, "
            f"slots, Hkv, Dv), Hq a multiple of Hkv, got {tuple(q.shape)}, {tuple(k_cache.shape)} and "
            f"{tuple(v_cache.shape)}"
        )
    num_pages, page_size = k_cache.shape[:2]
    if page_table is not None:
        if cache_batch_idx is not None:
            raise NotImplementedError("pyattn: a page_table takes no cache_batch_idx, got both")
        check_int32("page_table", page_table)
        check_dimensions("page_table", page_table, "batch, pages")
        if len(page_table) != batch:
            raise WrongValueError(f"pyattn: page_table must have q's {batch} sequences, got {tuple(page_table.shape)}")
        return Cache(page_table.long(), page_size, num_pages)
    if cache_batch_idx is not None:
        check_int32("cache_batch_idx", cache_batch_idx, (batch,))
        check_between("cache_batch_idx", cache_batch_idx, 0, num_pages - 1)
        return Cache(cache_batch_idx[:, None].long(), page_size, num_pages)
    if num_pages < batch:
        raise WrongValueError(f"pyattn: k_cache must have q's {batch} sequences, got {num_pages}")
    return Cache(torch.arange(batch, device=q.device)[:, None], page_size, num_pages)


def lengths_before(cache_seqlens: int | Tensor | None, batch: int, capacity: int, device: torch.device) -> Tensor:
    """Lengths before the call, (B,) int64."""
    room = torch.full((batch,), capacity, device=device)
    if isinstance(cache_seqlens, Tensor):
        return check_lengths("cache_seqlens", cache_seqlens, room)
    if cache_seqlens is None:
        return room
    check_size("cache_seqlens", cache_seqlens)
    if cache_seqlens > capacity:
        raise WrongValueError(f"pyattn: cache_seqlens must be at most the {capacity} of the cache, got {cache_seqlens}")
    return torch.full((batch,), cache_seqlens, device=device)


def new_tokens(
    k: Tensor | None,
    v: Tensor | None,
    cu_seqlens: Tensor | None,
    before: object,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: int,
) -> tuple[Tokens, Tensor]:
    """The new keys, and values (total_new, Hkv, Dv), of ``batch`` sequences and with the heads of the cache."""
    check_together(k=k, v=v, cache_seqlens=before)
    assert k is not None and v is not None  # noqa: PT018
    keys, values = tokens_of("k", k, cu_seqlens), tokens_of("v", v, cu_seqlens)
    for name, tensor, store in (("k", k, k_cache), ("v", v, v_cache)):
        if tensor.dtype != store.dtype:
            raise TypeError(f"pyattn: {name} must have the cache's dtype, {store.dtype}, got {tensor.dtype}")
        if keys.batch != batch or tensor.shape[:-2] != k.shape[:-2] or tensor.shape[-2:] != store.shape[2:]:
            raise WrongValueError(
                f"pyattn: {name} must have q's {batch} sequences, k's tokens, and heads as a cache "
                f"{tuple(store.shape)}, got {tuple(tensor.shape)}"
            )
    return keys, values.values
