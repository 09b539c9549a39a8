"""Promise: without a ring, results have the same bits as attention over the keys so far, where the test says so."""

import random
import warnings
from typing import Any

import pytest
import torch
from support.cases import assert_equal
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from pyattn import KVCache, attention, attention_with_cache


def case(chance: random.Random) -> tuple[int, KVCache, Tensor, Tensor, Tensor, dict[str, Any], Tensor | None]:
    """The keys so far, a cache of them, q, k, v, options except a bias, and a bias for all slots or None."""
    dtype = chance.choice([torch.float32, torch.float64, torch.bfloat16])
    length, seqlen_q, slots = chance.randint(0, 70), chance.randint(1, 60), chance.randint(70, 150)
    heads, group = chance.choice([1, 2]), chance.choice([1, 2, 4])
    columns, columns_v = chance.choice([8, 24]), chance.choice([8, 20])
    page_size = chance.choice([None, 16])
    cached = KVCache(2, heads, slots, columns, head_dim_v=columns_v, dtype=dtype, page_size=page_size)
    k, v = torch.randn(2, heads, length, columns).to(dtype), torch.randn(2, heads, length, columns_v).to(dtype)
    cached.append(k, v)
    q = torch.randn(2, heads * group, seqlen_q, columns).to(dtype)
    options: dict[str, Any] = {"causal": chance.random() < 0.4}
    if chance.random() < 0.5:
        options["window"] = tuple(chance.choice([-1, chance.randint(0, 30)]) for _ in range(2))
    if chance.random() < 0.3:
        options["key_ranges"] = torch.randint(0, length + 1, (2, seqlen_q, 2)).sort(-1).values
    if chance.random() < 0.3:
        options["q_offset"] = chance.randint(-20, 80)
    if chance.random() < 0.3:
        options |= {"softcap": 3.0, "sinks": torch.randn(heads * group), "alibi_slopes": torch.rand(heads * group)}
    bias = torch.randn(seqlen_q, slots) if chance.random() < 0.2 else None
    return length, cached, q, k, v, options, bias


@pytest.mark.parametrize("seed", range(4))
def test_same_bits_as_attention_over_the_keys_so_far(seed):
    """Equal only up to rounding if queries lie before the first key, with a left bound and causal=False or q_offset.

    Mask formulas skip rows that see nothing one by one, key ranges skip them block by block.
    """
    chance = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(150):
        length, cached, q, k, v, options, bias = case(chance)
        here = {} if bias is None else {"bias": bias}
        there = {} if bias is None else {"bias": bias[:, :length]}
        ours = attention_with_cache(q, cached, return_lse=True, **options, **here)
        expected = attention(q, k, v, return_lse=True, **options, **there)
        ranges = not options["causal"] or "q_offset" in options
        before = options.get("q_offset", length - q.shape[2]) < 0
        if ranges and before and options.get("window", (-1, -1))[0] >= 0:
            some = 4 * torch.finfo(q.dtype).eps
            torch.testing.assert_close(ours, expected, rtol=some, atol=some)
        else:
            assert all(map(torch.equal, ours, expected)), (length, q.shape, options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_rows_written_one_by_one_are_those_of_one_append(dtype: torch.dtype) -> None:
    """Few rows are copied without torch's copy_, from tensors of any strides."""
    k, v = torch.randn(2, 60, 8, 64).to(dtype).transpose(1, 2), torch.randn(2, 8, 24, 60).to(dtype).transpose(2, 3)
    caches = [KVCache(2, 8, 60, 64, head_dim_v=24, dtype=dtype) for _ in range(2)]
    caches[0].append(k, v)
    for i in range(60):
        caches[1].append(k[:, :, i : i + 1], v[:, :, i : i + 1])
    for cached in caches:
        assert torch.equal(cached.k, k)
        assert torch.equal(cached.v, v)


def test_an_inference_tensor_is_not_written_outside_of_inference_mode() -> None:
    """However few rows: torch refuses it too."""
    with torch.inference_mode():
        storage = torch.zeros(1, 1, 4, 8)
    lengths, row = torch.zeros(1, dtype=torch.int64), torch.ones(1, 1, 1, 8)
    with pytest.raises(RuntimeError, match="inference tensor"):
        torch.ops.pyattn.cache_append(storage, storage, lengths, lengths.clone(), row, row, None, 4)


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lengths", [[70, 70], [70, 40], [1, 1], [0, 0]])
def test_lengths_that_agree_have_the_bits_of_others(lengths, dtype, page_size):
    """They reach the kernels as one number."""
    cache = KVCache(2, 2, 90, 24, dtype=dtype, page_size=page_size)
    k, v = torch.randn(2, 2, 2, 70, 24).to(dtype)
    cache.append(k, v)
    cache.truncate(lengths)
    for seqlen_q in (1, 2, 33):
        q = torch.randn(2, 4, seqlen_q, 24).to(dtype)
        expected = attention_with_cache(q, cache, q_offset=cache.lengths - seqlen_q, return_lse=True)
        assert_equal(attention_with_cache(q, cache, return_lse=True), expected)
        assert_equal([attention_with_cache(q, cache)], expected[:1])


def test_graphs_hold_no_length():
    cache = KVCache(1, 2, 20, 8)
    cache.append(*torch.randn(2, 1, 2, 5, 8))
    q = torch.randn(1, 2, 1, 8)
    graph = make_fx(lambda q: attention_with_cache(q, cache))(q)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates it
        traced = torch.jit.trace(lambda q: attention_with_cache(q, cache), q)
    assert "pyattn::cache_newest" in str(traced.graph)  # which reads the lengths, of a copy of the cache
    cache.append(*torch.randn(2, 1, 2, 3, 8))
    assert_equal([graph(q)], [attention_with_cache(q, cache)])
