"""Promise: after keep, a cache has the bits of one to which only the tokens that stay were appended."""

from functools import partial
from typing import Any

import pytest
import torch
from support.assertions import Refusals, each_refusal, refused
from support.caches import KINDS, each_kind, made, on_gpu, same, snapshot
from support.cases import Case, assert_equal
from torch import Tensor

from pyattn import KVCache, attention_with_cache, ops

CASE = Case(3, 4, 2, 400, 400, 8, 6)
RING = {"window": (3, 0)}


@pytest.fixture(params=["cpu", "gpu"])
def operators(request, monkeypatch):
    """The operators of either device: a GPU's are composed of torch's, so they take CPU tensors too."""
    if request.param == "gpu":
        for name in ("append", "append_pages", "keep", "keep_pages", "reorder", "reorder_pages", "truncate"):
            monkeypatch.setattr(ops, f"cache_{name}", partial(on_gpu, getattr(ops, f"cache_{name}")))


def cache_for(kind: str) -> KVCache:
    return made(CASE, torch.float32, 24 if kind == "ring" else 60, **KINDS[kind])


def stored(cached: KVCache, b: int) -> tuple[Tensor, Tensor]:
    """The keys and values of sequence b, (positions that the cache still has, Hkv, columns)."""
    begin, end = int(cached.starts[b]), int(cached.lengths[b])
    if cached.block_table is None:
        return cached.k[b, :, : end - begin].transpose(0, 1), cached.v[b, :, : end - begin].transpose(0, 1)
    at = torch.arange(end)
    page, place = cached.block_table[b, at // cached.k.shape[1]], at % cached.k.shape[1]
    return cached.k[page, place], cached.v[page, place]


def chosen(low: int, high: int, most: int) -> list[int]:
    """Some of the positions from ``low`` to ``high`` - 1, increasing."""
    return sorted((low + torch.randperm(high - low))[:most].tolist())


@each_kind
@pytest.mark.usefixtures("operators")
def test_like_lists_of_tokens(kind):
    """Random appends, keeps, truncations and reorders, ragged, against a list of tokens for each sequence."""
    torch.manual_seed(11)
    _, k, v = CASE.inputs(torch.float32)
    cached, texts, fresh = cache_for(kind), [[], [], []], 0
    for step in range(80):
        if max(map(len, texts)) > 50 and kind != "ring":
            cached.reset()
            texts = [[], [], []]
        counts = torch.randint(0, 8, (3,)).tolist()
        now = slice(fresh, fresh + 8)
        cached.append(k[:, :, now], v[:, :, now], counts)
        before = [len(text) for text in texts]
        for b, n in enumerate(counts):
            texts[b] = texts[b] + [(b, fresh + i) for i in range(n)]
        fresh = (fresh + 8) % 392
        if step % 2:  # the accepted branch; the text before it stays
            paths = [chosen(low, low + n, 4) for low, n in zip(before, counts, strict=True)]
            cached.keep(paths, before)
            texts = [text[:low] + [text[i] for i in path] for text, low, path in zip(texts, before, paths, strict=True)]
        elif step % 3:  # no lengths: all before the first index stays, and a sequence without any stays as it is
            paths = [chosen(low, low + n, 3) for low, n in zip(before, counts, strict=True)]
            padded = torch.full((3, 5), -1, dtype=torch.int32)
            for row, path in zip(padded, paths, strict=True):
                row[: len(path)] = torch.tensor(path, dtype=torch.int32)
            cached.keep(padded)
            texts = [t[: p[0]] + [t[i] for i in p] if p else t for t, p in zip(texts, paths, strict=True)]
        if step % 5 == 0:
            order = torch.randint(0, 3, (3,)).tolist()
            cached.reorder(order)
            texts = [texts[b] for b in order]
        if step % 7 == 0:
            kept = [max(0, len(text) - 1) for text in texts]
            cached.truncate(kept)
            texts = [text[:n] for text, n in zip(texts, kept, strict=True)]
        assert cached.lengths.tolist() == [len(text) for text in texts]
        for b, text in enumerate(texts):
            here = text[int(cached.starts[b]) :]
            if here:
                origin, at = torch.tensor(here).unbind(1)
                assert_equal(stored(cached, b), (k[origin, :, at], v[origin, :, at]))
    assert kind != "ring" or int(cached.starts.min()) > 20


@each_kind
def test_next_tokens_have_the_bits_of_a_cache_without_drafts(isa, kind):
    q, k, v = CASE.inputs(torch.float32)
    drafted, plain = cache_for(kind), cache_for(kind)
    for cached in (drafted, plain):
        cached.append(k[:, :, :17], v[:, :, :17])
    drafted.append(k[:, :, 17:23], v[:, :, 17:23], [6, 6, 6])
    drafted.keep([[17, 20], [17, 18, 22], [19]], 17)
    rows = [[17, 20, 0], [17, 18, 22], [19, 0, 0]]
    picked = [torch.stack([t[b, :, row] for b, row in enumerate(rows)]) for t in (k, v)]
    plain.append(*picked, [2, 3, 1])
    assert drafted.last_append is None
    for cached in (drafted, plain):
        cached.append(k[:, :, 30:33], v[:, :, 30:33])
    assert drafted.lengths.tolist() == [22, 23, 21]
    assert_equal(*(attention_with_cache(q[:, :, 30:33], cached, return_lse=True) for cached in (drafted, plain)))


def test_shared_pages_are_copied_first():
    """Beams that share a page keep different branches, and the beam that keeps nothing new sees its own keys."""
    _, k, v = CASE.inputs(torch.float32)
    cached = cache_for("pages")
    cached.append(k[:, :, :20], v[:, :, :20])
    cached.reorder([1, 1, 1])
    assert cached.block_table is not None
    assert len(cached.block_table[:, :2].unique()) == 2
    cached.keep([[16, 19], [], [17, 18]])
    assert cached.lengths.tolist() == [18, 20, 19]
    for b, kept in enumerate(([*range(17), 19], [*range(20)], [*range(19)])):
        at = torch.tensor(kept)
        assert_equal(stored(cached, b), (k[1, :, at].transpose(0, 1), v[1, :, at].transpose(0, 1)))


@each_kind
@pytest.mark.usefixtures("operators")
def test_indices_of_every_form(kind):
    """Lists, tensors with -1, views of the cache's own lengths, strides; and no index at all."""
    _, k, v = CASE.inputs(torch.float32)
    forms: list[tuple[Any, Any]] = [
        ([[8, 9], [8], []], [8, 8, 8]),
        (torch.tensor([[8, 9], [8, -1], [-1, -1]]), 8),
        (torch.tensor([[8, 8, -1], [9, -1, -1]], dtype=torch.int32).T, torch.tensor([8, 8, 8], dtype=torch.int32)),
        ([torch.tensor([8, 9]), [8], torch.empty(0, dtype=torch.int64)], torch.tensor(8).expand(3)),
    ]
    states = []
    for indices, lengths in forms:
        cached = cache_for(kind)
        cached.append(k[:, :, :12], v[:, :, :12])
        cached.keep(indices, lengths)
        states.append(snapshot(cached))
        assert cached.lengths.tolist() == [10, 9, 8]
    assert all(same(state, states[0]) for state in states)
    cached.keep(cached.lengths.unsqueeze(1) - 1, cached.lengths - 1)
    cached.keep([[], [], []])
    cached.keep(torch.empty(3, 0, dtype=torch.int64))
    assert same(snapshot(cached), states[0])
    cached.keep(torch.empty(3, 0, dtype=torch.int64), [10, 2, 0] if kind != "ring" else [10, 9, 5])
    assert cached.lengths.tolist() == ([10, 2, 0] if kind != "ring" else [10, 9, 5])


def test_a_gpu_leaves_out_what_the_cpu_refuses(monkeypatch):
    """Indices from the first invalid one on; lengths are clamped; nothing outside the cache is read."""
    for name in ("append", "append_pages", "keep", "keep_pages"):
        monkeypatch.setattr(ops, f"cache_{name}", partial(on_gpu, getattr(ops, f"cache_{name}")))
    for kind in ("slots", "pages"):
        _, k, v = CASE.inputs(torch.float32)
        cached = cache_for(kind)
        cached.append(k[:, :, :12], v[:, :, :12])
        cached.keep(torch.tensor([[8, 2**40, 10], [9, 9, 10], [-7, 10, 11]]))
        assert cached.lengths.tolist() == [9, 10, 12]
        cached.keep(torch.tensor([[5], [-1], [2**62]]), torch.tensor([7, 2**40, -3]))
        assert cached.lengths.tolist() == [7, 10, 0]
    ring = KVCache(1, 2, 10, 8, window=(3, 0))
    for _ in range(6):
        ring.append(*torch.randn(2, 1, 2, 5, 8))
    start = int(ring.starts)
    ring.keep(torch.tensor([[2, 4]]), 1)
    assert int(ring.lengths) == start == int(ring.starts)


@pytest.mark.parametrize("kind", [{}, RING, {"page_size": 16}], ids=str)
def test_compiles_once_for_all_lengths(kind):
    ours, expected = (made(CASE, torch.float32, 40, **kind) for _ in range(2))
    q, k, v = CASE.inputs(torch.float32)

    def step(cached, q, k, v, path):
        before = cached.lengths.clone()
        cached.append(k, v)
        cached.keep(before.unsqueeze(1) + path, before)
        return attention_with_cache(q, cached)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for n in range(8):
            now, path = slice(4 * n, 4 * n + 4), torch.tensor([[0, 2], [1, 3], [0, 1]])
            tokens = k[:, :, now], v[:, :, now], path
            assert torch.equal(compiled(ours, q[:, :, :1], *tokens), step(expected, q[:, :, :1], *tokens))
            assert same(snapshot(ours), snapshot(expected))
    storage = ours.k.zero_(), ours.v.zero_(), ours.lengths
    newest = ours.lengths.unsqueeze(1) - 1
    if ours.block_table is None:
        torch.library.opcheck(ops.cache_keep, (*storage, ours.starts, newest, None, 3, 40))
    else:
        torch.library.opcheck(ops.cache_keep_pages, (*storage, ours.block_table, newest, None, 40))


BAD_INDICES: Refusals = [
    ({"indices": [[4, 4], []]}, ValueError, "must increase, here from 5 to at most 5, with -1 only after them, got 4"),
    ({"indices": [[], [3, 6]]}, ValueError, "here from 4 to at most 5, with -1 only after them, got 6 at [1, 1]"),
    ({"indices": torch.tensor([[2, -1, 3], [1, 2, 3]])}, ValueError, "only after them, got 3 at [0, 2]"),
    ({"indices": [[-2], [0]]}, ValueError, "here from 0 to at most 5, with -1 only after them, got -2 at [0, 0]"),
    ({"indices": [[1], [3]], "lengths": 2}, ValueError, "here from 2 to at most 5, with -1 only after them, got 1 at"),
    ({"indices": [[5], [5]], "lengths": [0, 7]}, ValueError, "each of lengths must be between 0 and 6, got 7 at 1"),
    ({"indices": [[5], [5]], "lengths": [1]}, ValueError, "lengths must have shape [2], got [1]"),
    ({"indices": [[5], [5], [5]]}, ValueError, "indices must have shape [2, 1], got [3, 1]"),
    ({"indices": torch.tensor([5, 5])}, ValueError, "indices must have 2 dimensions, got shape (2,)"),
    ({"indices": torch.ones(2, 1)}, TypeError, "indices must be int32 or int64, got torch.float32"),
    ({"indices": [5, 5]}, TypeError, "indices[0] must be Sequence or Tensor, got 5"),
    ({"indices": [[5.0], [5]]}, TypeError, "each of indices[0] must be int, got 5.0"),
    ({"indices": 5}, TypeError, "indices must be Sequence or Tensor, got 5"),
    ({"index": [[5]]}, TypeError, "no argument index (did you mean indices?), got [[5]]"),
]


@pytest.mark.parametrize("storage", KINDS)
@each_refusal(BAD_INDICES)
def test_wrong_indices_leave_the_cache_as_it_was(storage, changes, kind, message):
    cached = KVCache(2, 2, 16, 8, **KINDS[storage])
    cached.append(*torch.randn(2, 2, 2, 6, 8))
    before = snapshot(cached)
    with refused(kind, message, inside=True):
        cached.keep(**changes)
    assert same(snapshot(cached), before)


def test_a_ring_refuses_what_has_left_the_window():
    """Position 20 is the oldest one kept, so the query at 23 is the first to see all of its window."""
    ring = KVCache(2, 2, 10, 8, window=(3, 0))
    for _ in range(6):
        ring.append(*torch.randn(2, 2, 2, 5, 8))
    assert ring.starts.tolist() == [20, 20]
    before = snapshot(ring)
    with refused(ValueError, "here from 23 to at most 29, with -1 only after them, got 22 at [1, 0]", inside=True):
        ring.keep([[23], [22]])
    with refused(ValueError, "each of lengths must be between 23 and 30, got 22 at 0", inside=True):
        ring.keep([[24], [24]], 22)
    assert same(snapshot(ring), before)
    ring.keep([[23, 29], [28]])
    assert ring.lengths.tolist() == [25, 29]
    ring.append(*torch.randn(2, 2, 2, 1, 8))
    assert attention_with_cache(torch.randn(2, 4, 1, 8), ring).isfinite().all()
