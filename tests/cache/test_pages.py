"""Promise: pages change nothing but where keys and values lie."""

import copy
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cache.caches import OPTIONS, STEPS, both, each_option, made, same, snapshot, twins, zeros
from helpers import Case, assert_equal, each_dtype
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from pyattn import KVCache, attention_with_cache

ops = torch.ops.pyattn

each_size = pytest.mark.parametrize("page_size", [16, 17, 48, 500])

LONG = {
    "tokens": Case(2, 3, 3, 1, 1300, 64, 40),
    "groups": Case(2, 8, 1, 1, 1300, 40, 64),
    "window": Case(1, 8, 2, 1, 1300, 32, 33, window=(700, -1)),
    "scores": Case(2, 4, 1, 2, 1300, 33, 32, softcap=3.0, alibi="bh", sinks=True),
    "chunk": Case(2, 4, 2, 100, 300, 24, 21),
    "dropout": Case(2, 4, 2, 3, 200, 16, 16, dropout_p=0.3),
    "everything": Case(2, 4, 2, 70, 200, 21, 24, window=(90, -1), softcap=5.0, alibi="h", sinks=True, dropout_p=0.2),
}
"""Tokens that decode over several ranges and blocks of keys, and queries that run in blocks."""


def scatter(cached: KVCache) -> None:
    """Moves the pages into another order."""
    order = torch.randperm(len(cached.k))
    for storage in (cached.k, cached.v):
        storage.copy_(storage[order])
    assert cached.block_table is not None
    cached.block_table.copy_(order.argsort()[cached.block_table])


each_order = pytest.mark.parametrize("scattered", [False, True])


@each_dtype
@each_option
@each_size
def test_same_bits_as_without(isa: str, name: str, page_size: int, dtype: torch.dtype) -> None:
    case = OPTIONS[name]
    (q, k, v), options = case.inputs(dtype), case.options | case.tensors(dtype)
    caches, t = twins(case, dtype, 50, page_size), 0
    for new in STEPS:
        now = slice(t, t := t + new)
        for cached in caches:
            cached.append(k[:, :, now], v[:, :, now])
        both(caches, q[:, :, now], **options)
    assert caches[0].lengths.tolist() == [40, 40]


@each_dtype
@pytest.mark.parametrize("name", LONG)
@each_size
@each_order
def test_long_ones(isa: str, name: str, scattered: bool, page_size: int, dtype: torch.dtype) -> None:
    """Over pages in one piece, and over such as lie apart."""
    case = LONG[name]
    (q, k, v), options = case.inputs(dtype), case.options | case.tensors(dtype)
    caches = twins(case, dtype, 1400, page_size)
    for cached in caches:
        cached.append(k, v)
    if scattered:
        scatter(caches[0])
    both(caches, q, **options)


@each_size
@each_order
def test_masks_of_every_kind(isa: str, scattered: bool, page_size: int) -> None:
    """Sequences of their own lengths; queries anywhere; ranges, masks and biases with holes."""
    case = Case(3, 4, 2, 3, 200, 24, 20)
    q, k, v = case.inputs(torch.float32)
    caches = twins(case, torch.float32, 210, page_size)
    for cached in caches:
        cached.append(k, v, [200, 0, 131])
    if scattered:
        scatter(caches[0])
    bias, ranges = torch.randn(4, 3, 210), torch.randint(105, (3, 3, 2)) + torch.tensor([0, 105])
    shown = torch.rand(3, 1, 3, 210) < 0.8
    choices = [{}, {"key_ranges": ranges}]
    choices += [{"bias": bias}, {"mask": shown}, {"bias": bias.masked_fill(~shown, -math.inf)}]
    choices += [{"mask": shown, "bias": bias, "key_ranges": ranges}]
    for causal in (True, False):
        for options in choices:
            both(caches, q, causal=causal, **options)
            many = {name: t.repeat_interleave(7, -2) for name, t in options.items()}
            both(caches, q.repeat_interleave(7, 2), causal=causal, **many)
    for offset in (5, torch.tensor([150, 300, -2])):
        both(caches, q, q_offset=offset)


@pytest.mark.parametrize("threads_used", [1, 2, 3])
@pytest.mark.usefixtures("threads")
def test_threads_change_no_bit(threads_used: int) -> None:
    case = LONG["groups"]
    q, k, v = case.inputs(torch.float32)
    caches = twins(case, torch.float32, 1400, 16)
    for cached in caches:
        cached.append(k, v)
    torch.set_num_threads(threads_used)
    both(caches, q)


def test_overflow_leaves_the_cache_as_it_was() -> None:
    """max_seqlen counts, not what the last page has room for."""
    case = Case(3, 4, 2, 5, 5, 8, 8)
    _, k, v = case.inputs(torch.float32)
    cached = made(case, torch.float32, 20, page_size=16)
    cached.append(k.repeat(1, 1, 4, 1), v.repeat(1, 1, 4, 1), [4, 16, 2])
    before = snapshot(cached)
    message = "a sequence must not outgrow the cache's max_seqlen of 20, got 16 + 5 positions of sequence 1"
    with pytest.raises(ValueError, match="^pyattn: " + re.escape(message)):
        cached.append(k, v)
    assert same(snapshot(cached), before)
    cached.append(k, v, [5, 4, 0])
    assert cached.lengths.tolist() == [9, 20, 2]


@pytest.mark.parametrize("transform", [lambda f: f, torch.func.vjp], ids=["autograd", "func"])
def test_gradients_are_those_without(transform: Callable[..., Any]) -> None:
    case = Case(2, 4, 2, 3, 34, 8, 6, sinks=True, alibi="h")
    (q, k, v), options = case.inputs(torch.float64), case.tensors(torch.float64)
    caches = twins(case, torch.float64, 40, 17)
    for cached in caches:
        cached.append(k, v, [34, 20])
    bias = torch.randn(2, 4, 3, 40, dtype=torch.float64)
    leaves = (q, bias, *options.values())
    dout = torch.randn(2, 4, 3, 6, dtype=torch.float64)
    results = []
    for cached in caches:

        def call(q: Tensor, bias: Tensor, *more: Tensor, cached: KVCache = cached) -> Tensor:
            named = dict(zip(options, more, strict=True))
            out: Tensor = attention_with_cache(q, cached, bias=bias, **named)
            return out

        if transform is torch.func.vjp:
            out, vjp = torch.func.vjp(call, *leaves)
            results.append((out, *vjp(dout)))
        else:
            own = [t.clone().requires_grad_() for t in leaves]
            out = call(*own)
            cached.append(k[:, :, :1], v[:, :, :1]) if cached.page_size else None
            results.append((out.detach(), *torch.autograd.grad(out, own, dout)))
    assert_equal(*results)
    stacked = torch.stack([q, 2 * q])
    found = torch.vmap(lambda q: attention_with_cache(q, caches[0], q_offset=20))(stacked)
    torch.testing.assert_close(found[1], attention_with_cache(2 * q, caches[0], q_offset=20))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning:torch")  # torch's own, in dynamo
def test_compiles_once_for_all_lengths() -> None:
    """One graph; new pages, shared ones and other counts do not compile anew."""
    case = Case(2, 4, 2, 2, 2, 16, 16)
    q, k, v = case.inputs(torch.float32)
    ours, expected = (made(case, torch.float32, 40, page_size=16) for _ in range(2))

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
    learned = q.clone().requires_grad_()
    ours.append(k, v)
    ours.append(k[:, :, :1], v[:, :, :1])
    grad = torch.compile(lambda q: attention_with_cache(q, ours).sin().sum(), fullgraph=True, backend="aot_eager")
    mine = torch.autograd.grad(grad(learned), learned)
    assert_equal(mine, torch.autograd.grad(attention_with_cache(learned, ours).sin().sum(), learned))


def test_operators_declare_what_they_change() -> None:
    case = Case(2, 4, 2, 3, 3, 16, 8)
    q, k, v = case.inputs(torch.float32)
    cached = made(case, torch.float32, 40, page_size=16)
    storage = cached.k.zero_(), cached.v.zero_(), cached.lengths, cached.block_table
    torch.library.opcheck(ops.cache_append_pages, (*storage, k, v, torch.tensor([1, 3]), 40))
    torch.library.opcheck(ops.cache_reorder_pages, (*storage[2:], torch.tensor([1, 1])))
    torch.library.opcheck(ops.attention_paged_forward, (q, cached.k, cached.v, cached.block_table, 40))
    starts = torch.tensor([0, 40, 80])
    in_use = cached.block_table, starts, 40, cached.lengths, 6, 16
    torch.library.opcheck(ops.pages_in_use, in_use)
    with torch.inference_mode():
        cached.append(k, v)
    out = ops.attention_paged_forward(q.requires_grad_(), cached.k, cached.v, cached.block_table, 40)[0]
    with pytest.raises(RuntimeError, match="attention_paged_forward"):
        out.sum().backward()


def test_copies_and_numbers_of_operations() -> None:
    case = Case(1, 2, 2, 1, 4, 8, 8)
    q, k, v = case.inputs(torch.float32)
    caches = twins(case, torch.float32, 30, 16)
    for cached in caches:
        cached.append(k, v)
    twin = copy.deepcopy(caches[0])
    twin.append(k, v, [2])
    assert (caches[0].lengths.item(), twin.lengths.item()) == (4, 6)
    assert repr(twin).startswith("KVCache(k (2, 16, 2, 8), v (2, 16, 2, 8), torch.float32, max_seqlen=30, page_size=16")
    counts = []
    for cached in caches:
        with FlopCounterMode(display=False) as counter:
            attention_with_cache(q, cached)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
    with torch.autocast("cpu", torch.bfloat16):
        assert attention_with_cache(q, caches[0]).dtype == torch.bfloat16


table = torch.zeros(2, 3, dtype=torch.int64)
paged = {"q": zeros(2, 4, 3, 8), "k": zeros(6, 16, 2, 8), "v": zeros(6, 16, 2, 6), "block_table": table, "seqlen_k": 40}
BAD_CALLS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"k": zeros(6, 16, 8)}, ValueError, "k and v in pages 4 (pages, page_size, num_heads, head_dim), got q [2, 4, 3"),
    ({"v": zeros(5, 16, 2, 6)}, ValueError, "v must have shape [6, 16, 2, 6], got [5, 16, 2, 6]"),
    ({"k": zeros(6, 15, 2, 8), "v": zeros(6, 15, 2, 6)}, ValueError, "page_size must be at least 16, got 15"),
    ({"k": zeros(6, 16, 2, 9)}, ValueError, "q and k must have the same head_dim, got 8 and 9"),
    ({"k": zeros(6, 16, 3, 8)}, ValueError, "num_heads_q must be a multiple of num_heads_kv, got 4 and 3"),
    ({"block_table": table.float()}, TypeError, "block_table must have dtype int32 or int64, got float32"),
    ({"block_table": table[:1]}, ValueError, "block_table must have shape (2, pages of a sequence), got [1, 3]"),
    ({"block_table": table.to("meta")}, ValueError, "block_table must be on q's device, got meta and cpu"),
    ({"block_table": table[:, :2]}, ValueError, "list pages for every key, got 2 of size 16 for the 40 keys of seq"),
    ({"block_table": table + 6}, ValueError, "block_table must hold pages from 0 to 5, got 6 at [0, 0]"),
    ({"block_table": table - table.new_tensor([0, 0, 1])}, ValueError, "pages from 0 to 5, got -1 at [0, 2]"),
    ({"seqlen_k": -1}, ValueError, "seqlen_k must be at least 0, got -1"),
    ({"seqlen_k": 2**63 - 1}, ValueError, "got 3 of size 16 for the 9223372036854775807 keys of sequence 0"),
    ({"bias": zeros(3, 41)}, ValueError, "each 1 or that of [2, 4, 3, 40], got [3, 41]"),
    ({"key_ranges": torch.tensor([[[0, 41]] * 3])}, ValueError, "seqlen_k = 40, got [0, 41] for query 0"),
]


@pytest.mark.parametrize(("changes", "kind", "message"), BAD_CALLS, ids=[m[:40] for *_, m in BAD_CALLS])
def test_wrong_calls(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    ops.attention_paged_forward(**paged)
    with pytest.raises(kind, match="^pyattn: .*" + re.escape(message)):
        ops.attention_paged_forward(**paged | changes)


def storage_of() -> list[Tensor]:
    return [zeros(4, 16, 2, 8), zeros(4, 16, 2, 6), torch.zeros(2, dtype=torch.int64), table[:, :2].clone()]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({0: zeros(4, 16, 8)}, "(pages, page_size, num_heads, head_dim), got [4, 16, 8] and [4, 16, 2, 6]"),
        ({1: zeros(4, 17, 2, 6)}, "values must have shape [4, 16, 2, 6], got [4, 17, 2, 6]"),
        ({0: zeros(4, 8, 2, 8), 1: zeros(4, 8, 2, 6)}, "page_size must be at least 16, got 8"),
        ({0: zeros(4, 16, 8, 2).mT}, "columns of keys and values must be contiguous, got strides [256, 16, 1, 2]"),
        ({2: torch.zeros(3, dtype=torch.int64)}, "lengths must have shape [2], got [3]"),
        ({2: torch.tensor([0, -1])}, "each of the cache's lengths must be between 0 and 32, got -1 at 1"),
        ({2: torch.tensor([33, 0])}, "each of the cache's lengths must be between 0 and 32, got 33 at 0"),
        ({2: torch.tensor([0, 17]), 3: torch.tensor([[0, 0], [0, 4]])}, "pages from 0 to 3, got 4 at [1, 1]"),
        ({2: torch.tensor([0, 1]), 3: torch.tensor([[0, 0], [-1, 0]])}, "pages from 0 to 3, got -1 at [1, 0]"),
        ({3: torch.zeros(2, 3, dtype=torch.int64)}, "must have 6 pages, one for each place of block_table, got 4"),
        ({3: torch.zeros(4, dtype=torch.int64)}, "block_table must have shape (batch, pages of a sequence), got [4]"),
        ({2: torch.tensor([0, 30])}, "must not outgrow the cache's max_seqlen of 32, got 30 + 3 positions of sequence"),
    ],
    ids=str,
)
def test_operators_check_what_they_write(changes: dict[int, Tensor], message: str) -> None:
    """Raw operators read and write in bounds whatever stands for a cache."""
    storage = storage_of()
    for which, value in changes.items():
        storage[which] = value
    with pytest.raises(ValueError, match="^pyattn: .*" + re.escape(message)):
        ops.cache_append_pages(*storage, zeros(2, 2, 3, 8), zeros(2, 2, 3, 6), None, 99)


def test_wrong_appends_and_orders() -> None:
    cached = KVCache(2, 2, 40, 8, head_dim_v=6, page_size=16)
    k, v = zeros(2, 2, 3, 8) + 1, zeros(2, 2, 3, 6) + 1
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"k": k[0]}, ValueError, "k must have 4 dimensions (batch, num_heads, new, head_dim), got [2, 3, 8]"),
        ({"k": k[:1]}, ValueError, "k must have shape [2, 2, 3, 8], got [1, 2, 3, 8]"),
        ({"v": v.half()}, TypeError, "v must have the cache's dtype float32, got float16"),
        ({"lengths": [1, 4]}, ValueError, "each of lengths must be between 0 and 3, got 4 at 1"),
    ]
    for changes, kind, message in wrong:
        with pytest.raises(kind, match="^pyattn: " + re.escape(message)):
            cached.append(**{"k": k, "v": v} | changes)
    with pytest.raises(ValueError, match=r"each of idx must be between 0 and 1, got 2 at 1"):
        cached.reorder([0, 2])
    assert not any(t.any() for t in snapshot(cached))


def test_tables_that_were_tampered_with() -> None:
    """The same words where a gradient is wanted, and pages are copied."""
    cached = KVCache(2, 2, 40, 8, page_size=16)
    cached.append(*torch.randn(2, 2, 2, 20, 8))
    assert cached.block_table is not None
    for wrong in (6, -1):
        cached.block_table[1, 1] = wrong
        for q in (torch.randn(2, 2, 1, 8), torch.randn(2, 2, 1, 8, requires_grad=True)):
            with pytest.raises(ValueError, match=rf"block_table must hold pages from 0 to 5, got {wrong} at \[1, 1\]"):
                attention_with_cache(q, cached)
    cached.lengths[1] = 3
    attention_with_cache(torch.randn(2, 2, 1, 8, requires_grad=True), cached)


def test_nothing() -> None:
    for sizes in ((0, 2, 20, 8), (2, 0, 20, 8), (2, 2, 0, 8), (2, 2, 20, 0)):
        batch, heads, _, head_dim = sizes
        cached = KVCache(*sizes, page_size=16)
        cached.append(*torch.zeros(2, batch, heads, 0, head_dim))
        cached.reorder(range(batch))
        out, lse = attention_with_cache(torch.zeros(batch, heads, 3, head_dim), cached, return_lse=True)
        assert (out == 0).all()
        assert (lse == -math.inf).all()
