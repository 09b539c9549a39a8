"""Promise: input that a cache can't take is an error that names it and leaves the cache unchanged."""

from functools import partial

import pytest
import torch
from support.assertions import Refusals, each_refusal, refused
from support.caches import KINDS, snapshot, zeros

from pyattn import KVCache, attention_with_cache

ops = torch.ops.pyattn


BAD_CACHES: Refusals = [
    ({"batch": -1}, ValueError, "batch must be at least 0, got -1"),
    ({"max_seqlen": 4.0}, TypeError, "max_seqlen must be int, got 4.0"),
    ({"head_dim_v": -2}, ValueError, "head_dim_v must be at least 0, got -2"),
    ({"dtype": torch.int64}, TypeError, "dtype must be float64, float32, bfloat16 or float16, got torch.int64"),
    ({"page_size": 15}, ValueError, "page_size must be at least 16, got 15"),
    ({"page_size": 16.0}, TypeError, "page_size must be int, got 16.0"),
    (
        {"page_size": 16, "window": (3, 0)},
        NotImplementedError,
        "a cache with a window has no pages, got page_size=16 and window=(3, 0)",
    ),
    *(
        (
            {"window": window},
            ValueError,
            "a cache's window must have a left bound between 0 and max_seqlen - 1, got "
            f"window={window} and max_seqlen=10",
        )
        for window in ((-1, 0), (-1, 3), (10, 0), (2**62, 0))
    ),
    ({"window": (-2, 0)}, ValueError, "window must be (left, right), each at least -1, got [-2, 0]"),
    ({"window": (3, -2)}, ValueError, "window must be (left, right), each at least -1, got [3, -2]"),
    ({"window": (3, 2**63)}, ValueError, "window must fit in 64 bits, got 9223372036854775808"),
    *(
        (
            {"window": window},
            TypeError,
            "window must be a pair of ints (left, right), window=(W - 1, 0) for a query and the W - 1 keys before it, "
            f"got {window!r}",
        )
        for window in (4, 0, (3,), (True, 0), (3.0, 0), "30")
    ),
]


@each_refusal(BAD_CACHES)
def test_wrong_caches(changes, kind, message):
    with refused(kind, message):
        KVCache(**{"batch": 2, "num_heads_kv": 2, "max_seqlen": 10, "head_dim": 8} | changes)


BAD_APPENDS: Refusals = [
    ({"k": None}, TypeError, "k must be Tensor, got None"),
    ({"k": zeros(2, 3, 8)}, ValueError, "k must have 4 dimensions (batch, num_heads, new, head_dim), got [2, 3, 8]"),
    ({"k": zeros(3, 2, 3, 8)}, ValueError, "k must have shape [2, 2, 3, 8], got [3, 2, 3, 8]"),
    ({"v": zeros(2, 2, 4, 6)}, ValueError, "v must have shape [2, 2, 3, 6], got [2, 2, 4, 6]"),
    ({"v": zeros(2, 2, 3, 6).half()}, TypeError, "v must have the cache's dtype float32, got float16"),
    ({"k": zeros(2, 2, 3, 8).to("meta")}, ValueError, "k must be on the cache's device, got meta and cpu"),
    ({"lengths": [1]}, ValueError, "lengths must have shape [2], got [1]"),
    ({"lengths": [1, 4]}, ValueError, "each of lengths must be between 0 and 3, got 4 at 1"),
    ({"lengths": [-1, 2]}, ValueError, "each of lengths must be between 0 and 3, got -1 at 0"),
    ({"lengths": zeros(2)}, TypeError, "lengths must be int32 or int64, got torch.float32"),
    ({"lengths": torch.ones(2).long().to_sparse()}, NotImplementedError, "lengths must be a dense tensor, got layout"),
    ({"k": zeros(2, 2, 3, 8).to_sparse()}, NotImplementedError, "k must be a dense tensor on the CPU or a CUDA device"),
    ({"v": zeros(2, 2, 3, 6).to_sparse()}, NotImplementedError, "v must be a dense tensor on the CPU or a CUDA device"),
    ({"k": zeros(2, 2, 3, 8).to_mkldnn()}, NotImplementedError, "k must be a dense tensor on the CPU or a CUDA device"),
    ({"length": [1, 2]}, TypeError, "KVCache.append has no argument length (did you mean lengths?), got [1, 2]"),
    ({"key": 1}, TypeError, "KVCache.append has no argument key (its arguments are k, v, lengths), got 1"),
]


@each_refusal(BAD_APPENDS)
def test_wrong_appends(changes, kind, message):
    for options in KINDS.values():
        cached = KVCache(2, 2, 10, 8, head_dim_v=6, **options)
        arguments = {"k": zeros(2, 2, 3, 8) + 1, "v": zeros(2, 2, 3, 6) + 1} | changes
        with refused(kind, message):
            cached.append(**arguments)
        assert not any(t.any() for t in snapshot(cached))


def test_lengths_that_were_tampered_with():
    """Appends and reads, compiled ones too, refuse lengths out of range, and take any length in range."""
    q = zeros(2, 2, 1, 8)
    for kind in KINDS.values():
        cached = KVCache(2, 2, 10, 8, **kind)
        compiled = torch.compile(partial(attention_with_cache, cache=cached), fullgraph=True, backend="aot_eager")
        cached.append(q, q, [1, 0])
        for wrong in (-3, 500):
            cached.lengths[1] = wrong
            for call in (
                lambda cached=cached: cached.append(q, q),
                lambda cached=cached: attention_with_cache(q, cached),
                lambda cached=cached: attention_with_cache(q, cached, causal=False),
                lambda cached=cached: attention_with_cache(q, cached, q_offset=2),
                lambda compiled=compiled: compiled(q),
                lambda compiled=compiled: compiled(q, q_offset=torch.tensor([2, 2])),
            ):
                with pytest.raises(ValueError, match=rf"each of the cache's lengths .* 1\d, got {wrong} at 1"):
                    call()
        cached.lengths[1] = 8
        assert attention_with_cache(q, cached).isfinite().all()
        assert compiled(q).isfinite().all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {0: zeros(2, 2, 8)},
            "keys and values must have 4 dimensions (batch, num_heads, slots, head_dim), got [2, 2, 8]",
        ),
        ({1: zeros(2, 2, 9, 6)}, "values must have shape [2, 2, 10, 6], got [2, 2, 9, 6]"),
        ({2: torch.zeros(1, dtype=torch.int64)}, "lengths must have shape [2], got [1]"),
        ({3: torch.zeros(1, dtype=torch.int64)}, "starts must have shape [2], got [1]"),
        (
            {3: torch.tensor([0, 1])},
            "each of the cache's lengths must be between its start and 10 more, got 0 and 1 at",
        ),
        ({2: torch.tensor([3, 11])}, "each of the cache's lengths must be between 0 and 10, got 11 at 1"),
        ({3: torch.tensor([-(2**63), 0])}, "between its start and 10 more, got 0 and -9223372036854775808 at 0"),
    ],
    ids=str,
)
def test_operators_check_what_they_write(changes, message):
    """Raw operators read and write in bounds, whatever is passed as a cache."""
    storage = [zeros(2, 2, 10, 8), zeros(2, 2, 10, 6), *torch.zeros(2, 2, dtype=torch.int64)]
    for which, value in changes.items():
        storage[which] = value
    with refused(ValueError, message, inside=True):
        ops.cache_append(*storage, zeros(2, 2, 3, 8), zeros(2, 2, 3, 6), None, 10)
    if "lengths must be" not in message and "between" not in message:
        with refused(ValueError, message, inside=True):
            ops.cache_reorder(*storage, torch.tensor([1, 0]))


BAD_ORDERS: Refusals = [
    ([0], ValueError, "idx must have shape [2], got [1]"),
    ([0, 2], ValueError, "each of idx must be between 0 and 1, got 2 at 1"),
    ([-1, 0], ValueError, "each of idx must be between 0 and 1, got -1 at 0"),
    (torch.zeros(2), TypeError, "idx must be int32 or int64, got torch.float32"),
]


@each_refusal(BAD_ORDERS)
def test_wrong_orders(changes, kind, message):
    for options in KINDS.values():
        cached = KVCache(2, 2, 10, 8, **options)
        with refused(kind, message):
            cached.reorder(changes)
        assert not any(t.any() for t in snapshot(cached))


q = zeros(2, 4, 3, 8)
BAD_CALLS: Refusals = [
    ({"cache": q}, TypeError, "cache must be KVCache, got torch.Tensor of shape (2, 4, 3, 8)"),
    *(
        ({"q": q.view(shape)}, ValueError, f"over a cache, q must have 4 dimensions (batch, num_heads, {rest}")
        for shape, rest in (
            ((4, 6, 8), "seqlen, head_dim), got (4, 6, 8)"),
            ((1, 2, 4, 3, 8), "seqlen, head_dim), got (1, 2, 4, 3, 8)"),
        )
    ),
    ({"is_causal": True}, TypeError, "attention_with_cache has no argument is_causal (use causal"),
    ({"q": q[:1]}, ValueError, "q must have the cache's batch, got 1 and 2"),
    ({"q": q[..., :7]}, ValueError, "q must have the cache's head_dim, got 7 and 8"),
    ({"q": q[:, :3]}, ValueError, "num_heads_q must be a multiple of the cache's num_heads_kv, got 3 and 2"),
    ({"q": q.to("meta")}, ValueError, "q must be on the cache's device, got meta and cpu"),
    ({"q": q.double()}, TypeError, "q must have the cache's dtype, got torch.float64 and torch.float32"),
    ({"bias": zeros(3, 5)}, ValueError, "each 1 or that of [2, 4, 3, 10], got [3, 5]"),
    ({"key_ranges": torch.tensor([[[4, 3]] * 3] * 2)}, ValueError, "got [4, 3] for query 0 of sequence 0"),
    (
        {"key_ranges": torch.tensor([[[4, 11]] * 3]), "causal": False},
        ValueError,
        "key_ranges must hold 0 <= begin <= end <= seqlen_k = 10, got [4, 11] for query 0 of sequence 0",
    ),
    (
        {"key_ranges": torch.zeros(2, 4, 2, dtype=torch.int64), "causal": False},
        ValueError,
        "key_ranges must have shape (2 or 1, 3 or 1, 2) or (2 or 1, 3 or 1, 1 to 4, 2), got [2, 4, 2]",
    ),
    (
        {"key_ranges": torch.zeros(2, 3, 2, dtype=torch.bool), "causal": False},
        TypeError,
        "key_ranges must have dtype int32 or int64, got bool",
    ),
]


@each_refusal(BAD_CALLS)
def test_wrong_calls(changes, kind, message):
    with refused(kind, message, inside=True):
        attention_with_cache(**{"q": q, "cache": KVCache(2, 2, 10, 8)} | changes)


def test_more_by_position():
    with refused(TypeError, "attention_with_cache takes q, cache by position and the rest by name"):
        attention_with_cache(q, KVCache(2, 2, 10, 8), q)
