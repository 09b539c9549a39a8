"""Promise: attention over a cache gives the last rows of attention over all tokens, however they went in."""

import copy
import doctest
import math
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from backends import Backend
from helpers import Case, each_dtype
from torch import Tensor
from yardstick import assert_accurate, in_double

from pyattn import KVCache, attention, attention_with_cache, cache, reference

ops = torch.ops.pyattn

OPTIONS: dict[str, Case] = {
    "plain": Case(2, 4, 2, 40, 40, 24, 20),
    "window": Case(2, 4, 2, 40, 40, 21, 21, window=(6, 0)),
    "scores": Case(2, 4, 1, 40, 40, 20, 24, softcap=3.0, alibi="bh", sinks=True, softmax_scale=0.3),
}
STEPS = (17, 1, 1, 6, 1, 9, 1, 1, 3)
"""New tokens of each call: a prompt, tokens, chunks; 40 in all."""

each_option = pytest.mark.parametrize("name", OPTIONS)


def made(case: Case, dtype: torch.dtype, max_seqlen: int, window: int | None = None) -> KVCache:
    """A cache for the case, full of NaN where nothing was appended."""
    made = KVCache(
        case.batch, case.num_heads_kv, max_seqlen, case.head_dim, head_dim_v=case.head_dim_v, dtype=dtype, window=window
    )
    made.k.fill_(math.nan), made.v.fill_(math.nan)
    return made


@pytest.fixture
def attend(repeatable: Backend) -> Iterator[Callable[..., Any]]:
    """attention_with_cache by the backend's kernels."""
    with mock.patch.object(cache, "attention", repeatable.attention):
        yield attention_with_cache


def in_steps(attend: Callable[..., Any], cached: KVCache, qkv: tuple[Tensor, ...], **options: Any) -> Tensor:
    """out of all queries, as the tokens come in STEPS, over and over."""
    q, k, v = qkv
    outs, t = [], 0
    while t < q.shape[2]:
        for new in STEPS:
            now = slice(t, t + new)
            cached.append(k[:, :, now], v[:, :, now])
            outs.append(attend(q[:, :, now], cached, **options))
            t += new
    return torch.cat(outs, 2)


def assert_equals_the_whole(out: Tensor, qkv: tuple[Tensor, ...], options: dict[str, Any]) -> None:
    """By the accuracy rule; a query's row alone, in the order that the tokens come."""
    plain = reference.attention(*qkv, **options)
    exact = reference.attention(*(t.double() for t in qkv), **in_double(options))
    assert_accurate("out", out, plain, exact)


@each_dtype
@each_option
def test_steps_equal_the_whole(attend: Callable[..., Any], name: str, dtype: torch.dtype) -> None:
    qkv, options = OPTIONS[name].inputs(dtype), OPTIONS[name].options | OPTIONS[name].tensors(dtype)
    cached = made(OPTIONS[name], dtype, 50)
    assert_equals_the_whole(in_steps(attend, cached, qkv, **options), qkv, options)
    assert cached.lengths.tolist() == [40, 40]


@each_dtype
@each_option
def test_same_bits_as_attention_over_the_keys_so_far(isa: str, name: str, dtype: torch.dtype) -> None:
    """Slots past the length cost nothing and change nothing, whatever number of queries takes which kernel."""
    case = OPTIONS[name]
    (q, k, v), options = case.inputs(dtype), case.options | case.tensors(dtype)
    cached, t = made(case, dtype, 1300), 0
    for new in STEPS:
        now = slice(t, t := t + new)
        cached.append(k[:, :, now], v[:, :, now])
        ours = attention_with_cache(q[:, :, now], cached, return_lse=True, **options)
        expected = attention(q[:, :, now], k[:, :, :t], v[:, :, :t], return_lse=True, **options)
        assert all(torch.equal(x, y) for x, y in zip(ours, expected, strict=True))


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


@each_dtype
@pytest.mark.parametrize("window", [None, 7])
def test_sequences_of_their_own_lengths(attend: Callable[..., Any], window: int | None, dtype: torch.dtype) -> None:
    """Each equals the sequence alone; queries past their sequence's new tokens see nothing that was not appended."""
    case = Case(3, 4, 2, 40, 40, 24, 20)
    q, k, v = case.inputs(dtype)
    cached = made(case, dtype, 18 if window else 40, window)
    options = {} if window is None else {"window": (window - 1, 0)}
    for counts in ([0, 9, 4], [1, 1, 1], [0, 12, 3], [2, 2, 2], [5, 1, 0], [12, 3, 12], [6, 9, 5]):
        before, new = cached.lengths.clone(), max(counts)
        at = (before[:, None] + torch.arange(new)).clamp(max=39)
        rows = torch.arange(3)[:, None]
        qs, ks, vs = (t.transpose(1, 2)[rows, at].transpose(1, 2) for t in (q, k, v))
        cached.append(ks, vs, counts if len(set(counts)) > 1 else torch.tensor(counts, dtype=torch.int32))
        out = attend(qs, cached, q_offset=before)
        assert out.isfinite().all()
        for b, (begin, count) in enumerate(zip(before.tolist(), counts, strict=True)):
            now, all_keys = slice(begin, begin + count), slice(0, begin + count)
            alone = tuple(t[b : b + 1, :, part] for t, part in ((q, now), (k, all_keys), (v, all_keys)))
            if count:
                assert_equals_the_whole(out[b : b + 1, :, :count], alone, options)
        assert cached.lengths.tolist() == [x + y for x, y in zip(before.tolist(), counts, strict=True)]


@each_dtype
@pytest.mark.parametrize("window", [None, 8])
def test_nan_past_the_length_never_leaks(isa: str, window: int | None, dtype: torch.dtype) -> None:
    """Nor without causality, nor to queries past their sequence's new tokens."""
    case = Case(2, 4, 2, 5, 13, 24, 20)
    q, k, v = case.inputs(dtype)
    soiled, clean = made(case, dtype, 64, window), made(case, dtype, 64, window)
    clean.k.zero_(), clean.v.zero_()
    for cached in (soiled, clean):
        cached.append(k, v, [13, 9])
    for options in ({}, {"causal": False}, {"q_offset": 8}, {"q_offset": torch.tensor([8, 60])}):
        ours, expected = (attention_with_cache(q, cached, return_lse=True, **options) for cached in (soiled, clean))
        assert all(torch.equal(x, y) for x, y in zip(ours, expected, strict=True))
        assert ours[0].isfinite().all()
    if window is None:
        out = attention_with_cache(q, soiled, causal=False)
        alone = attention(q[1:], k[1:, :, :9], v[1:, :, :9], causal=False)
        torch.testing.assert_close(out[1:], alone)


def test_key_ranges_and_biases_count_positions() -> None:
    case = Case(2, 4, 2, 3, 12, 16, 16)
    q, k, v = case.inputs(torch.float64)
    cached = made(case, torch.float64, 20)
    cached.append(k, v, [12, 7])
    bias = torch.randn(4, 3, 20, dtype=torch.float64)
    ranges = torch.tensor([[[0, 20], [3, 9], [5, 5]], [[1, 20], [8, 11], [0, 6]]])
    for causal in (True, False):
        out = attention_with_cache(q, cached, causal=causal, bias=bias, key_ranges=ranges)
        shared = attention_with_cache(q, cached, causal=causal, key_ranges=ranges[:1])
        for b, length in enumerate((12, 7)):
            keys = k[b : b + 1, :, :length], v[b : b + 1, :, :length]
            mine = {"causal": causal, "key_ranges": ranges[b : b + 1].clamp(max=length)}
            alone = attention(q[b : b + 1], *keys, bias=bias[..., :length], **mine)
            torch.testing.assert_close(out[b : b + 1], alone, rtol=0, atol=1e-14)
            alone = attention(q[b : b + 1], *keys, causal=causal, key_ranges=ranges[:1].clamp(max=length))
            torch.testing.assert_close(shared[b : b + 1], alone, rtol=0, atol=1e-14)


def snapshot(cached: KVCache) -> list[Tensor]:
    return [t.clone() for t in (cached.k, cached.v, cached.lengths, cached.starts)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x, y in zip(a, b, strict=True))


def test_overflow_leaves_the_cache_as_it_was() -> None:
    case = Case(3, 4, 2, 5, 5, 8, 8)
    _, k, v = case.inputs(torch.float32)
    cached = made(case, torch.float32, 8)
    cached.append(k, v, [1, 4, 2])
    before = snapshot(cached)
    message = "a sequence must not outgrow the cache's max_seqlen of 8, got 4 + 5 positions of sequence 1"
    with pytest.raises(ValueError, match="^pyattn: " + re.escape(message)):
        cached.append(k, v)
    assert same(snapshot(cached), before)
    cached.append(k, v, [5, 4, 0])
    assert cached.lengths.tolist() == [6, 8, 2]


@pytest.mark.parametrize("window", [None, 6])
def test_reorder_and_reset(window: int | None) -> None:
    case = Case(3, 4, 2, 1, 11, 8, 8)
    q, k, v = case.inputs(torch.float64)
    cached = made(case, torch.float64, 12, window)
    cached.append(k, v, [11, 7, 9])
    cached.append(k[:, :, :1], v[:, :, :1], [0, 1, 1])
    if window:  # whose sequences then begin at positions of their own
        cached.append(k, v, [11, 0, 2])
        assert cached.starts.unique().numel() > 1
    expected, lengths = attention_with_cache(q, cached), cached.lengths[[2, 0, 0]]
    cached.reorder([2, 0, 0])
    assert torch.equal(cached.lengths, lengths)
    assert torch.equal(attention_with_cache(q[[2, 0, 0]], cached), expected[[2, 0, 0]])
    cached.append(k[:, :, :1], v[:, :, :1])
    cached.reset()
    assert cached.lengths.tolist() == cached.starts.tolist() == [0, 0, 0]
    out, lse = attention_with_cache(q, cached, return_lse=True)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


def test_gradients_reach_all_but_the_cache() -> None:
    case = Case(2, 4, 2, 3, 14, 8, 6, sinks=True, alibi="h")
    (q, k, v), options = case.inputs(torch.float64), case.tensors(torch.float64)
    k.requires_grad_(), v.requires_grad_()
    cached = made(case, torch.float64, 20)
    cached.append(k, v)
    bias = torch.randn(2, 4, 3, 20, dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (q, bias, *options.values())]
    names = ["bias", *options]
    dout = torch.randn(2, 4, 3, 6, dtype=torch.float64)

    def gradients(out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, dout)

    given = dict(zip(names, leaves[1:], strict=True))
    ours = gradients(attention_with_cache(q, cached, **given))
    expected = gradients(attention(q, k.detach(), v.detach(), **given | {"bias": bias[..., :14]}))
    for x, y in zip(ours, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-13)
    out = attention_with_cache(q, cached)
    cached.append(k[:, :, :1], v[:, :, :1])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(out)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning:torch")  # torch's own, in dynamo
@pytest.mark.parametrize("window", [None, 8])
def test_compiles_once_for_all_lengths(window: int | None) -> None:
    """One graph; longer sequences, moves of a ring and other counts do not compile anew."""
    case = Case(2, 4, 2, 2, 2, 16, 16)
    q, k, v = case.inputs(torch.float32)
    ours, expected = made(case, torch.float32, 40, window), made(case, torch.float32, 40, window)

    def step(cached: KVCache, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        before = cached.lengths.clone()
        cached.append(k, v, lengths)
        out = attention_with_cache(q[:, :, :1], cached) + attention_with_cache(q[:, :, :1], cached, q_offset=before)
        cached.reorder(lengths - 1)
        return out

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for n in range(18):
            lengths = torch.tensor([1, 2] if n % 3 else [2, 1])
            results = [call(cached, q, k, v, lengths) for call, cached in ((compiled, ours), (step, expected))]
            assert torch.equal(*results)
            assert same(snapshot(ours), snapshot(expected))
        ours.reset()
        compiled(ours, q, k, v, lengths)
    if window is None:
        ours.lengths.fill_(39)
        with pytest.raises(ValueError, match="must not outgrow the cache's max_seqlen of 40, got 39 \\+ 2 positions"):
            compiled(ours, q, k, v, lengths)


def test_operators_declare_what_they_change() -> None:
    case = Case(2, 4, 2, 3, 3, 16, 8)
    _, k, v = case.inputs(torch.float32)
    for window in (None, 5):
        cached = made(case, torch.float32, 10, window)
        storage = cached.k.zero_(), cached.v.zero_(), cached.lengths, cached.starts
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(ops.cache_append, (*storage, k, v, torch.tensor([1, 3]), 10), test_utils=checks)
        torch.library.opcheck(ops.cache_reorder, (*storage, torch.tensor([1, 1])), test_utils=checks)
        offsets = torch.tensor([4, 5])
        torch.library.opcheck(ops.cache_slots, (*storage[2:], offsets, 5, 10), test_utils=checks)


def test_inference_mode_and_copies() -> None:
    """A cache that was made in inference mode works outside of it, and copies are caches of their own."""
    case = Case(1, 2, 2, 1, 4, 8, 8)
    q, k, v = case.inputs(torch.float32)
    with torch.inference_mode():
        cached = made(case, torch.float32, 8)
        cached.append(k, v)
    cached.append(k, v, torch.tensor([1]))
    twin = copy.deepcopy(cached)
    twin.append(k, v, [2])
    assert (cached.lengths.item(), twin.lengths.item()) == (5, 7)
    assert attention_with_cache(q.requires_grad_(), cached).requires_grad
    assert repr(twin).startswith("KVCache(k (1, 2, 8, 8), v (1, 2, 8, 8), torch.float32, max_seqlen=8, window=None, ")


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


BAD_CACHES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"batch": -1}, ValueError, "batch must be at least 0, got -1"),
    ({"max_seqlen": 4.0}, TypeError, "max_seqlen must be int, got 4.0"),
    ({"head_dim_v": -2}, ValueError, "head_dim_v must be at least 0, got -2"),
    ({"dtype": torch.int64}, TypeError, "dtype must be float64, float32, bfloat16 or float16, got torch.int64"),
    ({"page_size": 16}, NotImplementedError, "KVCache has no pages yet, leave page_size out, got 16"),
    ({"window": 0}, ValueError, "window must be at least 1, got 0"),
    ({"window": 11}, ValueError, "window must not exceed max_seqlen, got 11 and 10"),
]


@pytest.mark.parametrize(("changes", "kind", "message"), BAD_CACHES, ids=[m[:30] for _, _, m in BAD_CACHES])
def test_wrong_caches(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match="^pyattn: " + re.escape(message)):
        KVCache(**{"batch": 2, "num_heads_kv": 2, "max_seqlen": 10, "head_dim": 8} | changes)


BAD_APPENDS: list[tuple[dict[str, Any], type[Exception], str]] = [
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
]


@pytest.mark.parametrize(("changes", "kind", "message"), BAD_APPENDS, ids=[m[:40] for _, _, m in BAD_APPENDS])
def test_wrong_appends(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    cached = KVCache(2, 2, 10, 8, head_dim_v=6)
    arguments = {"k": zeros(2, 2, 3, 8) + 1, "v": zeros(2, 2, 3, 6) + 1} | changes
    with pytest.raises(kind, match="^pyattn: " + re.escape(message)):
        cached.append(**arguments)
    assert not any(t.any() for t in snapshot(cached))


def test_lengths_that_were_tampered_with() -> None:
    cached = KVCache(2, 2, 10, 8)
    for wrong in (-3, 11):
        cached.lengths[1] = wrong
        with pytest.raises(ValueError, match=f"lengths must be between its start and 10 more, got {wrong} and 0 at 1"):
            cached.append(zeros(2, 2, 1, 8), zeros(2, 2, 1, 8))
        assert attention_with_cache(zeros(2, 2, 1, 8), cached).isfinite().all()


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
        ({3: torch.tensor([-(2**63), 0])}, "between its start and 10 more, got 0 and -9223372036854775808 at 0"),
    ],
    ids=str,
)
def test_operators_check_what_they_write(changes: dict[int, Tensor], message: str) -> None:
    """Raw operators read and write in bounds whatever stands for a cache."""
    storage = [zeros(2, 2, 10, 8), zeros(2, 2, 10, 6), *torch.zeros(2, 2, dtype=torch.int64)]
    for which, value in changes.items():
        storage[which] = value
    with pytest.raises(ValueError, match="^pyattn: .*" + re.escape(message)):
        ops.cache_append(*storage, zeros(2, 2, 3, 8), zeros(2, 2, 3, 6), None, 10)
    if "lengths must be" not in message and "between" not in message:
        with pytest.raises(ValueError, match="^pyattn: .*" + re.escape(message)):
            ops.cache_reorder(*storage, torch.tensor([1, 0]))


BAD_ORDERS: list[tuple[Any, type[Exception], str]] = [
    ([0], ValueError, "idx must have shape [2], got [1]"),
    ([0, 2], ValueError, "each of idx must be between 0 and 1, got 2 at 1"),
    ([-1, 0], ValueError, "each of idx must be between 0 and 1, got -1 at 0"),
    (torch.zeros(2), TypeError, "idx must be int32 or int64, got torch.float32"),
]


@pytest.mark.parametrize(("idx", "kind", "message"), BAD_ORDERS, ids=[m[:30] for _, _, m in BAD_ORDERS])
def test_wrong_orders(idx: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match="^pyattn: " + re.escape(message)):
        KVCache(2, 2, 10, 8).reorder(idx)


q = zeros(2, 4, 3, 8)
BAD_CALLS: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    ((q, q), {}, TypeError, "cache must be KVCache, got torch.Tensor of shape (2, 4, 3, 8)"),
    ((q[0], None), {}, ValueError, "must have 4 dimensions"),
    ((q, None, q), {}, TypeError, "attention_with_cache takes q, cache by position and the rest by name"),
    ((q, None), {"is_causal": True}, TypeError, "attention_with_cache has no argument is_causal (use causal"),
    ((q[:1], None), {}, ValueError, "q and k must have the same batch, got 1 and 2"),
    ((q.double(), None), {}, TypeError, "k must have dtype float64, got float32"),
    ((q, None), {"bias": zeros(3, 5)}, ValueError, "each 1 or that of [2, 4, 3, 10], got [3, 5]"),
    ((q, None), {"key_ranges": torch.tensor([[[4, 3]] * 3] * 2)}, ValueError, "got [4, 3] for query 0 of sequence 0"),
    (
        (q, None),
        {"key_ranges": torch.tensor([[[4, 11]] * 3]), "causal": False},
        ValueError,
        "key_ranges must hold 0 <= begin <= end <= seqlen_k = 10, got [4, 11] for query 0 of sequence 0",
    ),
    (
        (q, None),
        {"key_ranges": torch.zeros(2, 4, 2, dtype=torch.int64), "causal": False},
        ValueError,
        "key_ranges must have shape (2 or 1, 3, 2), got [2, 4, 2]",
    ),
]


@pytest.mark.parametrize(("arguments", "options", "kind", "message"), BAD_CALLS, ids=[m[:40] for *_, m in BAD_CALLS])
def test_wrong_calls(arguments: tuple[Any, ...], options: dict[str, Any], kind: type[Exception], message: str) -> None:
    given = [KVCache(2, 2, 10, 8) if x is None else x for x in arguments]
    with pytest.raises(kind, match="pyattn: .*" + re.escape(message)):
        attention_with_cache(*given, **options)


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


def test_the_example_is_right() -> None:
    results = doctest.testmod(cache)
    assert results.attempted
    assert not results.failed
