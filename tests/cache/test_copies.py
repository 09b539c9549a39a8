"""Promise: a copy of a cache is independent, and truncation leaves what fewer appends would have left."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.assertions import refused
from support.caches import made, on_gpu, same, snapshot
from support.cases import Case, assert_equal
from torch import Tensor

from pyattn import KVCache, attention_with_cache, ops
from pyattn.cache.storage import over

CASE = Case(3, 4, 2, 60, 60, 8, 6)
KINDS: dict[str, dict[str, Any]] = {"contiguous": {}, "ring": {"window": (4, 0)}, "pages": {"page_size": 16}}

each_kind = pytest.mark.parametrize("kind", KINDS)


def filled(kind: str, counts: list[int] | None = None) -> tuple[KVCache, tuple[Tensor, ...]]:
    """A cache of 20 tokens, some variants with more, its pages shared; and all tokens."""
    torch.manual_seed(3)
    q, k, v = CASE.inputs(torch.float32)
    cached = made(CASE, torch.float32, 24 if kind == "ring" else 40, **KINDS[kind])
    cached.append(k[:, :, :18], v[:, :, :18])
    cached.reorder([1, 1, 0])
    cached.append(k[:, :, 18:22], v[:, :, 18:22], counts)
    return cached, (q, k, v)


def saved(cached: KVCache) -> KVCache:
    file = io.BytesIO()
    torch.save(cached, file)
    file.seek(0)
    return torch.load(file)


COPIES: dict[str, Callable[[KVCache], KVCache]] = {
    "clone": KVCache.clone,
    "deepcopy": copy.deepcopy,
    "pickle": lambda cached: pickle.loads(pickle.dumps(cached)),
    "save": saved,
    "to": lambda cached: cached.to(torch.float64).to("cpu", torch.float32),
}


@each_kind
@pytest.mark.parametrize("name", COPIES)
def test_copies_go_on_by_themselves(kind, name):
    """A copy continues as the cache would, last append, shared pages and slots included; neither affects the other."""
    cached, (q, k, v) = filled(kind, [4, 0, 3])
    with torch.inference_mode():
        twin = COPIES[name](cached)
    assert same(snapshot(twin), snapshot(cached))
    assert twin.window == cached.window
    queries = q[:, :, 18:22]
    assert torch.equal(attention_with_cache(queries, twin), attention_with_cache(queries, cached))
    before = snapshot(cached)
    for t in range(22, 36):
        twin.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
    assert same(snapshot(cached), before)
    for t in range(22, 36):
        cached.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
    one = q[:, :, :1].clone().requires_grad_()
    assert torch.equal(attention_with_cache(one, twin), attention_with_cache(one, cached))
    assert twin.k.stride() == cached.k.stride()


@pytest.mark.parametrize("kind", ["contiguous", "pages"])
def test_a_cache_over_tensors_of_others_is_whole(kind):
    """It has every attribute of a cache, and what reads or writes those works."""
    cached, (q, k, v) = filled(kind)
    twin = cached.clone()
    made = over(KVCache, twin.k, twin.v, twin.lengths, twin.block_table, twin.max_seqlen)
    assert vars(made).keys() == vars(cached).keys()
    assert made.last_append is None
    for one in (cached, made):
        one.append(k[:, :, 22:25], v[:, :, 22:25], [3, 0, 2])
        one.reorder([2, 0, 0])
    assert same(snapshot(made.clone()), snapshot(cached))
    assert torch.equal(attention_with_cache(q[:, :, 22:25], made), attention_with_cache(q[:, :, 22:25], cached))


@each_kind
def test_to(kind):
    cached, (q, _, _) = filled(kind)
    assert cached.to() is cached.to("cpu") is cached.to(torch.float32) is cached
    assert cached.to(torch.device("cpu"), torch.float32) is cached
    double = cached.to(dtype=torch.float64)
    expected = attention_with_cache(q[:, :, :2], cached)
    out = attention_with_cache(q[:, :, :2].double(), double)
    assert out.dtype == torch.float64
    torch.testing.assert_close(out.float(), expected)
    there = cached.to("meta", torch.bfloat16)
    assert there.k.is_meta
    assert there.lengths.is_meta
    assert attention_with_cache(q[:, :, :2].bfloat16().to("meta"), there).shape == (3, 4, 2, 6)
    for wrong in ({"dtype": torch.int64}, {"device": 0.5}, {"device": torch.int32}):
        with pytest.raises(TypeError, match=r"^pyattn: (dtype|device) must be .*, got"):
            cached.to(**wrong)


def test_autocast_takes_a_cache_of_another_dtype():
    cached, (q, _, _) = filled("contiguous")
    with torch.autocast("cpu", torch.bfloat16):
        assert attention_with_cache(q[:, :, :1].bfloat16(), cached).dtype == torch.bfloat16


@each_kind
@pytest.mark.parametrize("kept", [20, [21, 20, 22], torch.tensor([20, 22, 19], dtype=torch.int32)], ids=str)
def test_truncation_equals_fewer_appends(kind, kept):
    cached, (q, k, v) = filled(kind)
    cached.truncate(kept)
    lengths = torch.as_tensor(kept).expand(3)
    assert cached.lengths.tolist() == lengths.tolist()
    expected, _ = filled(kind, (lengths - 18).tolist())
    assert_equal(*([attention_with_cache(q[:, :, :1], c), c.lengths] for c in (cached, expected)))
    for one in (cached, expected):
        one.append(k[:, :, 40:43], v[:, :, 40:43])
    queries = q[:, :, 40:43]
    assert torch.equal(attention_with_cache(queries, cached), attention_with_cache(queries, expected))


def long_ring() -> KVCache:
    """30 tokens in a ring of 10 with a window of 4, which keeps the positions from 20 on."""
    cached = KVCache(2, 2, 10, 8, window=(3, 0))
    for _ in range(6):
        cached.append(*torch.randn(2, 2, 2, 5, 8))
    assert cached.starts.tolist() == [20, 20]
    return cached


@pytest.mark.parametrize(
    ("kind", "kept", "error", "message"),
    [
        ({}, 6, ValueError, "each of lengths must be between 0 and 5, the sequence's length, got 6 at 0"),
        ({}, [0, -1], ValueError, "each of lengths must be between 0 and 5, the sequence's length, got -1 at 1"),
        ({"page_size": 16}, [1, 6], ValueError, "between 0 and 5, the sequence's length, got 6 at 1"),
        ({}, [1], ValueError, "lengths must have shape [2], got [1]"),
        ({}, torch.zeros(2), TypeError, "lengths must be int32 or int64, got torch.float32"),
        ({}, 1.5, TypeError, "lengths must be Sequence or Tensor, got 1.5"),
        ({}, True, TypeError, "lengths must be int, got True"),
        ({}, 2**63, ValueError, "lengths must fit in 64 bits"),
        (
            None,
            [24, 23],
            ValueError,
            "at least 24, where a window of 4 keys begins with the oldest one that the cache",
        ),
    ],
)
def test_truncations_that_are_refused(kind, kept, error, message):
    cached = long_ring() if kind is None else KVCache(2, 2, 10, 8, **kind)
    if kind is not None:
        cached.append(*torch.randn(2, 2, 2, 5, 8))
    before = snapshot(cached)
    with refused(error, message, inside=True):
        cached.truncate(kept)
    assert same(snapshot(cached), before)


def test_a_truncated_ring_knows_what_is_left():
    cached = long_ring()
    cached.truncate(25)
    attention_with_cache(torch.randn(2, 2, 2, 8), cached)
    attention_with_cache(torch.randn(2, 2, 4, 8), cached, window=(1, 0))
    with pytest.raises(ValueError, match="seqlen_q must not exceed 2, where the first query sees the oldest key that"):
        attention_with_cache(torch.randn(2, 2, 3, 8), cached)
    with pytest.raises(ValueError, match="q_offset must be at least 23, where a window of 4 keys begins"):
        attention_with_cache(torch.randn(2, 2, 1, 8), cached, q_offset=22)


def test_a_gpu_clamps():
    """A GPU's operators are composed of torch's, so CPU tensors work too."""
    lengths, starts = torch.tensor([30, 30, 25, 5]), torch.tensor([20, 20, 20, 0])
    on_gpu(ops.cache_truncate, lengths, starts, torch.tensor([31, 2, 24, -1]), 4)
    assert lengths.tolist() == [30, 20, 24, 0]
    on_gpu(ops.cache_truncate, lengths, None, torch.tensor([-3, 21, 2**40, 0]), 0)
    assert lengths.tolist() == [0, 20, 24, 0]
    assert on_gpu(ops.cache_newest, lengths, starts, 2, 3, 10).tolist() == [-22, -2, 2, -2]
    torch.library.opcheck(ops.cache_newest, (lengths, torch.zeros(4, dtype=torch.int64), 2, 3, 30))
    torch.library.opcheck(ops.cache_truncate, (lengths, None, torch.zeros(4, dtype=torch.int64), 0))
