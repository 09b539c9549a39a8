"""Promise: over a ring, text goes on without end as under a window."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from caches import OPTIONS, assert_equals_the_whole, in_steps, made, zeros
from helpers import Case, each_dtype
from torch import Tensor

from pyattn import KVCache, attention, attention_with_cache


@each_dtype
@pytest.mark.parametrize("name", ["plain", "scores"])
def test_a_ring_equals_a_window(attend: Callable[..., Any], name: str, dtype: torch.dtype) -> None:
    """Text goes on through several moves to the front; ALiBi's distances hold."""
    case = OPTIONS[name]
    qkv = tuple(t.repeat(1, 1, 3, 1) for t in case.inputs(dtype))
    options = case.options | case.tensors(dtype)
    cached = made(case, dtype, 24, window=8)
    slots = cached.k.shape[2]
    assert_equals_the_whole(in_steps(attend, cached, qkv, **options), qkv, options | {"window": (7, 0)})
    assert cached.lengths.tolist() == [120, 120]
    assert cached.k.shape[2] == slots == 30
    cached.reset()
    narrow = options | {"window": (4, 0)}
    assert_equals_the_whole(in_steps(attend, cached, qkv, **narrow), qkv, narrow)


@pytest.mark.parametrize("new", [23, 24, 25, 30, 31, 100])
def test_a_ring_takes_more_than_it_keeps(new: int) -> None:
    """The queries of a long prompt come in chunks; those at its end find what they see."""
    case = Case(2, 4, 2, 110, 110, 16, 16)
    q, k, v = case.inputs(torch.float64)
    whole = attention(q, k, v, window=(7, 0))
    cached = made(case, torch.float64, 24, window=8)
    for begin, end in ((0, 5), (5, 5 + new), (5 + new, 6 + new)):
        cached.append(k[:, :, begin:end], v[:, :, begin:end])
    first = max(0, 6 + new - 17)
    out = attention_with_cache(q[:, :, first : 6 + new], cached)
    torch.testing.assert_close(out, whole[:, :, first : 6 + new], rtol=0, atol=1e-14)


q = zeros(2, 4, 3, 8)
BAD_RINGS: list[tuple[Tensor, dict[str, Any], type[Exception], str]] = [
    (zeros(2, 4, 8, 8), {}, ValueError, "with window=4, seqlen_q must not exceed max_seqlen - window + 1 = 7, got 8"),
    (q, {"bias": zeros(3, 10)}, NotImplementedError, "a cache with a window takes no bias, got window=4"),
    (
        q,
        {"key_ranges": torch.zeros(1, 3, 2, dtype=torch.int64)},
        NotImplementedError,
        "a cache with a window takes no key_ranges, got window=4",
    ),
    (q, {"window": (-2, 0)}, ValueError, "window must be (left, right), each at least -1, got [-2, 0]"),
    (q, {"q_offset": 0.5}, TypeError, "q_offset must be int or Tensor, got 0.5"),
    (q, {"q_offset": torch.zeros(3, dtype=torch.int64)}, ValueError, "q_offset must have shape [2], got [3]"),
    (q, {"q_offset": torch.zeros(2)}, TypeError, "q_offset must have dtype int64, got float32"),
    (
        q,
        {"q_offset": 12},
        ValueError,
        "q_offset must be at least 13, where a window of 4 begins with the oldest key that the cache keeps, got 12 for "
        "sequence 0",
    ),
]


@pytest.mark.parametrize(("queries", "options", "kind", "message"), BAD_RINGS, ids=[m[:40] for *_, m in BAD_RINGS])
def test_wrong_calls_over_a_ring(queries: Tensor, options: dict[str, Any], kind: type[Exception], message: str) -> None:
    cached = KVCache(2, 2, 10, 8, window=4)
    for _ in range(4):
        cached.append(zeros(2, 2, 5, 8), zeros(2, 2, 5, 8))
    attention_with_cache(q, cached, q_offset=13)
    with pytest.raises(kind, match="pyattn: .*" + re.escape(message)):
        attention_with_cache(queries, cached, **options)
