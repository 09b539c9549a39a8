"""Promise: attention over a cache gives the last rows of attention over all tokens, however they were appended."""

import copy
import math

import pytest
import torch
from support.assertions import assert_close, refused
from support.caches import OPTIONS, STEPS, assert_equals_the_whole, each_option, in_steps, made, same, snapshot
from support.cases import Case, assert_equal, each_dtype

from pyattn import attention, attention_with_cache

ops = torch.ops.pyattn


@each_dtype
@each_option
def test_steps_equal_the_whole(attend, name, dtype):
    qkv, options = OPTIONS[name].inputs(dtype), OPTIONS[name].options | OPTIONS[name].tensors(dtype)
    cached = made(OPTIONS[name], dtype, 50)
    assert_equals_the_whole(in_steps(attend, cached, qkv, **options), qkv, options)
    assert cached.lengths.tolist() == [40, 40]


@each_dtype
@each_option
def test_same_bits_as_attention_over_the_keys_so_far(isa, name, dtype):
    """Slots past the length cost nothing and change nothing, whichever kernel the number of queries selects."""
    case = OPTIONS[name]
    (q, k, v), options = case.inputs(dtype), case.options | case.tensors(dtype)
    cached, t = made(case, dtype, 1300), 0
    for new in STEPS:
        now = slice(t, t := t + new)
        cached.append(k[:, :, now], v[:, :, now])
        ours = attention_with_cache(q[:, :, now], cached, return_lse=True, **options)
        expected = attention(q[:, :, now], k[:, :, :t], v[:, :, :t], return_lse=True, **options)
        assert_equal(ours, expected)


@each_dtype
@pytest.mark.parametrize("window", [None, (6, 0)])
def test_sequences_of_their_own_lengths(attend, window, dtype):
    """Each equals the sequence alone; queries past their sequence's new tokens see only what was appended."""
    case = Case(3, 4, 2, 40, 40, 24, 20)
    q, k, v = case.inputs(dtype)
    cached = made(case, dtype, 18 if window else 40, window)
    options = {} if window is None else {"window": window}
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
@pytest.mark.parametrize("window", [None, (7, 0)])
def test_nan_past_the_length_never_leaks(isa, window, dtype):
    """Also without a causal mask, and for queries past their sequence's new tokens."""
    case = Case(2, 4, 2, 5, 13, 24, 20)
    q, k, v = case.inputs(dtype)
    soiled, clean = made(case, dtype, 64, window), made(case, dtype, 64, window)
    clean.k.zero_(), clean.v.zero_()
    for cached in (soiled, clean):
        cached.append(k, v, [13, 9])
    for options in ({}, {"causal": False}, {"q_offset": 8}, {"q_offset": torch.tensor([8, 60])}):
        ours, expected = (attention_with_cache(q, cached, return_lse=True, **options) for cached in (soiled, clean))
        assert_equal(ours, expected)
        assert ours[0].isfinite().all()
    if window is None:
        out = attention_with_cache(q, soiled, causal=False)
        alone = attention(q[1:], k[1:, :, :9], v[1:, :, :9], causal=False)
        torch.testing.assert_close(out[1:], alone)


@pytest.mark.parametrize("several", [False, True])
def test_key_ranges_and_biases_count_positions(several):
    case = Case(2, 4, 2, 3, 12, 16, 16)
    q, k, v = case.inputs(torch.float64)
    cached = made(case, torch.float64, 20)
    cached.append(k, v, [12, 7])
    bias = torch.randn(4, 3, 20, dtype=torch.float64)
    ranges = torch.tensor([[[0, 20], [3, 9], [5, 5]], [[1, 20], [8, 11], [0, 6]]])
    if several:
        ranges = torch.stack([torch.tensor([0, 1]).expand_as(ranges), ranges.clamp(min=1)], 2)
    for causal in (True, False):
        out = attention_with_cache(q, cached, causal=causal, bias=bias, key_ranges=ranges)
        shared = attention_with_cache(q, cached, causal=causal, key_ranges=ranges[:1])
        for b, length in enumerate((12, 7)):
            keys = k[b : b + 1, :, :length], v[b : b + 1, :, :length]
            mine = {"causal": causal, "key_ranges": ranges[b : b + 1].clamp(max=length)}
            alone = attention(q[b : b + 1], *keys, bias=bias[..., :length], **mine)
            assert_close(out[b : b + 1], alone, 1e-14)
            alone = attention(q[b : b + 1], *keys, causal=causal, key_ranges=ranges[:1].clamp(max=length))
            assert_close(shared[b : b + 1], alone, 1e-14)


@pytest.mark.parametrize(("max_seqlen", "page_size"), [(8, None), (20, 16)])
def test_overflow_leaves_the_cache_as_it_was(max_seqlen, page_size):
    """max_seqlen is the limit, not the capacity of the last page."""
    case, full = Case(3, 4, 2, 5, 5, 8, 8), max_seqlen - 4
    _, k, v = case.inputs(torch.float32)
    cached = made(case, torch.float32, max_seqlen, page_size=page_size)
    cached.append(k.repeat(1, 1, 4, 1), v.repeat(1, 1, 4, 1), [1, full, 2])
    before = snapshot(cached)
    message = (
        f"a sequence must not outgrow the cache's max_seqlen of {max_seqlen}, got {full} + 5 positions of sequence 1"
    )
    with refused(ValueError, message):
        cached.append(k, v)
    assert same(snapshot(cached), before)
    cached.append(k, v, [5, 4, 0])
    assert cached.lengths.tolist() == [6, max_seqlen, 2]


@pytest.mark.parametrize("window", [None, (5, 0)])
def test_reorder_and_reset(window):
    case = Case(3, 4, 2, 1, 11, 8, 8)
    q, k, v = case.inputs(torch.float64)
    cached = made(case, torch.float64, 12, window)
    cached.append(k, v, [11, 7, 9])
    cached.append(k[:, :, :1], v[:, :, :1], [0, 1, 1])
    if window:  # each sequence of a ring then starts at a different position
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


def test_gradients_reach_all_but_the_cache():
    case = Case(2, 4, 2, 3, 14, 8, 6, sinks=True, alibi="h")
    (q, k, v), options = case.inputs(torch.float64), case.tensors(torch.float64)
    k.requires_grad_(), v.requires_grad_()
    cached = made(case, torch.float64, 20)
    cached.append(k, v)
    bias = torch.randn(2, 4, 3, 20, dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (q, bias, *options.values())]
    names = ["bias", *options]
    dout = torch.randn(2, 4, 3, 6, dtype=torch.float64)

    def gradients(out):
        return torch.autograd.grad(out, leaves, dout)

    given = dict(zip(names, leaves[1:], strict=True))
    ours = gradients(attention_with_cache(q, cached, **given))
    expected = gradients(attention(q, k.detach(), v.detach(), **given | {"bias": bias[..., :14]}))
    assert_close(ours, expected, 1e-13)
    out = attention_with_cache(q, cached)
    cached.append(k[:, :, :1], v[:, :, :1])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(out)


@pytest.mark.parametrize("kind", [{}, {"window": (7, 0)}, {"page_size": 16}], ids=str)
def test_compiles_once_for_all_lengths(kind):
    """One graph: longer sequences, moves of a ring, new or shared pages and other counts don't recompile."""
    case = Case(2, 4, 2, 2, 2, 16, 16)
    q, k, v = case.inputs(torch.float32)
    ours, expected = (made(case, torch.float32, 40, **kind) for _ in range(2))

    def step(cached, q, k, v, lengths):
        before = cached.lengths.clone()
        cached.append(k, v, lengths)
        out = attention_with_cache(q[:, :, :1], cached) + attention_with_cache(q[:, :, :1], cached, q_offset=before)
        cached.reorder(lengths - 1)
        return out

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for n in range(18):
            lengths = torch.tensor([1, 2] if n % 3 else [2, 1])
            results = [call(cached, q, k, v, lengths) for call, cached in ((compiled, ours), (step, expected))]
            assert torch.equal(*results)
            assert same(snapshot(ours), snapshot(expected))
        ours.reset()
        compiled(ours, q, k, v, lengths)
    if not kind:
        ours.lengths.fill_(39)
        with pytest.raises(ValueError, match="must not outgrow the cache's max_seqlen of 40, got 39 \\+ 2 positions"):
            compiled(ours, q, k, v, lengths)


def test_operators_declare_what_they_change():
    case = Case(2, 4, 2, 3, 3, 16, 8)
    _, k, v = case.inputs(torch.float32)
    for window in (None, (4, 0)):
        cached = made(case, torch.float32, 10, window)
        storage = cached.k.zero_(), cached.v.zero_(), cached.lengths, cached.starts
        torch.library.opcheck(ops.cache_clear, (torch.ones(2, 3),))
        torch.library.opcheck(ops.cache_copy, (torch.ones(2, 3).T,))
        torch.library.opcheck(ops.cache_append, (*storage, k, v, torch.tensor([1, 3]), 10))
        torch.library.opcheck(ops.cache_reorder, (*storage, torch.tensor([1, 1])))
        offsets = torch.tensor([4, 5])
        torch.library.opcheck(ops.cache_slots, (*storage[2:], offsets, 5, 10))


def test_inference_mode_and_copies():
    """A cache made in inference mode works outside of it, and a copy is independent."""
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
    assert repr(twin).startswith(
        "KVCache(k (1, 2, 8, 8), v (1, 2, 8, 8), torch.float32, max_seqlen=8, page_size=None, window=None, "
    )
