"""Promise: FlashAttention 3's functions over batches and packed sequences compute its formulas, with gradients."""

import inspect
import math

import pytest
import torch
from support.adapters.hopper import batched, plain
from support.assertions import refused
from torch.testing import assert_close

from pyattn.adapters.flash_attn.hopper import flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func

OPTIONS = [
    {},
    {"causal": True},
    {"window_size": (3, 1)},
    {"window_size": (2, -1), "causal": True, "softcap": 1.5},
    {"attention_chunk": 4},
    {"attention_chunk": 3, "causal": True, "softcap": 2.0},
    {"attention_chunk": 5, "window_size": (2, 3)},
    {"attention_chunk": 2**62, "causal": True},
    {"qv": True, "causal": True},
    {"qv": True, "attention_chunk": 4, "window_size": (4, 0)},
]
SHAPES = [(7, 7), (3, 11), (11, 3), (1, 6)]


def drawn(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def gradients(results, leaves):
    """Gradients of a sum over finite results, each with its own random weights."""
    torch.manual_seed(5)
    total = sum((torch.randn_like(x) * x.masked_fill(x.isinf(), 0)).sum() for x in results)
    return torch.autograd.grad(total, leaves)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_batch(options, shape):
    """Out, lse and all gradients, that of qv included; 9 value columns, grouped heads."""
    options = dict(options)
    q, k, v = drawn(2, shape[0], 4, 8), drawn(2, shape[1], 2, 8), drawn(2, shape[1], 2, 9)
    qv = drawn(2, shape[0], 4, 9) if options.pop("qv", False) else None
    leaves = [q, k, v] if qv is None else [q, k, v, qv]
    found = flash_attn_func(q, k, v, qv=qv, return_attn_probs=True, **options)
    expected = batched(q, k, v, qv, **options)
    assert_close(found, expected)
    assert_close(gradients(found, leaves), gradients(expected, leaves))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("used", ["all", "keys", "queries", "both"])
@pytest.mark.parametrize("pack", ["both", "queries", "keys"])
def test_packed_sequences(options, used, pack):
    """Each uses a part; the others' NaN does not matter. ``pack``: what is packed, the rest is a batch."""
    options = dict(options)
    lengths_q, lengths_k = (5, 0, 9, 4) if pack != "keys" else (6,) * 4, (7, 6, 3, 0) if pack != "queries" else (8,) * 4
    used_q = [max(0, n - b) for b, n in enumerate(lengths_q)] if used in ("queries", "both") else list(lengths_q)
    used_k = [max(0, n - 2 + b) if b < 2 else n for b, n in enumerate(lengths_k)]
    used_k = used_k if used in ("keys", "both") else list(lengths_k)
    q, k, v = drawn(sum(lengths_q), 4, 8), drawn(sum(lengths_k), 2, 8), drawn(sum(lengths_k), 2, 9)
    qv = drawn(sum(lengths_q), 4, 9) if options.pop("qv", False) else None
    leaves = [q, k, v] if qv is None else [q, k, v, qv]
    named, inputs = dict(options), [q, k, v, qv]
    for name, counts, whole, last in (
        ("q", used_q, lengths_q, max(lengths_q)),
        ("k", used_k, lengths_k, max(lengths_k)),
    ):
        packed = pack == "both" or (pack == "queries") == (name == "q")
        ends = torch.tensor([0, *whole]).cumsum(0).int()
        named[f"cu_seqlens_{name}"] = ends if packed else None
        named[f"max_seqlen_{name}"] = last if packed else None
        if counts != list(whole):
            named[f"seqused_{name}"] = torch.tensor(counts, dtype=torch.int32)
        for at in ((0, 3), (1, 2))[name == "k"]:
            if not packed and inputs[at] is not None:
                inputs[at] = inputs[at].unflatten(0, (4, -1))
    out, lse = flash_attn_varlen_func(*inputs[:3], qv=inputs[3], return_attn_probs=True, **named)
    if pack == "keys":
        assert out.shape == (4, 6, 4, 9)
        assert lse.shape == (4, 4, 6)
        out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    outs, lses, i, j = [], [], 0, 0
    for nq, nk, uq, uk in zip(lengths_q, lengths_k, used_q, used_k, strict=True):
        of_b = q[i : i + uq], k[j : j + uk], v[j : j + uk], None if qv is None else qv[i : i + uq]
        one, of_one = plain(*of_b, **options)
        outs += [one, one.new_zeros(nq - uq, 4, 9)]
        lses += [of_one, of_one.new_full((4, nq - uq), -math.inf)]
        i, j = i + nq, j + nk
    expected = torch.cat(outs), torch.cat(lses, 1)
    assert_close((out, lse), expected)
    assert_close(gradients((out, lse), leaves), gradients(expected, leaves))


def test_packed_heads():
    q, k, v = drawn(2, 6, 4, 8), drawn(2, 6, 2, 8), drawn(2, 6, 2, 8)
    expected = flash_attn_func(q, k, v, causal=True, attention_chunk=4)
    assert_close(
        flash_attn_qkvpacked_func(torch.cat([q, k, v], 2), causal=True, attention_chunk=4, num_heads_q=4), expected
    )
    qkv = drawn(2, 6, 3, 4, 8)
    result = flash_attn_qkvpacked_func(qkv, window_size=(2, 0), return_attn_probs=True)
    assert_close(result, flash_attn_func(*qkv.unbind(2), window_size=(2, 0), return_attn_probs=True))


@pytest.mark.parametrize("packed", [False, True])
def test_float8(packed):
    """Scores and values have their factors, in float32; out is bfloat16, whose rounding is the only error."""
    q, k, v = (torch.randn(2, 5, heads, 16).to(torch.float8_e4m3fn) for heads in (4, 2, 2))
    descales = dict(zip(("q_descale", "k_descale", "v_descale"), torch.rand(3, 2, 2) + 0.5, strict=True))
    of_q, of_k, of_v = (x[:, None, :, None].double() for x in descales.values())
    expected, lse = batched(
        q.double() * of_q.repeat_interleave(2, 2), k.double() * of_k, v.double() * of_v, causal=True, softcap=3.0
    )
    if packed:
        ends = torch.tensor([0, 5, 10], dtype=torch.int32)
        tokens = (t.flatten(0, 1) for t in (q, k, v))
        out, of_out = flash_attn_varlen_func(
            *tokens, ends, ends, 5, 5, causal=True, softcap=3.0, return_attn_probs=True, **descales
        )
        out, of_out = out.unflatten(0, (2, 5)), of_out.unflatten(1, (2, 5)).transpose(0, 1)
    else:
        out, of_out = flash_attn_func(q, k, v, causal=True, softcap=3.0, return_attn_probs=True, **descales)
    assert out.dtype == torch.bfloat16
    assert_close(out.double(), expected, rtol=2**-8, atol=1e-6)
    assert_close(of_out.double(), lse, rtol=1e-5, atol=1e-5)


def test_hints_change_nothing():
    q, k, v = torch.randn(3, 1, 6, 2, 8).unbind()
    expected = flash_attn_func(q, k, v, causal=True)
    for hints in ({"num_splits": 0}, {"num_splits": 4, "pack_gqa": True}, {"sm_margin": 8, "deterministic": True}):
        assert torch.equal(flash_attn_func(q, k, v, causal=True, **hints), expected)
    ones = torch.ones(1, 2)
    assert torch.equal(flash_attn_func(q, k, v, causal=True, q_descale=ones, k_descale=ones, v_descale=ones), expected)


SIGNATURES = {
    flash_attn_func: "q k v softmax_scale causal qv q_descale k_descale v_descale window_size attention_chunk softcap "
    "num_splits pack_gqa deterministic sm_margin return_attn_probs",
    flash_attn_varlen_func: "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q seqused_k "
    "softmax_scale causal qv q_descale k_descale v_descale window_size attention_chunk softcap num_splits pack_gqa "
    "deterministic sm_margin return_attn_probs",
    flash_attn_qkvpacked_func: "qkv softmax_scale causal q_descale k_descale v_descale window_size attention_chunk "
    "softcap deterministic num_heads_q sm_margin return_attn_probs",
}


@pytest.mark.parametrize("function", SIGNATURES)
def test_signatures(function):
    """The order of flash-attention's hopper/flash_attn_interface.py, of August 2026."""
    assert " ".join(inspect.signature(function).parameters) == SIGNATURES[function]


def call(**changed):
    q, k, v = torch.zeros(3, 2, 4, 2, 8).unbind()
    return flash_attn_func(**{"q": q, "k": k, "v": v} | changed)


FLOAT8 = torch.zeros(2, 4, 2, 8).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"attention_chunk": -1}, ValueError, "attention_chunk must be at least 0, got -1"),
        ({"attention_chunk": 2.0}, TypeError, "attention_chunk must be int, got 2.0"),
        ({"num_splits": 1.5}, TypeError, "num_splits must be int, got 1.5"),
        ({"sm_margin": -1}, ValueError, "sm_margin must be at least 0, got -1"),
        ({"pack_gqa": 1}, TypeError, "pack_gqa must be bool, got 1"),
        ({"return_attn_probs": 1}, TypeError, "return_attn_probs must be bool, got 1"),
        (
            {"qv": torch.zeros(2, 4, 2, 7)},
            ValueError,
            "qv must have shape (2, 4, 2, 8), q's and v's head_dim, got (2, 4, 2, 7)",
        ),
        ({"qv": torch.zeros(2, 4, 2, 8).half()}, TypeError, "qv must have q's dtype, torch.float32, got torch.float16"),
        (
            {"q_descale": torch.full((2, 2), 2.0)},
            ValueError,
            "q_descale other than 1 needs q, k and v in torch.float8_e4m3fn, got [2.0, 2.0, 2.0, 2.0] and",
        ),
        (
            {"k_descale": torch.ones(2, 3)},
            ValueError,
            "k_descale must have shape (batch, num_heads_kv), (2, 2), got (2, 3)",
        ),
        ({"v_descale": torch.ones(2, 2).double()}, TypeError, "v_descale must be float32, got torch.float64"),
        ({"q": FLOAT8}, TypeError, "k must have q's dtype, torch.float8_e4m3fn, got torch.float32"),
        (
            {"q": FLOAT8, "k": FLOAT8, "v": FLOAT8, "qv": FLOAT8},
            NotImplementedError,
            "qv must be float16, bfloat16, float32 or float64, got q in torch.float8_e4m3fn",
        ),
        ({"softcap": -1.0}, ValueError, "softcap must be finite and at least 0, got -1.0"),
    ],
)
def test_refusals(arguments, error, message):
    with refused(error, message):
        call(**arguments)


def test_refusals_of_packed_sequences():
    x, ends = torch.zeros(6, 2, 8), torch.tensor([0, 2, 6], dtype=torch.int32)
    with refused(ValueError, "each of seqused_q must be between 0 and its sequence's room, [2, 4], got [3, 1]"):
        flash_attn_varlen_func(x, x, x, ends, ends, 4, 4, seqused_q=torch.tensor([3, 1], dtype=torch.int32))
    with refused(TypeError, "seqused_k must be int32, got torch.int64"):
        flash_attn_varlen_func(x, x, x, ends, ends, 4, 4, seqused_k=torch.tensor([2, 1]))
    with refused(
        ValueError, "q without cu_seqlens_q must have shape (batch, seqlen, num_heads, head_dim), got (6, 2, 8)"
    ):
        flash_attn_varlen_func(x, x, x, None, ends, None, 4)
    with refused(TypeError, "max_seqlen_q must be int, got None"):
        flash_attn_varlen_func(x, x, x, ends, ends, None, 4)
    qkv = torch.zeros(2, 4, 5, 8)
    with refused(
        ValueError,
        "qkv must have shape (batch, seqlen, 3, num_heads, head_dim), or (batch, seqlen, "
        "num_heads_q + 2 * num_heads_k, head_dim) with num_heads_q, got (2, 4, 5, 8) and num_heads_q=2",
    ):
        flash_attn_qkvpacked_func(qkv, num_heads_q=2)
