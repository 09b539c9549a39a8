"""Promise: pages that can't be read or written are an error that names their fault."""

import pytest
import torch
from support.assertions import Refusals, each_refusal, refused
from support.caches import zeros
from torch import Tensor

from pyattn import KVCache, attention_with_cache

ops = torch.ops.pyattn

table = torch.zeros(2, 3, dtype=torch.int64)
paged = {"q": zeros(2, 4, 3, 8), "k": zeros(6, 16, 2, 8), "v": zeros(6, 16, 2, 6), "block_table": table, "seqlen_k": 40}
BAD_CALLS: Refusals = [
    ({"k": zeros(6, 16, 8)}, ValueError, "k and v in pages 4 (pages, page_size, num_heads, head_dim), got q [2, 4, 3"),
    ({"v": zeros(5, 16, 2, 6)}, ValueError, "v must have shape [6, 16, 2, 6], got [5, 16, 2, 6]"),
    ({"k": zeros(6, 15, 2, 8), "v": zeros(6, 15, 2, 6)}, ValueError, "page_size must be at least 16, got 15"),
    ({"k": zeros(6, 16, 2, 9)}, ValueError, "q and k must have the same head_dim, got 8 and 9"),
    ({"k": zeros(6, 16, 3, 8)}, ValueError, "num_heads_q must be a multiple of num_heads_kv, got 4 and 3"),
    ({"block_table": table.float()}, TypeError, "block_table must have dtype int32 or int64, got float32"),
    ({"block_table": table[:1]}, ValueError, "block_table must have shape (2, pages of a sequence), got [1, 3]"),
    ({"block_table": table.to("meta")}, ValueError, "block_table must be on q's device, got meta and cpu"),
    ({"block_table": table[:, :2]}, ValueError, "list pages for every key, got 2 of size 16 for the 40 keys of seq"),
    ({"block_table": table + 6}, ValueError, "block_table must hold pages from 0 to 5, got 6 at [0, 0]"),
    ({"block_table": table - table.new_tensor([0, 0, 1])}, ValueError, "pages from 0 to 5, got -1 at [0, 2]"),
    ({"seqlen_k": -1}, ValueError, "seqlen_k must be at least 0, got -1"),
    ({"seqlen_k": 2**63 - 1}, ValueError, "got 3 of size 16 for the 9223372036854775807 keys of sequence 0"),
    ({"bias": zeros(3, 41)}, ValueError, "each 1 or that of [2, 4, 3, 40], got [3, 41]"),
    ({"key_ranges": torch.tensor([[[0, 41]] * 3])}, ValueError, "seqlen_k = 40, got [0, 41] for query 0"),
]


@each_refusal(BAD_CALLS)
def test_wrong_calls(changes, kind, message):
    ops.attention_paged_forward(**paged)
    with refused(kind, message, inside=True):
        ops.attention_paged_forward(**paged | changes)


def storage_of() -> list[Tensor]:
    return [zeros(4, 16, 2, 8), zeros(4, 16, 2, 6), torch.zeros(2, dtype=torch.int64), table[:, :2].clone()]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({0: zeros(4, 16, 8)}, "(pages, page_size, num_heads, head_dim), got [4, 16, 8] and [4, 16, 2, 6]"),
        ({1: zeros(4, 17, 2, 6)}, "values must have shape [4, 16, 2, 6], got [4, 17, 2, 6]"),
        ({0: zeros(4, 8, 2, 8), 1: zeros(4, 8, 2, 6)}, "page_size must be at least 16, got 8"),
        ({0: zeros(4, 16, 8, 2).mT}, "columns of keys and values must be contiguous, got strides [256, 16, 1, 2]"),
        ({2: torch.zeros(3, dtype=torch.int64)}, "lengths must have shape [2], got [3]"),
        ({2: torch.tensor([0, -1])}, "each of the cache's lengths must be between 0 and 32, got -1 at 1"),
        ({2: torch.tensor([33, 0])}, "each of the cache's lengths must be between 0 and 32, got 33 at 0"),
        ({2: torch.tensor([0, 17]), 3: torch.tensor([[0, 0], [0, 4]])}, "pages from 0 to 3, got 4 at [1, 1]"),
        ({2: torch.tensor([0, 1]), 3: torch.tensor([[0, 0], [-1, 0]])}, "pages from 0 to 3, got -1 at [1, 0]"),
        ({3: torch.zeros(2, 3, dtype=torch.int64)}, "must have 6 pages, one for each place of block_table, got 4"),
        ({3: torch.zeros(4, dtype=torch.int64)}, "block_table must have shape (batch, pages of a sequence), got [4]"),
        ({2: torch.tensor([0, 30])}, "must not outgrow the cache's max_seqlen of 32, got 30 + 3 positions of sequence"),
    ],
    ids=str,
)
def test_operators_check_what_they_write(changes, message):
    """Raw operators read and write in bounds, whatever is passed as a cache."""
    storage = storage_of()
    for which, value in changes.items():
        storage[which] = value
    with refused(ValueError, message, inside=True):
        ops.cache_append_pages(*storage, zeros(2, 2, 3, 8), zeros(2, 2, 3, 6), None, 99)


def test_tables_that_were_tampered_with():
    """The message is the same if a gradient is wanted, when pages are copied."""
    cached = KVCache(2, 2, 40, 8, page_size=16)
    cached.append(*torch.randn(2, 2, 2, 20, 8))
    assert cached.block_table is not None
    for wrong in (6, -1):
        cached.block_table[1, 1] = wrong
        for q in (torch.randn(2, 2, 1, 8), torch.randn(2, 2, 1, 8, requires_grad=True)):
            with pytest.raises(ValueError, match=rf"block_table must hold pages from 0 to 5, got {wrong} at \[1, 1\]"):
                attention_with_cache(q, cached)
    cached.lengths[1] = 3
    attention_with_cache(torch.randn(2, 2, 1, 8, requires_grad=True), cached)
