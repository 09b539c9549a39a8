"""Promise: on a GPU pages are used without a host read; invalid entries are left out, or raise with PYATTN_CHECK.

With ``--backend cuda`` the operators take a GPU's tensors, otherwise a CPU's or fake ones.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.caches import on_gpu
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from pyattn import KVCache, attention_varlen, attention_with_cache, ops


def append(cached: KVCache, count: int, lengths: list[int]) -> None:
    tokens = torch.randn(2, len(lengths), 2, count, 8).unbind()
    storage = cached.k, cached.v, cached.lengths, cached.block_table
    on_gpu(ops.cache_append_pages, *storage, *tokens, torch.tensor(lengths), cached.max_seqlen)


def test_what_does_not_fit_is_left_out(device: str) -> None:
    cached = KVCache(3, 2, 20, 8, page_size=16)
    append(cached, 18, [18, 3, 0])
    append(cached, 18, [18, 18, -(2**40)])
    assert cached.lengths.tolist() == [20, 20, 0]
    assert cached.block_table is not None
    before = cached.k.clone(), cached.block_table.clone()
    append(cached, 5, [0, -3, 0])
    assert torch.equal(cached.k, before[0])
    assert torch.equal(cached.block_table, before[1])


def test_tables_and_lengths_that_were_tampered_with(device: str) -> None:
    """Nothing outside the storage is read or written."""
    cached = KVCache(3, 2, 20, 8, page_size=16)
    assert cached.block_table is not None
    around = torch.zeros(8, 16, 2, 8)  # a page before the storage, and one after it
    cached.k = cached.v = around[1:7]
    cached.block_table.copy_(torch.tensor([[-1, 2**40], [6, -(2**40)], [0, 0]]))
    cached.lengths.copy_(torch.tensor([2**40, -5, 17]))
    append(cached, 4, [4, 4, 4])
    on_gpu(ops.cache_reorder_pages, cached.lengths, cached.block_table, torch.tensor([-1, 2**40, 1]))
    assert (around[[0, 7]] == 0).all()


@pytest.mark.parametrize("sizes", [(0, 2, 20, 8), (2, 0, 20, 8), (2, 2, 0, 8), (2, 2, 20, 0)], ids=str)
def test_sizes_of_zero(sizes: tuple[int, int, int, int], device: str) -> None:
    batch, heads, most, head_dim = sizes
    cached = KVCache(*sizes, page_size=16)
    for new in (0, 3):
        storage = cached.k, cached.v, cached.lengths, cached.block_table
        on_gpu(ops.cache_append_pages, *storage, *torch.randn(2, batch, heads, new, head_dim), None, most)
    assert cached.lengths.tolist() == [min(3, most)] * batch


TABLE = torch.tensor([[3, 1, 7], [2, 9, 9], [0, 0, 0]], dtype=torch.int32)
STARTS = torch.tensor([0, 40, 56, 56])


def pages_in_use(arguments: Sequence[Any], device: str) -> list[Tensor]:
    """Runs the GPU's operator with these arguments on ``device``."""
    there = [x.to(device) if isinstance(x, Tensor) else x for x in arguments]
    return [t.cpu() for t in on_gpu(ops.pages_in_use, *there)]


def test_pages_in_use_as_on_the_cpu(device: str) -> None:
    for used in (None, torch.tensor([33, 0, 0], dtype=torch.int32, device="cpu")):
        arguments = TABLE, STARTS, 40, used, 8, 16
        for ours, expected in zip(pages_in_use(arguments, device), ops.pages_in_use(*arguments), strict=True):
            assert torch.equal(ours, expected)


@pytest.mark.parametrize(
    ("changes", "lengths"),
    [
        ({0: TABLE.where(TABLE != 1, 8)}, [-1, 16, 0]),
        ({0: TABLE.where(TABLE != 2, -1)}, [40, -1, 0]),
        ({0: TABLE[:, :2]}, [-1, 16, 0]),
        ({1: torch.tensor([1, 40, 56, 56])}, [-1] * 3),
        ({1: torch.tensor([0, 40, 39, 56])}, [-1] * 3),
        ({2: 39}, [-1] * 3),
        ({3: torch.tensor([41, 17, 0])}, [-1, -1, 0]),
        ({3: torch.tensor([-1, 16, 0])}, [-1, 16, 0]),
    ],
)
def test_invalid_sequences_are_told_apart(changes: dict[int, object], lengths: list[int], device: str) -> None:
    """A count of -1 keys makes attention over the copied pages NaN; the page numbers themselves are valid."""
    arguments = [TABLE, STARTS, 40, None, 8, 16]
    for i, value in changes.items():
        arguments[i] = value
    table, found = pages_in_use(arguments, device)
    assert found.tolist() == lengths
    assert ((table >= 0) & (table < 8)).all()


def test_nothing_is_read_on_the_host() -> None:
    with FakeTensorMode():
        q, k, v = (torch.randn(3, heads, 2, 16, device="cuda") for heads in (4, 2, 2))
        cached = KVCache(3, 2, 40, 16, page_size=16, device="cuda")
        lengths = torch.ones(3, dtype=torch.int32, device="cuda")
        storage = cached.k, cached.v, cached.lengths, cached.block_table
        for new in (None, lengths.long()):
            on_gpu(ops.cache_append_pages, *storage, k, v, new, 40)
        on_gpu(ops.cache_reorder_pages, cached.lengths, cached.block_table, lengths.long())
        on_gpu(ops.cache_keep_pages, *storage, lengths.long().unsqueeze(1), None, 40)
        cached.append(k, v, lengths), cached.reorder(lengths), cached.keep(lengths.unsqueeze(1), lengths)
        assert attention_with_cache(q, cached).shape == q.shape
        assert attention_with_cache(q, cached, causal=False, q_offset=3).shape == q.shape
        starts = torch.zeros(4, dtype=torch.int32, device="cuda")
        on_gpu(ops.pages_in_use, cached.block_table, starts, 40, lengths, 9, 16)
        packed = q.transpose(1, 2).flatten(0, 1)
        out = attention_varlen(packed, cached.k, cached.v, starts, starts, 2, 40, block_table=cached.block_table)
        assert out.shape == packed.shape


CHECKED = """
import torch
from support.caches import on_gpu
from torch import Tensor
from pyattn import KVCache, ops
plain, ring, paged = KVCache(2, 1, 20, 8), KVCache(2, 1, 20, 8, window=(3, 0)), KVCache(2, 1, 20, 8, page_size=16)
new = torch.randn(2, 2, 1, 21, 8).unbind()
def storage(cached):
    return cached.k, cached.v, cached.lengths, cached.starts if cached.block_table is None else cached.block_table
ring.append(*new)
far, idx = torch.tensor([3, 4]), torch.tensor([0, 2])
calls = [
    lambda: on_gpu(ops.cache_append, *storage(plain), *new, None, 20),
    lambda: on_gpu(ops.cache_append, *storage(plain), *new, torch.tensor([0, -1]), 20),
    lambda: on_gpu(ops.cache_reorder, *storage(plain), idx),
    lambda: on_gpu(ops.cache_slots, ring.lengths, ring.starts, far, 4, 20),
    lambda: on_gpu(ops.cache_append_pages, *storage(paged), *new, None, 20),
    lambda: on_gpu(ops.cache_reorder_pages, *storage(paged)[2:], idx),
    lambda: on_gpu(ops.cache_keep, *storage(plain), idx[:, None], None, 0, 20),
    lambda: on_gpu(ops.cache_keep_pages, *storage(paged), idx[:, None] - 1, idx, 20),
]
for call in calls:
    try:
        call()
    except ValueError as error:
        print(error)
"""
OUTGROWN = "pyattn: a sequence must not outgrow the cache's max_seqlen of 20, got 0 + 21 positions of sequence 0"
MISSING = "pyattn: each of idx must be between 0 and 1, got 2 at 1"


def test_checks_on_demand() -> None:
    """PYATTN_CHECK=1 raises the CPU's errors."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    result = subprocess.run(
        [sys.executable, "-c", CHECKED],
        env=os.environ | {"PYATTN_CHECK": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.splitlines() == [
        OUTGROWN,
        "pyattn: each of lengths must be between 0 and 21, got -1 at 1",
        MISSING,
        "pyattn: q_offset must be at least 4, where a window of 4 keys begins with the oldest one that the cache "
        "keeps, got 3 for sequence 0",
        OUTGROWN,
        MISSING,
        "pyattn: the indices of a sequence must increase, here from 0 to at most -1, with -1 only after them, got 0 at "
        "[0, 0]",
        "pyattn: each of lengths must be between 0 and 0, got 2 at 1",
    ]
