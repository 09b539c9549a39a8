"""Promise: FlashAttention 3's cache call attends over the caller's cache, with packed queries and tokens too."""

import inspect
import math
from typing import Any

import pytest
import torch
from support.adapters.flash_attn import turned
from support.adapters.hopper import plain
from support.assertions import refused
from torch.testing import assert_close

from pyattn.adapters.flash_attn.hopper import flash_attn_with_kvcache, get_scheduler_metadata

SLOTS = 40
BATCH = 3

CALLS: list[dict[str, Any]] = [
    {"queries": [1, 1, 1], "new": None},
    {"queries": [4, 4, 4], "new": None, "causal": True, "softcap": 2.0, "qv": True},
    {"queries": [2, 2, 2], "new": [2, 2, 2], "causal": True, "attention_chunk": 4},
    {"queries": [3, 1, 5], "new": None, "causal": True},
    {"queries": [3, 0, 5], "new": [3, 0, 5], "causal": True, "rotary": 8, "interleaved": False},
    {"queries": [2, 6, 1], "new": [4, 7, 0], "window_size": (5, 2), "rotary": 4, "seqlens_rotary": True},
    {"queries": [3, 3, 3], "new": [1, 4, 2], "rotary": 6},
    {"queries": [2, 6, 1], "new": [4, 7, 0], "attention_chunk": 5, "qv": True, "rotary": 8},
]
PLACES = ["plain", "longer", "batch_idx", "pages_16", "pages_4", "pages_1", "leftpad", "leftpad_in_pages"]


def packed(sequences):
    return torch.cat(sequences), torch.tensor([0, *(len(s) for s in sequences)]).cumsum(0).int()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_the_documented_formula(call, place):
    """In float64, with NaN in every slot that holds no sequence; the cache is written in place and nowhere else."""
    call = dict(call)
    counts, new, rotary = call.pop("queries"), call.pop("new"), call.pop("rotary", 0)
    interleaved, moved = call.pop("interleaved", True), call.pop("seqlens_rotary", False)
    lengths = [7, 6, 29]
    pads = [2, 0, 11] if "leftpad" in place else [0, 0, 0]
    q = [torch.randn(n, 4, 8, dtype=torch.float64) for n in counts]
    qv = [torch.randn(n, 4, 6, dtype=torch.float64) for n in counts] if call.pop("qv", False) else None
    caches = torch.randn(BATCH, SLOTS, 2, 8, dtype=torch.float64), torch.randn(BATCH, SLOTS, 2, 6, dtype=torch.float64)
    for b in range(BATCH):
        for store in caches:
            store[b, lengths[b] :] = store[b, : pads[b]] = math.nan
    fresh = [[torch.randn(n, 2, d, dtype=torch.float64) for n in new or []] for d in (8, 6)]
    angle = torch.rand(64, rotary // 2, dtype=torch.float64) * 7 if rotary else None

    starts = [3, 9, 1] if moved else lengths
    outs, lses, written = [], [], [store.clone() for store in caches]
    for b in range(BATCH):
        of_q, end = q[b], lengths[b] + (new[b] if new else 0)
        if new:
            of_k = fresh[0][b]
            if angle is not None and counts[b]:
                moving = call.get("causal") or "window_size" in call or "attention_chunk" in call
                of_q = turned(of_q, starts[b] + torch.arange(counts[b]) * bool(moving), angle, interleaved)
                of_k = turned(of_k, starts[b] + torch.arange(new[b]), angle, interleaved)
            written[0][b, lengths[b] : end], written[1][b, lengths[b] : end] = of_k, fresh[1][b]
        keys, values = (store[b, pads[b] : end] for store in written)
        out, lse = plain(of_q, keys, values, None if qv is None else qv[b], **call)
        outs.append(out)
        lses.append(lse)

    named: dict[str, Any] = {"cache_seqlens": torch.tensor(lengths, dtype=torch.int32)}
    ragged = len(set(counts)) > 1
    if ragged:
        queries, named["cu_seqlens_q"] = packed(q)
        named["max_seqlen_q"] = max(counts)
        named["qv"] = None if qv is None else packed(qv)[0]
    else:
        queries, named["qv"] = torch.stack(q), None if qv is None else torch.stack(qv)
    tokens: list[Any] = [None, None]
    if new and len(set(new)) > 1:
        tokens = [packed(fresh[0])[0], packed(fresh[1])[0]]
        named["cu_seqlens_k_new"] = packed(fresh[0])[1]
    elif new:
        tokens = [torch.stack(sequences) for sequences in fresh]
    if angle is not None:
        named |= {"rotary_cos": angle.cos(), "rotary_sin": angle.sin(), "rotary_interleaved": interleaved}
    if moved:
        named["rotary_seqlens"] = torch.tensor(starts, dtype=torch.int32)
    if "leftpad" in place:
        named["cache_leftpad"] = torch.tensor(pads, dtype=torch.int32)

    storage, order = [store.clone() for store in caches], list(range(BATCH))
    page = {"pages_16": 16, "pages_4": 4, "pages_1": 1, "leftpad_in_pages": 8}.get(place, 0)
    if place == "longer":
        storage = [torch.cat([store, store[:1]]) for store in caches]
    elif place == "batch_idx":
        order = [4, 0, 2]
        storage = [store.new_full((5, *store.shape[1:]), math.nan) for store in caches]
        for whole, store in zip(storage, caches, strict=True):
            whole[order] = store
        named["cache_batch_idx"] = torch.tensor(order, dtype=torch.int32)
    elif page:
        count = -(-SLOTS // page)
        table = torch.randperm(BATCH * count + 3)[: BATCH * count].view(BATCH, count)
        storage = [store.new_full((BATCH * count + 3, page, *store.shape[2:]), math.nan) for store in caches]
        for whole, store in zip(storage, caches, strict=True):
            more = store.new_full((BATCH, count * page - SLOTS, *store.shape[2:]), math.nan)
            whole[table] = torch.cat([store, more], 1).unflatten(1, (count, page))
        named["page_table"] = table.int()
        reached = -(-(lengths[1] + (new[1] if new else 0)) // page)
        named["page_table"][1, reached:] = -7  # not read
    out, lse, *rest = flash_attn_with_kvcache(queries, *storage, *tokens, return_softmax_lse=True, **named, **call)
    assert [x.numel() for x in rest] == [0, 0]
    if ragged:
        assert_close((out, lse), (torch.cat(outs), torch.cat(lses, 1)))
    else:
        assert_close((out, lse), (torch.stack(outs), torch.stack(lses)))
    for whole, store in zip(storage, written, strict=True):
        if page:
            whole = torch.stack([whole[table[b]].flatten(0, 1)[:SLOTS] for b in range(BATCH)])
        assert_close(whole[order] if not page else whole, store, equal_nan=True)


def test_float8():
    q, k, v = (torch.randn(2, 3, heads, 16).to(torch.float8_e4m3fn) for heads in (4, 2, 2))
    caches = [torch.randn(2, 9, 2, 16).to(torch.float8_e4m3fn) for _ in range(2)]
    descales = dict(zip(("q_descale", "k_descale", "v_descale"), torch.rand(3, 2, 2) + 0.5, strict=True))
    keys, values = (torch.cat([store[:, :4].float(), t.float()], 1) for store, t in zip(caches, (k, v), strict=True))
    of_q, of_k, of_v = descales.values()
    expected = [
        plain(
            q[b].double() * of_q[b].repeat_interleave(2)[:, None],
            keys[b].double() * of_k[b][:, None],
            values[b].double() * of_v[b][:, None],
            causal=True,
        )[0]
        for b in range(2)
    ]
    out = flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=4, causal=True, **descales)
    assert out.dtype == torch.bfloat16
    assert_close(out.double(), torch.stack(expected), rtol=2**-8, atol=1e-6)
    assert_close(caches[0][:, 4:7].float(), k.float())


def test_the_scheduler_metadata_has_no_effect():
    q, caches = torch.randn(2, 1, 4, 8), torch.randn(2, 2, 20, 2, 8)
    lengths = torch.tensor([3, 20], dtype=torch.int32)
    plan = get_scheduler_metadata(2, 1, 20, 4, 2, 8, lengths, causal=True, num_splits=3)
    assert plan.dtype == torch.int32
    expected = flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths, causal=True)
    hints = {"scheduler_metadata": plan, "num_splits": 3, "pack_gqa": True, "sm_margin": 2}
    assert torch.equal(flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths, causal=True, **hints), expected)


def test_signature():
    """The order of flash-attention's hopper/flash_attn_interface.py, of August 2026."""
    expected = "q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad page_table "
    expected += "cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens q_descale k_descale v_descale softmax_scale "
    expected += "causal window_size attention_chunk softcap rotary_interleaved scheduler_metadata num_splits pack_gqa "
    assert " ".join(inspect.signature(flash_attn_with_kvcache).parameters) == expected + "sm_margin return_softmax_lse"


INT = torch.int32


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"cache_seqlens": 20},
            ValueError,
            "each of cache_seqlens, and the new positions, must be at most the 20 of the",
        ),
        (
            {"cache_seqlens": torch.tensor([3, 25], dtype=INT)},
            ValueError,
            "each of cache_seqlens must be between 0 and its",
        ),
        ({"cache_seqlens": torch.tensor([3, 5])}, TypeError, "cache_seqlens must be int32, got torch.int64"),
        ({"cache_seqlens": None}, ValueError, "k, v and cache_seqlens must be given together, got no cache_seqlens"),
        ({"v": None}, ValueError, "k, v and cache_seqlens must be given together, got no v"),
        (
            {"k": torch.zeros(2, 1, 3, 8)},
            ValueError,
            "k must have q's 2 sequences, k's tokens, and heads as a cache (2, 20",
        ),
        (
            {"v": torch.zeros(2, 1, 2, 8).half()},
            TypeError,
            "v must have the cache's dtype, torch.float32, got torch.float16",
        ),
        (
            {"cache_leftpad": torch.tensor([4, 0], dtype=INT)},
            ValueError,
            "each of cache_leftpad must be between 0 and its",
        ),
        (
            {"cu_seqlens_q": torch.tensor([0, 1], dtype=INT)},
            ValueError,
            "q with cu_seqlens must have shape (total, num_he",
        ),
        (
            {"rotary_cos": torch.zeros(20, 4)},
            ValueError,
            "rotary_cos, rotary_sin and k must be given together, got no rotary_s",
        ),
        (
            {"page_table": torch.tensor([[0], [2]], dtype=INT)},
            ValueError,
            "each of page_table must be between 0 and 1, got 2 at 1",
        ),
        (
            {"page_table": torch.zeros(2, 1, dtype=INT), "cache_batch_idx": torch.zeros(2, dtype=INT)},
            NotImplementedError,
            "a page_table takes no cache_batch_idx, got both",
        ),
        ({"scheduler_metadata": torch.zeros(1)}, TypeError, "scheduler_metadata must be int32, got torch.float32"),
        (
            {"q_descale": torch.full((2, 2), 2.0)},
            ValueError,
            "q_descale other than 1 needs q, k and v in torch.float8_e4m3fn",
        ),
        ({"softcap": -1.0}, ValueError, "softcap must be finite and at least 0, got -1"),
        ({"softmax_scale": math.inf}, ValueError, "softmax_scale must be finite, got inf"),
        ({"causal": "yes"}, TypeError, "causal must be bool, got 'yes'"),
        (
            {"q": torch.zeros(4, 4, 8), "cu_seqlens_q": torch.tensor([0, 3, 4], dtype=INT), "max_seqlen_q": 2},
            ValueError,
            "max_seqlen_q must be at least",
        ),
    ],
)
def test_refusals_leave_the_cache_as_it_was(arguments, error, message):
    q, caches = torch.zeros(2, 1, 4, 8), torch.randn(2, 2, 20, 2, 8)
    k, v = torch.ones(2, 2, 1, 2, 8).unbind()
    before = caches.clone()
    with refused(error, message):
        flash_attn_with_kvcache(
            **{"q": q, "k_cache": caches[0], "v_cache": caches[1], "k": k, "v": v, "cache_seqlens": 3} | arguments
        )
    assert torch.equal(caches, before)
