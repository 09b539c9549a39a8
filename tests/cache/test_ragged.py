"""Promise: after an append with lengths, queries padded like its keys get the results of each sequence alone."""

import copy
import math
from typing import Any

import pytest
import torch
from support.assertions import assert_close
from support.caches import made
from support.cases import Case
from torch import Tensor

from pyattn import KVCache, attention, attention_with_cache

CASE = Case(3, 4, 2, 40, 40, 8, 6)
KINDS: dict[str, dict[str, Any]] = {"contiguous": {}, "ring": {"window": (7, 2)}, "pages": {"page_size": 16}}
COUNTS = ([5, 0, 3], [1, 1, 1], [0, 7, 2], [1, 0, 1], [6, 6, 1], [0, 0, 0])

each_kind = pytest.mark.parametrize("kind", KINDS)


def taken(t: Tensor, before: Tensor, new: int) -> Tensor:
    """(B, H, new, columns): the rows of each sequence from before[b] on; rows past its end are arbitrary."""
    at = (before[:, None] + torch.arange(new)).clamp(max=t.shape[2] - 1)
    return t.transpose(1, 2)[torch.arange(len(before))[:, None], at].transpose(1, 2)


def alone(q: Tensor, k: Tensor, v: Tensor, begin: int, rows: int, **options: Any) -> tuple[Tensor, Tensor]:
    """out and lse of one sequence's queries at [begin, begin + rows)."""
    end = begin + rows
    return attention(q[:, :, begin:end], k[:, :, :end], v[:, :, :end], return_lse=True, **options)


def filled(kind: str, *appends: list[int]) -> tuple[KVCache, tuple[Tensor, ...]]:
    """A cache after appends with these lengths, and all tokens."""
    qkv = CASE.inputs(torch.float64)
    cached = made(CASE, torch.float64, 40, **KINDS[kind])
    for counts in appends:
        cached.append(*(taken(t, cached.lengths, max(counts)) for t in qkv[1:]), counts)
    return cached, qkv


@each_kind
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1, 2, 0], dtype=torch.float64)], ids=["", "sinks"])
def test_padded_queries_meet_their_own_positions(kind, causal, sinks):
    """Padding has out 0, lse -inf or the sink, and gradient 0; reorders keep the lengths of the append."""
    cached, (q, k, v) = filled(kind)
    options = {"causal": causal, "sinks": sinks, "window": (7, 2) if kind == "ring" else (-1, -1)}
    for turn, counts in enumerate(COUNTS):
        before, new = cached.lengths.clone(), max(counts)
        cached.append(taken(k, before, new), taken(v, before, new), counts)
        order = torch.tensor([2, 0, 0] if turn % 2 else [0, 1, 2])
        cached.reorder(order)
        before, counts, q, k, v = before[order], torch.tensor(counts)[order], q[order], k[order], v[order]
        padded = taken(q, before, new).requires_grad_()
        out, lse = attention_with_cache(padded, cached, return_lse=True, **options)
        (grad,) = torch.autograd.grad(out.sin().sum() + torch.where(lse.isinf(), 0, lse).sum(), padded)
        for b, (begin, count) in enumerate(zip(before.tolist(), counts.tolist(), strict=True)):
            one = alone(*(t[b : b + 1] for t in (q, k, v)), begin, count, **options)
            assert_close(out[b : b + 1, :, :count], one[0], 1e-14)
            assert_close(lse[b : b + 1, :, :count], one[1], 1e-14)
            nothing = torch.full((4,), -math.inf, dtype=torch.float64) if sinks is None else sinks
            assert torch.equal(lse[b, :, count:], nothing[:, None].expand(-1, new - count))
            assert not out[b, :, count:].any()
            assert not grad[b, :, count:].any()


@each_kind
def test_more_queries_and_fewer(kind):
    """With more queries, the last ones are the append's and the others precede them; with fewer, the newest count."""
    cached, (q, k, v) = filled(kind)
    cached.append(k[:, :, :4], v[:, :, :4])
    cached.append(k[:, :, 4:9], v[:, :, 4:9], torch.tensor([5, 0, 2], dtype=torch.int32))
    options = {"window": (7, 0)} if kind == "ring" else {}
    whole = attention(q[:, :, :9], k[:, :, :9], v[:, :, :9], **options)
    expected = torch.where(torch.arange(9)[:, None] < cached.lengths[:, None, None, None], whole, 0)
    assert_close(attention_with_cache(q[:, :, :9], cached), expected, 1e-14)
    assert_close(attention_with_cache(q[:, :, 2:9], cached), expected[:, :, 2:], 1e-14)
    newest = attention_with_cache(taken(q, cached.lengths - 2, 2), cached)
    assert_close(newest, taken(whole, cached.lengths - 2, 2), 1e-14)


@each_kind
def test_what_else_moves_lengths_or_positions_hides_nothing(kind):
    """q_offset takes precedence; after a reset, an append without lengths or set lengths, queries are the newest."""
    cached, (q, k, v) = filled(kind, [4, 4, 4], [3, 1, 2])
    queries = q[:, :, :3]

    def newest_of(cached):
        here = attention_with_cache(queries, cached, return_lse=True)
        there = attention_with_cache(queries, cached, return_lse=True, q_offset=cached.lengths - 3)
        return all(map(torch.equal, here, there))

    assert attention_with_cache(queries, cached, q_offset=torch.tensor([4, 4, 4])).ne(0).all()
    assert not newest_of(cached)
    edited, full, empty = (copy.deepcopy(cached) for _ in range(3))
    edited.lengths.sub_(1)
    full.append(k[:, :, 7:10], v[:, :, 7:10])
    empty.reset()
    assert newest_of(edited)
    assert full.last_append is empty.last_append is None
    assert newest_of(full)
    assert not attention_with_cache(queries, empty).any()


def test_ranges_of_the_user_stay():
    cached, (q, k, v) = filled("contiguous", [4, 2, 1], [3, 1, 0])
    ranges = torch.tensor([[[0, 9], [2, 6], [4, 4]]] * 3, dtype=torch.int32)
    for causal in (True, False):
        out = attention_with_cache(taken(q, torch.tensor([4, 2, 1]), 3), cached, causal=causal, key_ranges=ranges)
        for b, (begin, count) in enumerate([(4, 3), (2, 1), (1, 0)]):
            own = ranges[b : b + 1, :count].clamp(max=begin + count)
            one = alone(*(t[b : b + 1] for t in (q, k, v)), begin, count, causal=causal, key_ranges=own)
            assert_close(out[b : b + 1, :, :count], one[0], 1e-14)
            assert not out[b, :, count:].any()


@each_kind
def test_compiles_once_for_all_counts(kind):
    """In one graph, with and without inference mode."""
    ours, (q, k, v) = filled(kind)
    expected = copy.deepcopy(ours)

    def step(cached, q, k, v, lengths):
        cached.append(k, v, lengths)
        cached.reorder(lengths.flip(0))
        return attention_with_cache(q, cached)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        for counts in ([2, 1, 0], [0, 2, 1], [0, 0, 2]):
            inputs = *(t[:, :, :2] for t in (q, k, v)), torch.tensor(counts)
            with torch._dynamo.config.patch(error_on_recompile=counts[0] == 0):
                assert torch.equal(compiled(ours, *inputs), step(expected, *inputs))
    two = q[:, :, :2].requires_grad_()
    assert torch.equal(attention_with_cache(two, ours), attention_with_cache(two, expected))
