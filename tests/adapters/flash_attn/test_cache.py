"""Promise: flash_attn_with_kvcache attends over a cache that the caller owns, and writes it in place."""

import math

import pytest
import torch
from support.adapters.flash_attn import plain, turned
from support.assertions import refused
from torch.testing import assert_close

from pyattn.adapters.flash_attn import flash_attn_func, flash_attn_with_kvcache

SLOTS = 40


def expected(q, keys, values, k, v, length, pad, angle, interleaved=True, **options):
    """One sequence by flash-attn's documentation, keys (slots, Hkv, D): out, lse, and the updated cache."""
    seqlen_q, new = q.shape[0], 0 if k is None else k.shape[0]
    if angle is not None:
        moving = "causal" in options or "window_size" in options
        q = turned(q, length + torch.arange(seqlen_q) * moving, angle, interleaved)
        k = turned(k, length + torch.arange(new), angle, interleaved)
    keys, values = keys.clone(), values.clone()
    if k is not None:
        keys[length : length + new], values[length : length + new] = k, v
    end = length + new
    out, lse, _ = plain(q[None], keys[None, pad:end], values[None, pad:end], **options)
    return out[0], lse[0], keys, values


PLACES = ["plain", "longer", "batch_idx", "paged", "leftpad"]

CALLS = [
    {"seqlen_q": 1, "new": None},
    {"seqlen_q": 5, "new": None, "causal": True, "softcap": 2.0},
    {"seqlen_q": 1, "new": 1, "causal": True, "rotary": 8, "interleaved": False},
    {"seqlen_q": 4, "new": 4, "rotary": 4, "interleaved": True},
    {"seqlen_q": 6, "new": 2, "causal": True, "window_size": (5, 3), "rotary": 8, "interleaved": True, "slopes": True},
    {"seqlen_q": 3, "new": 7, "window_size": (4, 2), "rotary": 6, "interleaved": False},
]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_the_documented_formula(call, place):
    """In float64, with NaN in every slot that holds no sequence."""
    call = dict(call)
    seqlen_q, new, rotary = call.pop("seqlen_q"), call.pop("new"), call.pop("rotary", 0)
    interleaved = call.pop("interleaved", True)
    batch, lengths, pads = 3, torch.tensor([7, 0, 29]), [0, 0, 0]
    if new is None:
        lengths = torch.tensor([7, 1, SLOTS])
    q = torch.randn(batch, seqlen_q, 4, 8, dtype=torch.float64)
    caches = torch.randn(2, batch, SLOTS, 2, 8, dtype=torch.float64)
    if place == "leftpad":
        pads = [2, 0, 11]
    for b in range(batch):
        caches[:, b, lengths[b] :] = caches[:, b, : pads[b]] = math.nan
    k, v = (None, None) if new is None else torch.randn(2, batch, new, 2, 8, dtype=torch.float64).unbind()
    angle = torch.rand(64, rotary // 2, dtype=torch.float64) * 7 if rotary else None
    slopes = torch.rand(batch, 4) if call.pop("slopes", False) else None

    named, order = {}, list(range(batch))
    storage = caches.clone()
    if place == "leftpad":
        named["cache_leftpad"] = torch.tensor(pads, dtype=torch.int32)
    elif place == "longer":
        storage = torch.cat([caches, caches[:, :1]], 1)
    elif place == "batch_idx":
        order = [4, 0, 2]
        storage = torch.full((2, 5, SLOTS, 2, 8), math.nan, dtype=torch.float64)
        storage[:, order] = caches
        named["cache_batch_idx"] = torch.tensor(order, dtype=torch.int32)
    elif place == "paged":  # 40 slots and 8 more in pages of 16, in any order
        table = torch.randperm(12)[:9].view(3, 3)
        storage = torch.full((2, 12, 16, 2, 8), math.nan, dtype=torch.float64)
        padded = torch.cat([caches, caches.new_full((2, batch, 8, 2, 8), math.nan)], 2)
        storage[:, table] = padded.unflatten(2, (3, 16))
        named["block_table"] = table.int()
        named["block_table"][1, 1:] = -7  # its sequence ends in its first page
    rotations = {} if angle is None else {"rotary_cos": angle.cos(), "rotary_sin": angle.sin()}
    out, lse = flash_attn_with_kvcache(
        q,
        *storage,
        k,
        v,
        cache_seqlens=lengths.int(),
        rotary_interleaved=interleaved,
        alibi_slopes=slopes,
        return_softmax_lse=True,
        **call,
        **rotations,
        **named,
    )
    after = storage[:, order] if place != "paged" else storage[:, table].flatten(2, 3)[:, :, :SLOTS]
    for b in range(batch):
        tokens = (None, None) if k is None else (k[b], v[b])
        own = {"alibi_slopes": None if slopes is None else slopes[b], **call}
        wanted = expected(q[b], *caches[:, b], *tokens, int(lengths[b]), pads[b], angle, interleaved, **own)
        got = out[b], lse[b], *after[:, b]
        assert_close(got, wanted, rtol=1e-11, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_decoding_equals_the_whole(dtype):
    """Token by token and in chunks, with an int as the length."""
    q, k, v = torch.randn(3, 2, 21, 4, 16, dtype=dtype).unbind()
    k, v = k[:, :, :2], v[:, :, :2]
    whole = flash_attn_func(q, k, v, causal=True, window_size=(9, 0))
    bound = 4 * torch.finfo(dtype).eps * whole.abs().max()
    k_cache, v_cache = torch.zeros(2, 2, 32, 2, 16, dtype=dtype).unbind()
    at, parts = 0, []
    for count in (10, 1, 1, 5, 4):
        tokens = slice(at, at + count)
        options = {"cache_seqlens": at, "causal": True, "window_size": (9, 0)}
        parts.append(flash_attn_with_kvcache(q[:, tokens], k_cache, v_cache, k[:, tokens], v[:, tokens], **options))
        at += count
    together = torch.cat(parts, 1)
    assert together.dtype == dtype
    assert (together - whole).abs().max() <= bound
    assert torch.equal(k_cache[:, :21], k)
    assert v_cache[:, 21:].count_nonzero() == 0
    again = flash_attn_with_kvcache(q, k_cache[:, :21], v_cache[:, :21], causal=True, window_size=(9, 0), num_splits=3)
    assert (again - whole).abs().max() <= bound


def test_a_cache_smaller_than_a_page():
    q, (k_cache, v_cache) = torch.randn(2, 1, 4, 8), torch.randn(2, 3, 5, 4, 8)
    index = torch.tensor([2, 2], dtype=torch.int32)
    out = flash_attn_with_kvcache(q, k_cache, v_cache, cache_batch_idx=index, cache_seqlens=3)
    assert_close(out, flash_attn_func(q, k_cache[[2, 2], :3], v_cache[[2, 2], :3]))


def test_no_gradient_is_recorded():
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    cache = torch.zeros(1, 9, 4, 8)
    k = torch.randn(1, 2, 4, 8, requires_grad=True)
    out = flash_attn_with_kvcache(q, cache, cache.clone(), k, k, cache_seqlens=0)
    assert not out.requires_grad
    assert not cache.requires_grad


def test_wrong_arguments_are_refused_and_leave_the_cache():
    q, k, v = torch.randn(3, 2, 3, 4, 16).unbind()
    k_cache, v_cache = torch.randn(2, 2, 20, 4, 16).unbind()
    before = k_cache.clone()
    two = torch.tensor([1, 0], dtype=torch.int32)
    angle = torch.rand(20, 8)

    def wrong(error, message, q=q, k=k, v=v, cache_seqlens=two, **options):
        with refused(error, message):
            flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=cache_seqlens, **options)
        assert torch.equal(k_cache, before)

    together = "k, v and cache_seqlens must be given together, got no "
    wrong(ValueError, together + "v", v=None)
    wrong(ValueError, together + "k", k=None)
    wrong(ValueError, together + "cache_seqlens", cache_seqlens=None)
    room = "each of cache_seqlens must be at least 0, and with 3 new positions at most the 20 of the cache, got "
    wrong(ValueError, room + "[18, 0]", cache_seqlens=torch.tensor([18, 0], dtype=torch.int32))
    wrong(RuntimeError, room + "[-1, 0]", cache_seqlens=two - 2 * two)
    wrong(ValueError, room + "[18, 18]", cache_seqlens=18)
    wrong(ValueError, "cache_seqlens must be at least 0, got -1", cache_seqlens=-1)
    wrong(TypeError, "cache_seqlens must be int32, got torch.int64", cache_seqlens=two.long())
    wrong(ValueError, "cache_seqlens must have shape (2,), got (1,)", cache_seqlens=two[:1])
    wrong(TypeError, "k must have the cache's dtype, torch.float32, got torch.float16", k=k.half())
    wrong(TypeError, "k_cache must have q's dtype, torch.float16, got torch.float32", q=q.half())
    wrong(ValueError, "v must have shape (batch, new, num_heads_kv, head_dim), for q", v=v[:, 1:])
    wrong(ValueError, "q, k_cache and v_cache must have shapes", q=q[:, :, :3])
    for length in (two, 3):  # of sequences of one length k is not written either
        wrong(NotImplementedError, "v must be a dense tensor", v=v.to_sparse(), cache_seqlens=length, causal=True)
    wrong(
        ValueError,
        "k_cache must have q's 3 sequences, got 2",
        *(torch.randn(3, 3, 3, 4, 16)),
        torch.zeros(3).int(),
    )
    wrong(TypeError, "num_splits must be int, got None", num_splits=None)

    index = "each of cache_batch_idx must be between 0 and 1, got 2 at 1"
    wrong(ValueError, index, cache_batch_idx=torch.tensor([0, 2], dtype=torch.int32))
    wrong(TypeError, "cache_batch_idx must be int32, got torch.int64", cache_batch_idx=two.long())
    rows = "rotary_cos, rotary_sin and k must be given together, got no "
    wrong(ValueError, rows + "rotary_sin", rotary_cos=angle)
    wrong(ValueError, rows + "k", k=None, v=None, rotary_cos=angle, rotary_sin=angle)
    dtype = "rotary_sin must have q's dtype, torch.float32, got torch.float64"
    wrong(TypeError, dtype, rotary_cos=angle, rotary_sin=angle.double())
    rows = "rotary_cos and rotary_sin must have at least the cache's 20 positions and at most head_dim / 2 = 8 "
    wrong(ValueError, rows + "columns, got (19, 8) and (19, 8)", rotary_cos=angle[1:], rotary_sin=angle[1:])
    wrong(
        ValueError,
        rows + "columns, got (20, 9) and (20, 9)",
        rotary_cos=torch.rand(20, 9),
        rotary_sin=torch.rand(20, 9),
    )

    table = torch.tensor([[0], [1]], dtype=torch.int32)
    wrong(
        NotImplementedError,
        "a block_table takes no cache_leftpad, got both",
        cache_leftpad=two,
        block_table=table,
    )
    wrong(NotImplementedError, "a block_table takes no cache_batch_idx", cache_batch_idx=two, block_table=table)
    wrong(RuntimeError, room.replace("of the cache", "that block_table lists"), cache_seqlens=18, block_table=table)
    wrong(ValueError, "block_table must hold pages from 0 to 1, got 2 at [1, 0]", block_table=table + 1)
    wrong(TypeError, "block_table must be int32, got torch.int64", block_table=table.long())
    pad = "each of cache_leftpad must be between 0 and its sequence's length, [4, 3], got [1, 4]"
    wrong(ValueError, pad, cache_leftpad=torch.tensor([1, 4], dtype=torch.int32))


@pytest.mark.parametrize(
    "named", [{}, {"causal": True}, {"causal": True, "softcap": 2.0, "window_size": (5, 0)}], ids=str
)
@pytest.mark.parametrize("new", [0, 1, 4])
@pytest.mark.parametrize("seqlen_q", [1, 4])
def test_lengths_that_agree_have_the_results_of_others(named, new, seqlen_q):
    """A padding of 0 takes them to the path of lengths that differ."""
    q = torch.randn(2, seqlen_q, 4, 8)
    caches = torch.randn(2, 3, SLOTS, 2, 8)
    tokens = torch.randn(2, 2, new, 2, 8).unbind() if new else ()
    results = []
    for lengths in (9, torch.full((2,), 9, dtype=torch.int32)):
        for padding in (None, torch.zeros(2, dtype=torch.int32)):
            stored = caches.clone()
            given = {"cache_seqlens": lengths, "cache_leftpad": padding, **named}
            pair = flash_attn_with_kvcache(q, *stored, *tokens, **given, return_softmax_lse=True)
            again = flash_attn_with_kvcache(q, *stored, **(given | {"cache_seqlens": 9 + new}))
            results.append((*pair, again, stored))
    for others in results[1:]:
        assert_close(others, results[0])
    assert (results[0][3] != caches).any() == bool(new)


@pytest.mark.parametrize("cache_seqlens", [3, torch.tensor([1, 0], dtype=torch.int32)], ids=["alike", "ragged"])
@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (TypeError, "causal must be bool, got 'yes'", {"causal": "yes"}),
        (ValueError, "softcap must be finite and at least 0, got -1.0", {"softcap": -1.0}),
        (TypeError, "softcap must be int or float, got False", {"softcap": False}),
        (TypeError, "softmax_scale must be int or float or NoneType, got 'x'", {"softmax_scale": "x"}),
        (ValueError, "softmax_scale must be finite, got inf", {"softmax_scale": math.inf}),
        (ValueError, "alibi_slopes must have shape (4) or (2, 4), got [3]", {"alibi_slopes": torch.ones(3)}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_that_attention_refuses_leave_the_cache(error, message, options, cache_seqlens):
    q, k, v = torch.randn(3, 2, 3, 4, 16).unbind()
    caches = torch.zeros(2, 2, 20, 4, 16)
    for place in ({}, {"block_table": torch.tensor([[0], [1]], dtype=torch.int32)}):
        with refused(error, message):
            flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=cache_seqlens, **options, **place)
        assert not caches.any()
