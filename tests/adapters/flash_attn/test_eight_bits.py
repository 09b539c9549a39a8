"""Promise: flash_attn_with_kvcache reads caches of 8 bits, with factors, as the numbers that they stand for."""

from typing import Any

import pytest
import torch
from support.assertions import Refusals, assert_close, each_refusal, refused
from torch import Tensor

from pyattn.adapters.flash_attn import flash_attn_with_kvcache

each_byte = pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn])
SLOTS, HEADS = 48, 2


def drawn(kv_dtype: torch.dtype, *shape: int) -> Tensor:
    x = torch.randn(shape)
    return (x * 30).round().clamp(-127, 127).to(kv_dtype) if kv_dtype == torch.int8 else x.to(kv_dtype)


def numbers(t: Tensor, factor: Tensor) -> Tensor:
    return t.float() * factor[:, None, :, None]


@each_byte
@pytest.mark.parametrize("new", [0, 1, 5])
@pytest.mark.parametrize("seqlen_q", [1, 5])
@pytest.mark.parametrize("layout", ["slots", "rows", "pages"])
def test_equals_a_cache_in_float32(isa: str, kv_dtype: torch.dtype, new: int, seqlen_q: int, layout: str) -> None:
    q, lengths = torch.randn(2, seqlen_q, 4, 32), torch.tensor([30, 17], dtype=torch.int32)
    k_cache, v_cache = (drawn(kv_dtype, 2, SLOTS, HEADS, n) for n in (32, 24))
    k, v = (drawn(kv_dtype, 2, new, HEADS, n) for n in (32, 24))
    of_k, of_v = torch.rand(2, HEADS) / 20, torch.rand(2, HEADS) / 20
    ours: dict[str, Any] = {"cache_seqlens": lengths, "causal": True, "return_softmax_lse": True}
    theirs = [numbers(t, f) for t, f in ((k_cache, of_k), (v_cache, of_v))]
    fresh = [numbers(t, f) for t, f in ((k, of_k), (v, of_v))] if new else [None, None]
    expected = flash_attn_with_kvcache(q, *theirs, *fresh, **ours)
    if layout == "rows":
        ours["cache_batch_idx"] = torch.tensor([1, 0], dtype=torch.int32)
        stored = [t.view(torch.int8).flip(0).view(kv_dtype) for t in (k_cache, v_cache)]
    elif layout == "pages":
        ours["block_table"] = torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.int32)
        stored = [t.reshape(6, 16, HEADS, -1) for t in (k_cache, v_cache)]
    else:
        stored = [k_cache, v_cache]
    found = flash_attn_with_kvcache(
        q, *stored, *((k, v) if new else (None, None)), **ours, k_descale=of_k, v_descale=of_v
    )
    most = 2e-4 if kv_dtype == torch.int8 else 1e-5  # int8: queries and weights are rounded to 16 bits
    assert_close(found[0], expected[0], most)
    assert_close(found[1], expected[1], most)


@each_byte
def test_without_factors_and_in_16_bits(kv_dtype: torch.dtype) -> None:
    q = torch.randn(2, 1, 4, 32).bfloat16()
    k_cache, v_cache = (drawn(kv_dtype, 2, SLOTS, HEADS, 32) for _ in range(2))
    found = flash_attn_with_kvcache(q, k_cache, v_cache, softmax_scale=0.01)
    expected = flash_attn_with_kvcache(q.float(), k_cache.float(), v_cache.float(), softmax_scale=0.01)
    assert found.dtype == torch.bfloat16
    assert_close(found.float(), expected, 0.02 * float(expected.abs().max()))


Q, K = torch.zeros(1, 1, 2, 16), torch.zeros(1, 8, 1, 16)
BYTES = K.to(torch.int8)
BAD: Refusals = [
    ({"k_descale": torch.ones(1, 1)}, TypeError, "k_descale must come with a cache of int8 or float8_e4m3fn, got "),
    (
        {"k_cache": BYTES, "v_cache": BYTES, "v_descale": torch.ones(1)},
        ValueError,
        "v_descale must be float32 of shape (1, 1), got torch.float32 and (1,)",
    ),
    ({"k_cache": BYTES}, TypeError, "k_cache must have q's dtype, torch.float32, got torch.int8"),
    (
        {"q": Q.double(), "k_cache": BYTES, "v_cache": BYTES},
        NotImplementedError,
        "a cache of 8 bits must be on the CPU, and q float32, bfloat16 or float16, got torch.float64 on cpu",
    ),
    (
        {"k_cache": BYTES, "v_cache": BYTES, "k": K[:, :1], "v": K[:, :1], "cache_seqlens": 2},
        TypeError,
        "k must have the cache's dtype, torch.int8, got torch.float32",
    ),
]


@each_refusal(BAD)
def test_wrong_calls(changes: Any, kind: type[Exception], message: str) -> None:
    with refused(kind, message):
        flash_attn_with_kvcache(**{"q": Q, "k_cache": K, "v_cache": K} | changes)
