"""Promise: pages change only where keys and values lie."""

import copy
import math

import pytest
import torch
from support.caches import OPTIONS, STEPS, both, each_option, made, twins
from support.cases import Case, assert_equal, each_dtype
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from pyattn import KVCache, attention_with_cache

ops = torch.ops.pyattn

SIZES = (16, 17, 48, 500)
each_size = pytest.mark.parametrize("page_size", SIZES)

LONG = {
    "tokens": Case(2, 3, 3, 1, 1300, 64, 40),
    "groups": Case(2, 8, 1, 1, 1300, 40, 64),
    "window": Case(1, 8, 2, 1, 1300, 32, 33, window=(700, -1)),
    "scores": Case(2, 4, 1, 2, 1300, 33, 32, softcap=3.0, alibi="bh", sinks=True, relative="h 700"),
    "chunk": Case(2, 4, 2, 100, 300, 24, 21),
    "dropout": Case(2, 4, 2, 3, 200, 16, 16, dropout_p=0.3),
    "everything": Case(2, 4, 2, 70, 200, 21, 24, window=(90, -1), softcap=5.0, alibi="h", sinks=True, dropout_p=0.2),
}
"""Tokens that decode over several ranges and blocks of keys, and queries that run in blocks."""


def scatter(cached: KVCache) -> None:
    """Permutes the pages."""
    order = torch.randperm(len(cached.k))
    for storage in (cached.k, cached.v):
        storage.copy_(storage[order])
    assert cached.block_table is not None
    cached.block_table.copy_(order.argsort()[cached.block_table])


@each_dtype
@each_option
@each_size
def test_same_bits_as_without(isa, name, page_size, dtype):
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
def test_long_ones(isa, name, dtype):
    """Over contiguous pages, and over scattered ones."""
    case = LONG[name]
    (q, k, v), options = case.inputs(dtype), case.options | case.tensors(dtype)

    def results(cached: KVCache) -> tuple[Tensor, Tensor]:
        return attention_with_cache(q, cached, return_lse=True, **options)

    plain = made(case, dtype, 1400)
    plain.append(k, v)
    expected = results(plain)
    for page_size in SIZES:
        cached = made(case, dtype, 1400, page_size=page_size)
        cached.append(k, v)
        assert_equal(results(cached), expected)
        scatter(cached)
        assert_equal(results(cached), expected)
        cached.k, cached._v = cached.k.contiguous(), cached.v.contiguous()  # heads as neighbours
        assert_equal(results(cached), expected)


@each_size
@pytest.mark.parametrize("scattered", [False, True])
def test_masks_of_every_kind(isa, scattered, page_size):
    """Sequences of different lengths; queries anywhere; ranges, masks and biases with holes."""
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
def test_threads_change_no_bit(threads_used):
    case = LONG["groups"]
    q, k, v = case.inputs(torch.float32)
    caches = twins(case, torch.float32, 1400, 16)
    for cached in caches:
        cached.append(k, v)
    torch.set_num_threads(threads_used)
    both(caches, q)


@pytest.mark.parametrize("transform", [lambda f: f, torch.func.vjp], ids=["autograd", "func"])
def test_gradients_are_those_without(transform):
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

        def call(q, bias, *more, cached=cached):
            named = dict(zip(options, more, strict=True))
            return attention_with_cache(q, cached, bias=bias, **named)

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


def test_compiles_with_gradients():
    case = Case(2, 4, 2, 2, 2, 16, 16)
    q, k, v = case.inputs(torch.float32)
    cached = made(case, torch.float32, 40, page_size=16)
    cached.append(k, v)
    cached.append(k[:, :, :1], v[:, :, :1])
    learned = q.clone().requires_grad_()
    grad = torch.compile(lambda q: attention_with_cache(q, cached).sin().sum(), fullgraph=True, backend="aot_eager")
    mine = torch.autograd.grad(grad(learned), learned)
    assert_equal(mine, torch.autograd.grad(attention_with_cache(learned, cached).sin().sum(), learned))


def test_operators_declare_what_they_change():
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


def test_copies_and_numbers_of_operations():
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


def test_nothing():
    for sizes in ((0, 2, 20, 8), (2, 0, 20, 8), (2, 2, 0, 8), (2, 2, 20, 0)):
        batch, heads, _, head_dim = sizes
        cached = KVCache(*sizes, page_size=16)
        cached.append(*torch.zeros(2, batch, heads, 0, head_dim))
        cached.reorder(range(batch))
        out, lse = attention_with_cache(torch.zeros(batch, heads, 3, head_dim), cached, return_lse=True)
        assert (out == 0).all()
        assert (lse == -math.inf).all()
