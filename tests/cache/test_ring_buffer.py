"""Promise: over a ring buffer, text continues without end, as under a window."""

import pytest
import torch
from cache.test_copies import COPIES
from support.assertions import Refusals, assert_close, each_refusal, refused
from support.caches import OPTIONS, assert_equals_the_whole, in_steps, made, zeros
from support.cases import Case, each_dtype
from torch import Tensor

from pyattn import KVCache, attention, attention_with_cache


@each_dtype
@pytest.mark.parametrize("name", ["plain", "scores"])
def test_a_ring_equals_a_window(attend, name, dtype):
    """Text continues through several moves to the front; ALiBi's distances stay right."""
    case = OPTIONS[name]
    qkv = tuple(t.repeat(1, 1, 2, 1) for t in case.inputs(dtype))
    options = case.options | case.tensors(dtype)
    cached = made(case, dtype, 24, window=(7, 0))
    slots = cached.k.shape[2]
    assert_equals_the_whole(in_steps(attend, cached, qkv, **options), qkv, options | {"window": (7, 0)})
    assert cached.lengths.tolist() == [80, 80]
    assert cached.k.shape[2] == slots == 30
    cached.reset()
    narrow = options | {"window": (4, 0)}
    assert_equals_the_whole(in_steps(attend, cached, qkv, **narrow), qkv, narrow)


@pytest.mark.parametrize("new", [23, 24, 25, 30, 31, 100])
def test_a_ring_takes_more_than_it_keeps(new):
    """The queries of a long prompt come in chunks; those at its end still find their keys."""
    case = Case(2, 4, 2, 110, 110, 16, 16)
    q, k, v = case.inputs(torch.float64)
    whole = attention(q, k, v, window=(7, 0))
    cached = made(case, torch.float64, 24, window=(7, 0))
    for begin, end in ((0, 5), (5, 5 + new), (5 + new, 6 + new)):
        cached.append(k[:, :, begin:end], v[:, :, begin:end])
    first = max(0, 6 + new - 17)
    out = attention_with_cache(q[:, :, first : 6 + new], cached)
    assert_close(out, whole[:, :, first : 6 + new], 1e-14)


@pytest.mark.parametrize("right", [0, 2, -1])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("asked", [(-1, -1), (3, -1), (9, 1)])
def test_its_window_is_that_of_every_query(right, causal, asked):
    """(left, right) as in attention: it applies without being passed, and intersects one that is passed."""
    case = Case(2, 4, 2, 60, 60, 16, 16)
    q, k, v = case.inputs(torch.float64)
    cached = made(case, torch.float64, 24, window=(7, right))
    for begin in range(0, 60, 12):
        now = slice(begin, begin + 12)
        cached.append(k[:, :, now], v[:, :, now])
        out = attention_with_cache(q[:, :, now], cached, causal=causal, window=asked)
        so_far = k[:, :, : now.stop], v[:, :, : now.stop]
        inner = attention(q[:, :, now], *so_far, causal=causal, window=(7, right), mask=seen(12, now.stop, *asked))
        assert_close(out, inner, 1e-14)


def seen(queries: int, keys: int, left: int, right: int) -> Tensor:
    """The keys in a window, True = takes part."""
    ahead = torch.arange(keys) - torch.arange(keys - queries, keys)[:, None]
    return (ahead >= (-left if left >= 0 else -keys)) & (ahead <= (right if right >= 0 else keys))


def test_what_the_ring_buffer_is_for_the_causal_mask():
    """The right bound changes no bit there, and an unbounded window allocates no ring."""
    case = Case(2, 4, 2, 60, 60, 16, 16)
    q, k, v = case.inputs(torch.float32)
    outs = []
    for right in (0, 3, -1):
        cached = made(case, torch.float32, 24, window=(7, right))
        outs.append(in_steps(attention_with_cache, cached, (q, k, v)))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    plain = KVCache(2, 2, 24, 16, window=(-1, -1))
    assert plain.window is None
    assert plain.k.shape == KVCache(2, 2, 24, 16).k.shape


@pytest.mark.parametrize("move", [*COPIES.values(), lambda cached: cached.to(torch.float64)])
def test_copies_keep_the_window(move):
    cached = KVCache(2, 2, 10, 8, window=[3, 0])  # a list, as attention also takes
    for _ in range(3):
        cached.append(zeros(2, 2, 5, 8), zeros(2, 2, 5, 8))
    moved = move(cached)
    assert moved.window == cached.window == (3, 0)
    with pytest.raises(ValueError, match=r"^pyattn: over a cache with window=\(3, 0\), seqlen_q must not exceed"):
        attention_with_cache(zeros(2, 4, 8, 8, dtype=moved.k.dtype), moved)


q = zeros(2, 4, 3, 8)
BAD_RINGS: Refusals = [
    ({"q": zeros(2, 4, 8, 8)}, ValueError, "window=(3, 0), seqlen_q must not exceed max_seqlen - left = 7, got 8"),
    ({"bias": zeros(3, 10)}, NotImplementedError, "a cache with a window takes no bias, got window=(3, 0)"),
    (
        {"key_ranges": torch.zeros(1, 3, 2, dtype=torch.int64)},
        NotImplementedError,
        "a cache with a window takes no key_ranges, got window=(3, 0)",
    ),
    ({"window": (-2, 0)}, ValueError, "window must be (left, right), each at least -1, got [-2, 0]"),
    ({"q_offset": 0.5}, TypeError, "q_offset must be int or Tensor, got 0.5"),
    ({"q_offset": torch.zeros(3, dtype=torch.int64)}, ValueError, "q_offset must have shape [2], got [3]"),
    ({"q_offset": torch.zeros(2)}, TypeError, "q_offset must have dtype int64, got float32"),
    (
        {"q_offset": 12},
        ValueError,
        "q_offset must be at least 13, where a window of 4 keys begins with the oldest one that the cache keeps, got "
        "12 for sequence 0",
    ),
]


@each_refusal(BAD_RINGS)
def test_wrong_calls_over_a_ring(changes, kind, message):
    cached = KVCache(2, 2, 10, 8, window=[3, 0])  # a list, as attention also takes
    for _ in range(4):
        cached.append(zeros(2, 2, 5, 8), zeros(2, 2, 5, 8))
    attention_with_cache(q, cached, q_offset=13)
    with refused(kind, message, inside=True):
        attention_with_cache(**{"q": q, "cache": cached} | changes)
