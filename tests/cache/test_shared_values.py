"""Promise: a cache whose values are columns of its keys stores them once and changes no result."""

import copy
import pickle
from typing import Any

import torch
from support.assertions import Refusals, assert_close, each_refusal, refused
from support.caches import each_kind
from torch import Tensor

from pyattn import KVCache, attention_weights, attention_with_cache

KINDS: dict[str, dict[str, Any]] = {"slots": {}, "ring": {"window": (30, 0)}, "pages": {"page_size": 16}}
"""The ring's queries see most of what it keeps, so a row that moved twice shows."""
HEADS, D, DV = 16, 24, 20


def twins(kind: str) -> tuple[KVCache, KVCache]:
    """The cache under test, and one with separate values, both filled with NaN."""
    sizes: dict[str, Any] = {"head_dim_v": DV, "dtype": torch.float64} | KINDS[kind]
    shared, apart = KVCache(2, 1, 40, D, shared_values=True, **sizes), KVCache(2, 1, 40, D, **sizes)
    for storage in (shared.k, apart.k, apart.v):
        storage.fill_(torch.nan)
    return shared, apart


def drawn(new: int, heads: int = 1) -> Tensor:
    return torch.randn(2, heads, new, D, dtype=torch.float64)


def grown(caches: tuple[KVCache, KVCache], new: int, lengths: list[int] | None = None) -> None:
    """Appends to both and compares what queries get."""
    k, q = drawn(new), drawn(new, HEADS)
    caches[0].append(k, lengths=lengths)
    caches[1].append(k, k[..., :DV], lengths)
    assert_same(caches, q)


def assert_same(caches: tuple[KVCache, KVCache], q: Tensor) -> None:
    """The same bits: out and lse, weights, and the queries' gradient."""
    results = []
    for cached in caches:
        leaf = q.clone().requires_grad_()
        out, lse = attention_with_cache(leaf, cached, return_lse=True)
        weights = attention_weights(q, cached)
        results.append((out, lse, weights, *torch.autograd.grad(out.sin().sum() + lse[lse.isfinite()].sum(), leaf)))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@each_kind
def test_the_results_of_values_of_their_own(kind):
    """Through prompts, single tokens and ragged appends, past a ring's slots."""
    caches = twins(kind)
    for new, lengths in ((10, None), (3, [3, 1]), (1, None), (1, None), (5, [0, 5]), (1, None)):
        grown(caches, new, lengths)
    for _ in range(12 if kind == "ring" else 1):
        grown(caches, 9)
    assert caches[0].v.shape == caches[1].v.shape


@each_kind
def test_what_changes_a_cache(kind):
    """Beam search, dropped drafts, and the next text."""
    caches = twins(kind)
    grown(caches, 9), grown(caches, 9, [9, 5])
    for change in (lambda c: c.reorder([1, 0]), lambda c: c.truncate([14, 12]), lambda c: c.reset()):
        for cached in caches:
            change(cached)
        grown(caches, 2, [2, 1])
    grown(caches, 3)


@each_kind
def test_kept_positions(kind):
    """Branches of a drafted tree."""
    caches = twins(kind)
    grown(caches, 9), grown(caches, 9)
    for cached in caches:
        cached.keep([[13, 15, 17], [14]])
    assert_same(caches, drawn(1, HEADS))
    grown(caches, 3)


@each_kind
def test_memory_is_shared_and_copies_keep_it(kind):
    cached, apart = twins(kind)
    k = drawn(5)
    cached.append(k)
    made = [cached.clone(), copy.deepcopy(cached), pickle.loads(pickle.dumps(cached)), cached.to(torch.float32)]
    for other in (cached, *made):
        assert other.shared_values
        assert other.v.data_ptr() == other.k.data_ptr()
        assert other.v.shape == apart.v.shape
        assert "shared_values=True" in repr(other)
        assert not [t for t in vars(other).values() if isinstance(t, Tensor) and t.shape[-1:] == (DV,)]
    assert len({other.k.data_ptr() for other in (cached, *made)}) == 5
    q = drawn(1, HEADS)
    for other in made[:3]:
        other.append(drawn(1)), other.truncate(5)
        assert torch.equal(attention_with_cache(q, other), attention_with_cache(q, cached))
    assert not apart.shared_values


@each_kind
def test_one_graph(kind):
    """Appending and reading in torch.compile, once for all lengths."""

    def step(cached: KVCache, k: Tensor, q: Tensor) -> Tensor:
        cached.append(k)
        return attention_with_cache(q, cached)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    (ours, _), (expected, _) = twins(kind), twins(kind)
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        for _ in range(4):
            k, q = drawn(3), drawn(3, HEADS)
            assert_close(compiled(ours, k, q), step(expected, k, q))


ONE = torch.zeros(1, 1, 1, 6)
BAD: Refusals = [
    (lambda c: c.append(ONE, ONE[..., :4]), ValueError, "v must be left out, because the cache's values are "),
    (lambda c: c.append(ONE[..., :5]), ValueError, "k must have shape [1, 1, 1, 6], got [1, 1, 1, 5]"),
    (lambda c: KVCache(1, 1, 8, 6).append(ONE), TypeError, "v must be Tensor, got None"),
    (
        lambda c: KVCache(1, 1, 8, 6, head_dim_v=7, shared_values=True),
        ValueError,
        "head_dim_v must not exceed head_dim with shared_values=True, got 7 and 6",
    ),
    (lambda c: KVCache(1, 1, 8, 6, shared_values=1), TypeError, "shared_values must be bool, got 1"),
]


@each_refusal(BAD)
def test_wrong_calls(changes, kind, message):
    cached = KVCache(1, 1, 8, 6, head_dim_v=4, shared_values=True)
    with refused(kind, message):
        changes(cached)
    assert cached.lengths.tolist() == [0]
