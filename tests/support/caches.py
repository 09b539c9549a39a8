"""The caches under test, and ways to fill them."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.cases import Case, assert_equal
from support.yardstick import assert_accurate, in_double
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet

from pyattn import KVCache, attention_with_cache, reference

OPTIONS: dict[str, Case] = {
    "plain": Case(2, 4, 2, 40, 40, 24, 20),
    "window": Case(2, 4, 2, 40, 40, 21, 21, window=(6, 0)),
    "scores": Case(2, 4, 1, 40, 40, 20, 24, softcap=3.0, alibi="bh", sinks=True, softmax_scale=0.3, relative="h 15"),
}
STEPS = (17, 1, 1, 6, 1, 9, 1, 1, 3)
"""New tokens per call: a prompt, single tokens, chunks; 40 in all."""

KINDS: dict[str, dict[str, Any]] = {"slots": {}, "ring": {"window": (3, 0)}, "pages": {"page_size": 16}}

each_kind = pytest.mark.parametrize("kind", KINDS)
each_option = pytest.mark.parametrize("name", OPTIONS)


def made(
    case: Case, dtype: torch.dtype, max_seqlen: int, window: tuple[int, int] | None = None, page_size: int | None = None
) -> KVCache:
    """A cache for the case, filled with NaN."""
    sizes = case.batch, case.num_heads_kv, max_seqlen, case.head_dim
    made = KVCache(*sizes, head_dim_v=case.head_dim_v, dtype=dtype, window=window, page_size=page_size)
    made.k.fill_(math.nan), made.v.fill_(math.nan)
    return made


def twins(case: Case, dtype: torch.dtype, max_seqlen: int, page_size: int) -> tuple[KVCache, KVCache]:
    """A cache with pages and one without, both filled with NaN."""
    return made(case, dtype, max_seqlen, page_size=page_size), made(case, dtype, max_seqlen)


def both(caches: tuple[KVCache, KVCache], q: Tensor, **options: Any) -> None:
    """Asserts that both give the same bits, out and lse."""
    assert_equal(*(attention_with_cache(q, cached, return_lse=True, **options) for cached in caches))


def on_gpu(operator: Any, *arguments: Any) -> Any:
    """Runs the operator as it runs on tensors of a GPU."""
    return operator.redispatch(DispatchKeySet(DispatchKey.CUDA), *arguments)


def in_steps(attend: Callable[..., Any], cached: KVCache, qkv: tuple[Tensor, ...], **options: Any) -> Tensor:
    """out of all queries, with the tokens arriving in STEPS, repeated as needed."""
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
    """Asserts that out agrees with attention over all tokens, by the accuracy rule."""
    plain = reference.attention(*qkv, **options)
    exact = reference.attention(*(t.double() for t in qkv), **in_double(options))
    assert_accurate("out", out, plain, exact)


def snapshot(cached: KVCache) -> list[Tensor]:
    tables = (cached.starts,) if cached.block_table is None else (cached.block_table,)
    return [t.clone() for t in (cached.k, cached.v, cached.lengths, *tables)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x, y in zip(a, b, strict=True))


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)
