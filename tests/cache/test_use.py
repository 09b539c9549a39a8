"""Promise: unsupported devices, names and transforms give one sentence; a compiled graph copies a cache."""

import re
from typing import Any

import pytest
import torch
from support.assertions import assert_close, refused
from support.caches import KINDS, each_kind
from support.cases import assert_equal, newer_compiler
from torch._subclasses.fake_tensor import FakeTensorMode

from pyattn import KVCache, attention_with_cache
from pyattn.cache.call_gradients import appended


def filled(kind: str) -> KVCache:
    cached = KVCache(2, 2, 10, 8, **KINDS[kind])
    cached.append(*torch.randn(2, 2, 2, 6, 8), [6, 4])
    return cached


@pytest.mark.parametrize(
    "use", [lambda device: KVCache(2, 2, 10, 8, device=device), lambda device: filled("slots").to(device)]
)
@pytest.mark.parametrize("named", ["nope", "cpu:nope", "", "hpu", torch.device("xla"), 2**40, -2])
def test_devices_that_are_not_there(use, named):
    with pytest.raises(ValueError, match=rf"^pyattn: device must be one that this torch can use, got {named}$"):
        use(named)


@pytest.mark.parametrize("named", [[1], 1.5, True, torch.float32])
def test_what_is_no_device(named):
    with refused(TypeError, "device must be device or str or int or NoneType, got "):
        KVCache(2, 2, 10, 8, device=named)


MISSPELT: list[tuple[str, dict[str, Any], str]] = [
    ("truncate", {"length": 1}, "no argument length (did you mean lengths?), got 1"),
    ("reorder", {"index": [0, 1]}, "no argument index (did you mean idx?), got [0, 1]"),
    ("to", {"devise": "cpu"}, "no argument devise (did you mean device?), got 'cpu'"),
]


@pytest.mark.parametrize(("method", "named", "message"), MISSPELT, ids=[method for method, *_ in MISSPELT])
def test_misspelt_names(method, named, message):
    with pytest.raises(TypeError, match=f"^pyattn: KVCache.{method} has {re.escape(message)}$"):
        getattr(filled("slots"), method)(**named)


@each_kind
@pytest.mark.parametrize(
    ("change", "mapped"),
    [
        (lambda cached, t: cached.append(t, t), torch.zeros(3, 2, 2, 1, 8)),
        (lambda cached, t: cached.reorder(t), torch.zeros(3, 2, dtype=torch.int64)),
        (lambda cached, t: cached.truncate(t), torch.ones(3, 2, dtype=torch.int64)),
        (lambda cached, t: cached.keep(t), torch.ones(3, 2, 1, dtype=torch.int64)),
    ],
    ids=["append", "reorder", "truncate", "keep"],
)
def test_vmap_changes_none(change, mapped, kind):
    cached = filled(kind)
    before = cached.lengths.clone()
    with refused(NotImplementedError, "torch.vmap cannot change a KVCache: "):
        torch.vmap(lambda t: change(cached, t))(mapped)
    assert torch.equal(cached.lengths, before)


@newer_compiler
@each_kind
@pytest.mark.parametrize("copied", [KVCache.clone, lambda cached: cached.to(torch.float64)], ids=["clone", "to"])
def test_a_compiled_graph_copies(copied, kind):
    cached, new = filled(kind), torch.randn(2, 2, 1, 8)

    def step(t):
        made = copied(cached)
        made.append(t.to(made.k.dtype), t.to(made.k.dtype))
        return made.lengths, made.k, made.v

    found = torch.compile(step, fullgraph=True, backend="aot_eager")(new)
    assert_equal(found, step(new))
    assert cached.lengths.tolist() == [6, 4]


@newer_compiler
@each_kind
@pytest.mark.parametrize("trained", [True, False], ids=["rows", "queries"])
@pytest.mark.parametrize(
    "change",
    [
        lambda cached, new: cached.keep([[4, 6], [3, 5]]),
        lambda cached, new: cached.reorder([1, 0]),
        lambda cached, new: (cached.truncate(4), cached.append(*new)),
        lambda cached, new: (cached.reset(), cached.append(*new)),
    ],
    ids=["keep", "reorder", "truncate", "reset"],
)
def test_a_compiled_backward_has_what_attention_read(change, trained, kind):
    """Also where the same graph changes the cache later."""
    rows, new = torch.randn(2, 2, 2, 2, 8, requires_grad=trained), torch.randn(2, 2, 2, 3, 8)
    leaves = [torch.randn(2, 4, 2, 8, requires_grad=True), *([rows] if trained else [])]
    caches = filled(kind), filled(kind)
    caches[1].k.copy_(caches[0].k), caches[1].v.copy_(caches[0].v)

    def step(q, cached, changes):
        out = attention_with_cache(q, appended(cached, *rows))
        if changes:
            change(cached, new)
        return out.sin().sum()

    expected = torch.autograd.grad(step(leaves[0], caches[0], False), leaves)
    ours = torch.autograd.grad(torch.compile(step, fullgraph=True)(leaves[0], caches[1], True), leaves)
    assert_close(ours, expected, atol=1e-5)


def test_without_values_it_has_a_repr():
    with FakeTensorMode():
        made = KVCache(2, 2, 10, 8)
    for cached in (made, KVCache(2, 2, 10, 8, device="meta")):
        assert "lengths=of 2 sequences" in repr(cached)
