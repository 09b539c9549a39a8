"""Promise: sequences share pages without noticing it, and there are always enough pages."""

import random
from functools import partial

import pytest
import torch
from support.caches import both, made, on_gpu, same, snapshot, twins
from support.cases import Case

from pyattn import KVCache, ops


@pytest.fixture(params=["cpu", "gpu"])
def operators(request, monkeypatch):
    """Caches are changed by either device's operators; a GPU's are composed of torch's, so CPU tensors work too."""
    if request.param == "gpu":
        for name in ("cache_append_pages", "cache_reorder_pages"):
            monkeypatch.setattr(ops, name, partial(on_gpu, getattr(ops, name)))


def pages_in_use(cached: KVCache) -> list[list[int]]:
    assert cached.block_table is not None
    pages = (cached.lengths + cached.page_size - 1).div(cached.page_size, rounding_mode="floor")
    return [row[:count] for row, count in zip(cached.block_table.tolist(), pages.tolist(), strict=True)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.usefixtures("operators")
def test_as_without_through_any_steps(seed):
    """Appends of any lengths, reorders, resets and truncations: the keys read are the same, and pages suffice."""
    chance, case = random.Random(seed), Case(4, 4, 2, 2, 2, 16, 16)
    caches = twins(case, torch.float32, 70, 16)
    for _ in range(60):
        room = 70 - int(caches[0].lengths.max())
        new = chance.randint(0, min(room, chance.choice([2, 30])))
        counts = [chance.randint(0, new) for _ in range(4)]
        order = [chance.randrange(4) for _ in range(4)]
        back = chance.randint(0, 5)
        what = chance.random()
        k, v = torch.randn(2, 4, 2, new, 16)
        for cached in caches:
            if what < 0.6:
                cached.append(k, v, counts if what < 0.4 else None)
            elif what < 0.9:
                cached.reorder(order)
            elif what < 0.97:
                cached.lengths.sub_(back).clamp_(min=0)
            else:
                cached.reset()
        both(caches, torch.randn(4, 4, 2, 16))
        both(caches, torch.randn(4, 4, 12, 16), causal=False)
        rows = pages_in_use(caches[0])
        assert all(len(set(row)) == len(row) for row in rows)
        assert max((page for row in rows for page in row), default=0) < 4 * 5


def test_reorder_shares_pages():
    """A reorder copies only the table; the first sequence to write to a shared page gets a copy of that page."""
    case = Case(3, 4, 2, 1, 40, 8, 8)
    _, k, v = case.inputs(torch.float32)
    cached = made(case, torch.float32, 64, page_size=16)
    cached.append(k, v, [40, 5, 16])
    before = snapshot(cached)
    cached.reorder([0, 0, 0])
    assert same(snapshot(cached)[:2], before[:2])
    assert pages_in_use(cached) == [[0, 1, 2]] * 3
    cached.append(k[:, :, :1], v[:, :, :1], [0, 1, 1])
    first, second, third = pages_in_use(cached)
    assert first == [0, 1, 2]
    assert second == [0, 1, 6]
    assert third == [0, 1, 10]
    cached.append(k[:, :, :9], v[:, :, :9], [9, 0, 0])  # its last page is no longer shared
    assert pages_in_use(cached)[0] == [0, 1, 2, 3]
    cached.reorder([0, 0, 0])
    shared = pages_in_use(cached)[0][-1]
    cached.append(k[:, :, :1], v[:, :, :1])
    assert [row[-1] == shared for row in pages_in_use(cached)] == [False, False, True]  # by then no other row has it
    cached.reset()
    cached.append(k, v)
    assert pages_in_use(cached) == [[0, 1, 2], [4, 5, 6], [8, 9, 10]]


@pytest.mark.usefixtures("operators")
def test_all_pages_are_handed_out():
    """Sequences that diverge after sharing everything fill every page and need no more."""
    case = Case(3, 2, 2, 1, 50, 8, 8)
    q, k, v = case.inputs(torch.float64)
    caches = twins(case, torch.float64, 50, 16)
    for cached in caches:
        cached.append(k[:, :, :20], v[:, :, :20])
        cached.reorder([1, 1, 1])
        for t in range(20, 50):
            cached.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
    both(caches, q)
    assert len({page for row in pages_in_use(caches[0]) for page in row}) == 3 * 4 - 2


@pytest.mark.usefixtures("operators")
def test_one_of_those_that_share_a_page_keeps_it():
    """All of them write to it: there would not be enough pages for a copy each."""
    case = Case(3, 2, 2, 1, 6, 8, 8)
    q, k, v = case.inputs(torch.float32)
    caches = twins(case, torch.float32, 16, 16)
    for cached in caches:
        cached.append(k[:, :, :5], v[:, :, :5])
        cached.reorder([0, 1, 1])
        cached.append(k[:, :, 5:], v[:, :, 5:], [0, 1, 1])
    both(caches, q)
    assert sorted(pages_in_use(caches[0])) == [[0], [1], [2]]
