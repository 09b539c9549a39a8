"""Promise: on a GPU a cache is used without a host read, and tokens that don't fit are left out.

Its operators there are composed of torch's, so they take CPU tensors, and fake tensors of a GPU, whose values can't be
read. With ``--backend cuda`` they take a GPU's tensors.
"""

from typing import Any

import pytest
import torch
from support.caches import made, on_gpu, same, snapshot
from support.cases import Case, each_dtype
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from pyattn import KVCache, attention_with_cache, ops

CASE = Case(3, 4, 2, 40, 40, 24, 20)

each_window = pytest.mark.parametrize("window", [None, (4, 0)])


def append(cached: KVCache, k: Tensor, v: Tensor, lengths: Tensor | None = None) -> None:
    storage = cached.k, cached.v, cached.lengths, cached.starts
    on_gpu(ops.cache_append, *storage, k, v, lengths, cached.max_seqlen)


def used(cached: KVCache) -> list[Tensor]:
    """The positions that the cache keeps, and their rows, on the CPU."""
    last = (cached.lengths - cached.starts).tolist()
    rows = [t[b, :, max(0, n - cached.max_seqlen) : n] for t in (cached.k, cached.v) for b, n in enumerate(last)]
    return [t.cpu() for t in (*rows, cached.lengths, cached.starts)]


@each_dtype
@each_window
def test_as_on_the_cpu(window: tuple[int, int] | None, dtype: torch.dtype, device: str) -> None:
    """Through several moves of a ring, with more new positions than it keeps, and none."""
    _, k, v = CASE.inputs(dtype)
    ours = made(CASE, dtype, 12 if window else 90, window)
    with torch.device("cpu"):
        expected = made(CASE, dtype, 12 if window else 90, window)
    for counts in ([3, 0, 4], [1, 1, 1], [12, 0, 0], [1, 2, 5], [40, 1, 11], [13, 15, 14], [0, 0, 0], [7, 3, 2]):
        new = slice(0, max(counts))
        expected.append(k[:, :, new].cpu(), v[:, :, new].cpu(), counts)
        append(ours, k[:, :, new], v[:, :, new], torch.tensor(counts))
        assert all(map(torch.equal, used(ours), used(expected)))
    expected.append(k[:, :, :2].cpu(), v[:, :, :2].cpu())
    append(ours, k[:, :, :2], v[:, :, :2])
    assert all(map(torch.equal, used(ours), used(expected)))
    expected.reorder([2, 0, 2])
    on_gpu(ops.cache_reorder, ours.k, ours.v, ours.lengths, ours.starts, torch.tensor([2, 0, 2]))
    assert all(map(torch.equal, used(ours), used(expected)))
    seen = 12 if window is None else window[0] + 1
    slots = on_gpu(ops.cache_slots, ours.lengths, ours.starts, ours.lengths - 1, seen, ours.max_seqlen)
    offsets = expected.lengths - 1
    on_cpu = ops.cache_slots(expected.lengths, expected.starts, offsets, seen, expected.max_seqlen)
    assert torch.equal(slots.cpu(), on_cpu)


def test_what_does_not_fit_is_left_out(device: str) -> None:
    _, k, v = CASE.inputs(torch.float32)
    cached = made(CASE, torch.float32, 10)
    room = torch.zeros(3, 2, 14, 24), torch.zeros(3, 2, 14, 20)  # the cache, with neighbours
    cached.k, cached.v = (t[:, :, 2:12].fill_(7) for t in room)
    append(cached, k[:, :, :8], v[:, :, :8], torch.tensor([8, 3, 0]))
    append(cached, k[:, :, 8:12], v[:, :, 8:12])
    assert cached.lengths.tolist() == [10, 7, 4]
    assert torch.equal(cached.k[0], k[0, :, :10])
    assert torch.equal(cached.v[1, :, :7], torch.cat([v[1, :, :3], v[1, :, 8:12]], 1))
    before = snapshot(cached)
    append(cached, k, v, torch.tensor([5, -3, -(2**40)]))
    assert same(snapshot(cached), before)
    append(cached, k, v)
    assert cached.lengths.tolist() == [10, 10, 10]
    assert torch.equal(cached.k[2], torch.cat([k[2, :, 8:12], k[2, :, :6]], 1))
    cached.lengths.copy_(torch.tensor([2**40, -(2**40), -1]))
    append(cached, k[:, :, :3], v[:, :, :3])
    on_gpu(ops.cache_reorder, cached.k, cached.v, cached.lengths, cached.starts, torch.tensor([-1, 2**40, 1]))
    for t in room:
        assert (t[:, :, :2] == 0).all()
        assert (t[:, :, 12:] == 0).all()


@pytest.mark.parametrize("sizes", [(0, 2, 5, 8), (2, 0, 5, 8), (2, 2, 0, 8), (2, 2, 5, 0)], ids=str)
def test_sizes_of_zero(sizes: tuple[int, int, int, int], device: str) -> None:
    cached = KVCache(*sizes)
    batch, heads, most, head_dim = sizes
    append(cached, *torch.randn(2, batch, heads, 0, head_dim))
    append(cached, *torch.randn(2, batch, heads, 3, head_dim))
    assert cached.lengths.tolist() == [min(3, most)] * batch


@each_window
def test_nothing_is_read_on_the_host(window: tuple[int, int] | None) -> None:
    """Attention over the cache reads nothing either."""
    with FakeTensorMode():
        q, k, v = (torch.randn(3, heads, 2, 16, device="cuda") for heads in (4, 2, 2))
        cached = KVCache(3, 2, 20, 16, window=window, device="cuda")
        lengths = torch.ones(3, dtype=torch.int32, device="cuda")
        before = cached.lengths.clone()
        append(cached, k, v), append(cached, k, v, lengths.long())
        on_gpu(ops.cache_reorder, cached.k, cached.v, cached.lengths, cached.starts, lengths.long())
        on_gpu(ops.cache_slots, cached.lengths, cached.starts, before, 5, 20)
        on_gpu(ops.cache_keep, cached.k, cached.v, cached.lengths, cached.starts, before.unsqueeze(1), None, 3, 20)
        cached.append(k, v, lengths), cached.reorder(lengths), cached.keep(before.unsqueeze(1), before), cached.reset()
        calls: list[dict[str, Any]] = [{}, {"q_offset": before}, {"q_offset": 3}, {"causal": False}]
        if window is None:
            ranges = torch.zeros(3, 2, 2, dtype=torch.int64, device="cuda")
            calls += [
                {"key_ranges": ranges},
                {"key_ranges": ranges, "causal": False},
                {"bias": torch.randn(2, 20, device="cuda")},
            ]
        for options in calls:
            assert attention_with_cache(q, cached, **options).shape == q.shape
