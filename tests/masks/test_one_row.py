"""Promise: key_ranges of one row serve every query, in whatever takes key_ranges, as the repeated row does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.modules import D_IN, cache_for, made
from torch import Tensor

from pyattn import KVCache, attention, attention_weights, attention_with_cache, parts
from pyattn.adapters import sdpa
from pyattn.masks import KeyRanges

ROWS, KEYS = 5, 9
RANGES = {
    "one interval": torch.tensor([[[2, 7]], [[0, 4]]]),
    "shared": torch.tensor([[[2, 7]]], dtype=torch.int32),
    "several": torch.tensor([[[[0, 2], [3, 7]]], [[[1, 1], [4, 9]]]]),
}


def filled() -> KVCache:
    cache = KVCache(2, 2, KEYS, 8, dtype=torch.float64)
    cache.append(*torch.randn(2, 2, 2, KEYS, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3)))
    return cache


def in_backward_of_parts(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    out, lse = attention(q, k, v, return_lse=True, **options)
    return parts.attention_backward(torch.ones_like(out), q, k, v, out, lse, **options)


def twice_derived(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    (dq,) = torch.autograd.grad(attention(q, k, v, **options).square().sum(), q, create_graph=True)
    return torch.autograd.grad(dq.square().sum(), (q, k, v))


def in_a_module(*_: Tensor, key_ranges: Tensor, **options: Any) -> Any:
    torch.manual_seed(1)
    module = made("MultiHeadAttention").double().eval()
    x = torch.randn(2, ROWS, D_IN, dtype=torch.float64)
    return module(x, key_ranges=key_ranges.clamp(max=ROWS), kv_cache=cache_for(module, 2, ROWS))


CALLS: dict[str, Callable[..., Any]] = {
    "attention": attention,
    "gradients": lambda *qkv, **options: torch.autograd.grad(attention(*qkv, **options).square().sum(), qkv),
    "second order": twice_derived,
    "forward mode": lambda *qkv, **options: torch.func.jvp(lambda *x: attention(*x, **options), qkv, qkv),
    "vmap": lambda *qkv, **options: torch.vmap(lambda *x: attention(*x, **options))(*(x[None] for x in qkv)),
    "compiled": lambda *qkv, **options: torch.compile(attention, backend="aot_eager", fullgraph=True)(*qkv, **options),
    "weights": lambda q, k, v, **options: attention_weights(q, k, rows=[3, 1], **options),
    "sums of weights": lambda q, k, v, **options: attention_weights(q, k, reduce="queries", **options),
    "parts": in_backward_of_parts,
    "cache": lambda q, k, v, **options: attention_with_cache(q, filled(), **options),
    "module with a cache": in_a_module,
    "sdpa": lambda q, k, v, key_ranges, causal: sdpa.scaled_dot_product_attention(
        q, k, v, KeyRanges(key_ranges, whole=not causal), is_causal=causal
    ),
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ranges", RANGES)
@pytest.mark.parametrize("call", CALLS)
def test_as_the_repeated_row(call: str, ranges: str, causal: bool) -> None:
    one = RANGES[ranges]
    if causal and call == "sdpa":
        one = one.clamp(max=ROWS)  # its causal mask counts from the first key
    q = torch.randn(2, 2, ROWS, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, 2, KEYS, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    found, expected = (CALLS[call](q, k, v, key_ranges=x, causal=causal) for x in (one, one.repeat_interleave(ROWS, 1)))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_no_query_and_no_row() -> None:
    assert attention(*torch.randn(3, 1, 1, 0, 4), key_ranges=torch.zeros(1, 1, 2, dtype=torch.int64)).shape[2] == 0
    with pytest.raises(
        ValueError, match=r"^pyattn: key_ranges must have shape \(1 or 1, 3 or 1, 2\).* got \[1, 0, 2\]$"
    ):
        attention(*torch.randn(3, 1, 1, 3, 4), key_ranges=torch.zeros(1, 0, 2, dtype=torch.int64))


def test_bounds_are_checked() -> None:
    with pytest.raises(ValueError, match=r"got \[2, 4\] for query 0 of sequence 0$"):
        attention(*torch.randn(3, 1, 1, 3, 4), key_ranges=torch.tensor([[[2, 4]]]))
