"""Promise: a layout shares the work, and chunks of keys travel no further than they are visible, in few buffers."""

from itertools import accumulate
from typing import Any

import pytest
import torch
from support.ranks import ranks
from support.ranks.pool import pool

from pyattn.distributed.layout import chunks_of, sequence_layout_of
from pyattn.distributed.ring.chunk_attention import Dense
from pyattn.distributed.ring.routes import routes_of
from pyattn.options import Options

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")


def pairs(ranks: int, layout: str, seqlen: int) -> list[int]:
    """How many keys each rank's queries see together under a causal mask."""
    return [sum(i + 1 for chunk in held for i in chunk) for held in chunks_of(seqlen, ranks, layout)]


def test_zigzag_balances_a_causal_mask() -> None:
    for ranks_ in (2, 3, 4, 8):
        counted = pairs(ranks_, "zigzag", 8192)
        assert max(counted) * ranks_ / sum(counted) < 1.001
        assert max(pairs(ranks_, "contiguous", 8192)) * ranks_ / sum(counted) > 1.4


def packed_pairs(ranks_: int, lengths: list[int]) -> list[int]:
    """The same for packed sequences, each of them cut."""
    begins = [0, *accumulate(lengths)]
    sequences = sequence_layout_of("cu_seqlens", begins, begins[-1], ranks_, "zigzag_varlen")
    held = chunks_of(begins[-1], ranks_, "zigzag_varlen", sequences=sequences)
    return [sum(i + 1 for chunk in chunks for _, run in sequences.runs(chunk) for i in run) for chunks in held]


def test_zigzag_balances_packed_sequences() -> None:
    """The lengths of the guide, and sequences with fewer tokens than there are chunks."""
    for lengths in ([3000, 200, 2500, 1000, 1492], [4] * 64):
        for ranks_ in (2, 4):
            counted = packed_pairs(ranks_, lengths)
            assert max(counted) * ranks_ / sum(counted) < 1.05


def hops(layout: str, ranks_: int, seqlen: int, **options: Any) -> list[int]:
    """How far each chunk travels."""
    chunks = chunks_of(seqlen, ranks_, layout)
    dense = Dense(Options(**options), torch.empty(1, 1, seqlen, 1), seqlen, seqlen)
    return [route.hops for route in routes_of(chunks, chunks, dense.visible)]


def travelling(layout: str, ranks_: int, seqlen: int, **options: Any) -> list[int]:
    """How many keys of each chunk travel."""
    chunks = chunks_of(seqlen, ranks_, layout)
    dense = Dense(Options(**options), torch.empty(1, 1, seqlen, 1), seqlen, seqlen)
    return [len(route.keys) for route in routes_of(chunks, chunks, dense.visible)]


def test_chunks_travel_as_far_as_they_are_visible() -> None:
    assert hops("contiguous", 4, 64, causal=False) == [3] * 4
    assert hops("contiguous", 4, 64) == [3, 2, 1]
    assert hops("contiguous", 4, 64, window=(15, 0)) == [1, 1, 1]
    assert hops("contiguous", 4, 64, window=(16, 0)) == [1, 1, 1]
    assert hops("contiguous", 4, 64, window=(17, 0)) == [2, 2, 1]
    assert travelling("contiguous", 4, 64, window=(15, 0)) == [15, 15, 15]
    assert travelling("contiguous", 4, 64, window=(17, 0)) == [16, 16, 16]
    # The last chunk of zigzag, and the middle one beside its successor on the same rank, stay where they are.
    assert hops("zigzag", 4, 64, window=(8, 0)) == [1] * 6
    assert sorted(hops("zigzag", 4, 64)) == [1, 2, 3, 3, 3, 3, 3]


def test_the_number_of_buffers_does_not_grow_with_the_ranks() -> None:
    """Twice as many ranks have twice as many chunks."""
    most = {size: max(pool().run(size, ranks.most_buffers)) for size in (4, 8)}
    assert most[8] <= 1.5 * most[4], most
