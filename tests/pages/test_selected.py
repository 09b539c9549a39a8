"""Promise: lists over pages read the listed rows in place, with the results of contiguous keys."""

import math
from typing import Any

import pytest
import torch
from support.cases import Case, memory_needed

from pyattn import attention, ops
from pyattn.cache import paged_attention
from pyattn.options.parse import parse


@pytest.mark.parametrize("block", [1, 4, 16, 24, 48])
@pytest.mark.parametrize("of", [1, 2, 4])
def test_over_pages_in_place(isa: str, of: int, block: int) -> None:
    """Pages in any order, some shared; blocks of keys that divide a page, reach over pages, and past the last key."""
    case = Case(2, 4, 2, 70, 157, 32, 40)
    q, k, v = case.inputs(torch.float32)
    table = torch.tensor([[7, 2, 11, 0, 9, 4, 1, 3, 12, 15], [7, 2, 5, 8, 6, 13, 10, 14, 17, 16]])
    keys, values = (torch.full((20, 16, 2, t.shape[3]), math.nan) for t in (k, v))
    k[1, :, :32], v[1, :, :32] = k[0, :, :32], v[0, :, :32]  # in the first two pages of both
    for pages, t in ((keys, k), (values, v)):
        for b, page, place in ((b, int(table[b, n]), 16 * n) for b in range(2) for n in range(10)):
            some = t[b, :, place : place + 16].transpose(0, 1)
            pages[page, : len(some)] = some
    blocks = -(-157 // block)
    for batch, entries in ((1, 9), (2, max(9, 100 // block))):
        selected = torch.randint(-1, blocks, (batch, of, 70, entries))
        options: dict[str, Any] = {"selected": selected, "selected_block": block, "sinks": torch.randn(4)}
        for more in ({}, {"q_offset": torch.tensor([30, 87])}, {"bias": torch.randn(2, 1, 70, 157)}):
            found = paged_attention.attention(q, keys, values, table, torch.tensor([157, 157]), 157, **options | more)
            torch.testing.assert_close(found, attention(q, k, v, return_lse=True, **options | more))


def test_a_page_that_a_sequence_holds_twice(isa: str) -> None:
    """Its block is then listed twice by a query, of two positions."""
    q, keys, values = torch.randn(1, 4, 70, 32), torch.randn(5, 32, 2, 32), torch.randn(5, 32, 2, 40)
    table, blocks = torch.tensor([[3, 1, 3, 0, 1, 4]]), torch.randint(0, 6, (1, 2, 70, 5))
    options: dict[str, Any] = {"selected": blocks, "selected_block": 32, "causal": False}
    found = paged_attention.attention(q, keys, values, table, torch.tensor([192]), 192, **options)
    k, v = (pages[table[0]].flatten(0, 1).transpose(0, 1)[None] for pages in (keys, values))
    torch.testing.assert_close(found, attention(q, k, v, return_lse=True, **options))


def test_pages_are_not_copied() -> None:
    """All pages would be 64 MiB."""
    keys, values = (torch.zeros(4096, 16, 4, 64) for _ in range(2))
    table, q, selected = torch.arange(4096)[None], torch.randn(1, 8, 1, 64), torch.randint(0, 65536, (1, 1, 1, 64))
    lengths = torch.tensor([65536])
    options: dict[str, Any] = {"selected": selected, "causal": False}
    assert memory_needed(lambda: paged_attention.attention(q, keys, values, table, lengths, 65536, **options)) < 2**23


def test_pages_of_no_sequences() -> None:
    """With one list for all sequences."""
    q, pages, table = torch.zeros(0, 2, 3, 16), torch.zeros(4, 16, 2, 16), torch.zeros(0, 2, dtype=torch.int64)
    selected, lengths = torch.zeros(1, 1, 3, 5, dtype=torch.int32), torch.zeros(0, dtype=torch.int64)
    out, _ = paged_attention.attention(q, pages, pages, table, lengths, 20, selected=selected)
    assert out.shape == q.shape


def test_dropout_in_pages_copies_them() -> None:
    """It draws by positions, which the lists of pages do not hold."""
    k, v, q = torch.randn(1, 48, 2, 16), torch.randn(1, 48, 2, 16), torch.randn(1, 2, 5, 16)
    order, selected = torch.tensor([[2, 0, 1]]), torch.randint(0, 48, (1, 1, 5, 30))
    options: dict[str, Any] = {"selected": selected, "dropout_p": 0.4, "dropout_seed": 3}
    keys, values = (t.unflatten(1, (3, 16))[0][order[0].argsort()] for t in (k, v))
    found = paged_attention.attention(q, keys, values, order, torch.tensor([48]), 48, **options)
    expected = attention(q, *(t.transpose(1, 2) for t in (k, v)), return_lse=True, **options)
    torch.testing.assert_close(found, expected)
    known = parse(attention, options, q.device)
    with pytest.raises(NotImplementedError, match=r"selected keys in pages take no dropout, got dropout_p=0\.4"):
        ops.attention_paged_forward(q, keys, values, order, 48, *known)


def test_more_positions_in_pages_than_an_entry_counts() -> None:
    pages = torch.zeros(1, 16, 1, 16).expand(2**27 + 1, 16, 1, 16)
    table, selected = torch.tensor([[5]]), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="selected keys take at most 2147483647 positions in pages"):
        paged_attention.attention(
            torch.zeros(1, 1, 1, 16), pages, pages, table, torch.tensor([3]), 3, selected=selected
        )
