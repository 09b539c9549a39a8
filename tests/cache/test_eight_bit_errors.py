"""Promise: a cache of 8 bits refuses what it cannot compute, names the values, and stays as it was."""

from typing import Any

import pytest
import torch
from support.assertions import Refusals, each_refusal, refused
from torch import Tensor

from pyattn import KVCache, attention_with_cache


def filled(**given: Any) -> KVCache:
    cache = KVCache(1, 1, 20, 16, kv_dtype=torch.int8, **given)
    cache.append(*torch.randn(2, 1, 1, 4, 16))
    return cache


Q, K = torch.zeros(1, 2, 1, 16), torch.zeros(1, 1, 1, 16)
BAD: Refusals = [
    (
        lambda: KVCache(1, 1, 8, 8, kv_dtype=torch.uint8),
        TypeError,
        "kv_dtype must be torch.int8, torch.float8_e4m3fn or",
    ),
    (
        lambda: KVCache(1, 1, 8, 8, dtype=torch.float64, kv_dtype=torch.int8),
        NotImplementedError,
        "a cache with kv_dtype=torch.int8 is computed in float32: dtype must be float32, bfloat16 or float16, got ",
    ),
    (
        lambda: filled().to(torch.float64),
        NotImplementedError,
        "a cache with kv_dtype=torch.int8 is computed in float32",
    ),
    (lambda: filled().append(K.double(), K.double()), TypeError, "k must have the cache's dtype torch.float32, got "),
    (lambda: filled().append(K[..., :8], K), ValueError, "k must have shape [1, 1, 1, 16], got [1, 1, 1, 8]"),
    (lambda: filled().append(K, K[:, :, :0]), ValueError, "v must have shape [1, 1, 1, 16], got [1, 1, 0, 16]"),
    (lambda: filled().append(*torch.zeros(2, 1, 1, 17, 16)), ValueError, "a sequence must not outgrow the cache's"),
    (lambda: filled(page_size=16).append(*torch.zeros(2, 1, 1, 17, 16)), ValueError, "a sequence must not outgrow the"),
    (lambda: filled().append(K), TypeError, "v must be Tensor, got None"),
    (lambda: attention_with_cache(Q.double(), filled()), TypeError, "q must have the cache's dtype, got torch.float64"),
    (lambda: attention_with_cache(Q[..., :8], filled()), ValueError, "q must have the cache's head_dim, got 8 and 16"),
    (lambda: attention_with_cache(Q[0], filled()), ValueError, "over a cache, q must have 4 dimensions (batch, "),
    (
        lambda: attention_with_cache(Q.clone().requires_grad_(), filled()),
        NotImplementedError,
        "a cache with kv_dtype=torch.int8 has no gradients: read it under torch.no_grad(), got q or a learned option",
    ),
    (
        lambda: attention_with_cache(Q, filled(), sinks=torch.zeros(2, requires_grad=True)),
        NotImplementedError,
        "a cache with kv_dtype=torch.int8 has no gradients",
    ),
    (
        lambda: torch.func.jvp(lambda q: attention_with_cache(q, filled()), (Q,), (Q,)),
        NotImplementedError,
        "a cache with kv_dtype=torch.int8 takes no transforms of torch.func",
    ),
    (
        lambda: attention_with_cache(Q, filled(), selected=torch.zeros(1, 1, 1, 2, dtype=torch.int64)),
        NotImplementedError,
        "a cache with kv_dtype=torch.int8 takes no selected, got one of shape (1, 1, 1, 2)",
    ),
]


@each_refusal(BAD)
def test_what_it_cannot_do(changes: Any, kind: type[Exception], message: str) -> None:
    with refused(kind, message):
        changes()


def test_a_refused_append_changes_nothing() -> None:
    for given in ({}, {"page_size": 16}):
        cache = filled(**given)
        before = [t.clone() for t in vars(cache).values() if isinstance(t, Tensor)]
        with pytest.raises(ValueError, match="must not outgrow"):
            cache.append(*torch.zeros(2, 1, 1, 30, 16))
        after = [t for t in vars(cache).values() if isinstance(t, Tensor)]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
