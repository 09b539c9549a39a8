"""Promise: without a ring, results have the same bits as attention over the keys so far, where the test says so."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

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
