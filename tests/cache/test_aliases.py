"""Promise: the inputs of a cache may lie in its own memory, and its state may have any strides."""

from functools import partial

import pytest
import torch
from support.caches import KINDS, each_kind, made, on_gpu, same, snapshot
from support.cases import Case
from torch import Tensor

from pyattn import KVCache, attention_with_cache, ops

CASE = Case(3, 4, 2, 40, 40, 8, 8)


@pytest.fixture(params=["cpu", "gpu"], autouse=True)
def operators(request, monkeypatch):
    """The operators of either device: a GPU's are composed of torch's, so they take CPU tensors too."""
    if request.param == "gpu":
        for name in ("append", "append_pages", "keep", "keep_pages", "reorder", "reorder_pages", "newest", "truncate"):
            monkeypatch.setattr(ops, f"cache_{name}", partial(on_gpu, getattr(ops, f"cache_{name}")))


def filled(kind: str, tokens: int = 12) -> KVCache:
    torch.manual_seed(5)
    _, k, v = CASE.inputs(torch.float32)
    cached = made(CASE, torch.float32, 12 if kind == "ring" else 40, **KINDS[kind])
    for t in range(0, tokens, 4):
        cached.append(k[:, :, t : t + 4], v[:, :, t : t + 4])
    return cached


def views(cached: KVCache, new: int) -> list[tuple[Tensor, Tensor]]:
    """k and v as views of the cache's own storage: the oldest rows, the newest, exchanged, expanded."""
    k, v = cached.k, cached.v
    if cached.block_table is not None:  # (pages, page_size, heads, columns); three pages hold three sequences
        k, v = (t[[0, 1, 2]] if new < 0 else t[:3] for t in (k.transpose(1, 2), v.transpose(1, 2)))
    last = k.shape[2] - new
    return [
        (k[:, :, :new], v[:, :, :new]),
        (k[:, :, last:], v[:, :, last:]),
        (v[:, :, 1 : new + 1], k[:, :, last - 1 : last + new - 1]),
        (k[:1, :, :new].expand(3, -1, -1, -1), v[:, :1, :new].expand(-1, 2, -1, -1)),
        (k[:, :, :8:2][:, :, :new].flip(0), v[:, :, :new]),
        (torch.from_numpy(k.numpy())[:, :, :new], torch.from_numpy(v.numpy())[:, :, last:]),
    ]


@each_kind
@pytest.mark.parametrize("which", range(6))
def test_views_of_the_cache_itself(kind, which):
    """Appending the views equals appending copies, also when a ring moves its rows."""
    ours, expected = filled(kind), filled(kind)
    for c in (ours, expected):
        c.k.nan_to_num_(9.0), c.v.nan_to_num_(8.0)
    for new, counts in ((4, None), (4, [4, 1, 3]), (3, None), (4, [0, 4, 4])):
        ours.append(*views(ours, new)[which], counts)
        expected.append(*(t.clone() for t in views(expected, new)[which]), counts)
        assert same(snapshot(ours), snapshot(expected))


def test_nothing_else_is_copied():
    """An append does not copy tokens outside the storage, even if one tensor holds both."""
    room = torch.zeros(1, 1, 3000, 8)
    cached = KVCache(1, 1, 1000, 8)
    cached.k, cached.v = room[:, :, :1000], room[:, :, 1000:2000]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        cached.append(room[:, :, 2000:2100], room[:, :, 2900:])
    assert "aten::clone" not in {event.key for event in profile.key_averages()}


@each_kind
def test_counts_and_orders_that_are_the_state_itself(kind):
    ours, expected = filled(kind), filled(kind)
    for c in (ours, expected):
        c.append(*torch.ones(2, 3, 2, 4, 8), [1, 0, 2])
        c.truncate(torch.tensor([12, 12, 13]))
        c.reset()
        c.append(*torch.ones(2, 3, 2, 4, 8), [2, 0, 1])
    tokens = torch.randn(2, 3, 2, 4, 8)
    for of in (lambda c: c.lengths, lambda c: c.lengths[:1].expand(3), lambda c: c.starts):
        ours.append(*tokens, of(ours))
        expected.append(*tokens, of(expected).clone())
        assert same(snapshot(ours), snapshot(expected))
    for c in (ours, expected):
        c.truncate(torch.tensor([1, 2, 0]))
    ours.reorder(ours.lengths), expected.reorder(expected.lengths.clone())
    assert same(snapshot(ours), snapshot(expected))


def strided(t: Tensor) -> list[Tensor]:
    """The same values as a column of a matrix, starting inside its storage, and with gaps."""
    wide = torch.full((*t.shape, 3), 77, dtype=t.dtype)
    wide[..., 1] = t
    offset = torch.cat([torch.full((5,), 66), t.flatten()])[5:].view(t.shape)
    return [wide[..., 1], offset, t.mT.contiguous().mT if t.dim() == 2 else wide[..., 1]]


@each_kind
@pytest.mark.parametrize("form", range(3))
def test_state_and_counts_of_any_strides(kind, form):
    q = torch.randn(3, 4, 4, 8)
    ours, expected = filled(kind), filled(kind)
    for name in ("lengths", "starts", "block_table"):
        if getattr(ours, name) is not None:
            setattr(ours, name, strided(getattr(ours, name))[form])
    for counts in ([3, 0, 4], [4, 4, 4], [0, 1, 0]):
        tokens = torch.randn(2, 3, 2, 4, 8)
        given = torch.tensor(counts)
        ours.append(*tokens, strided(given)[form]), expected.append(*tokens, given)
        order = torch.tensor([1, 1, 2])
        ours.reorder(strided(order)[form]), expected.reorder(order)
        assert same(snapshot(ours), snapshot(expected))
        for offset in (None, expected.lengths - 3):
            options = {} if offset is None else {"q_offset": strided(offset)[form]}
            theirs = {} if offset is None else {"q_offset": offset}
            out = attention_with_cache(q, ours, **options)
            assert torch.equal(out, attention_with_cache(q, expected, **theirs))
        for c in (ours, expected):
            c.truncate(strided(c.lengths - 1)[form] if c is ours else c.lengths - 1)
        assert torch.equal(ours.lengths, expected.lengths)
        indices = expected.lengths[:, None] - torch.tensor([3, 1])
        ours.keep(strided(indices)[form], strided(indices[:, 0])[form]), expected.keep(indices, indices[:, 0])
        assert same(snapshot(ours), snapshot(expected))


WRITTEN: dict[str, list[str]] = {
    "slots": ["k", "v", "lengths", "starts"],
    "ring": ["k", "v", "lengths", "starts"],
    "pages": ["k", "v", "lengths", "block_table"],
}


@each_kind
def test_state_that_sequences_share_is_refused(kind):
    """Refused before anything is written."""
    for name in WRITTEN[kind]:
        cached = filled(kind)
        setattr(cached, name, getattr(cached, name)[:1].expand(getattr(cached, name).shape))
        before = snapshot(cached)
        changes = [lambda cached=cached: cached.append(*torch.randn(2, 3, 2, 2, 8))]
        changes.append(lambda cached=cached: cached.keep([[10], [11], [11]]))
        if kind != "pages" or name not in "kv":
            changes.append(lambda cached=cached: cached.reorder([0, 1, 2]))
        if name == "lengths":
            changes.append(lambda cached=cached: cached.truncate(8))
        for change in changes:
            with pytest.raises(ValueError, match=f"^pyattn: the cache's {name} must have memory for each element, got"):
                change()
            assert same(snapshot(cached), before)
