"""Promise: over a cache, a call's own keys and values have gradients; those of earlier calls are constants."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.assertions import graph_of
from support.modules import CACHED, assert_same, cache_for, made_cached, sequences
from torch import Tensor
from torch.autograd import forward_ad

from pyattn import nn

KINDS: dict[str, dict[str, Any]] = {"slots": {}, "pages": {"page_size": 16}, "ring": {"window": (3, 0)}}


def assert_gradients(module: torch.nn.Module, call: Callable[[], Tensor], x: Tensor) -> None:
    """The gradients of x and of every parameter are those of differences, with the cache as it was before."""
    leaves = [x, *module.parameters()]
    found = torch.autograd.grad(call().sin().sum(), leaves, materialize_grads=True)
    for leaf, gradient in zip(leaves, found, strict=True):
        step = 1e-6 * torch.randn_like(leaf)
        with torch.no_grad():
            leaf += step
            above = call().sin().sum()
            leaf -= 2 * step
            below = call().sin().sum()
            leaf += step
        torch.testing.assert_close(2 * (gradient * step).sum(), above - below, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CACHED)
@pytest.mark.parametrize("new", [1, 3])
def test_gradients_over_a_cache(name, kind, new):
    """After other tokens, whose keys stay as they are; by differences."""
    module = made_cached(name)
    x, cached = sequences(2, 9), cache_for(module, **KINDS[kind])
    with torch.no_grad():
        module(x[:, :5], kv_cache=cached)
    last = x[:, 5 : 5 + new].clone().requires_grad_()

    def call() -> Tensor:
        return module(last, kv_cache=cached.clone())

    assert_gradients(module, call, last)


@pytest.mark.parametrize("name", ["MultiHeadAttention", "GroupedQueryAttention"])
def test_a_first_call_trains_as_without_a_cache(name):
    module, x = made_cached(name), sequences(2, 9).requires_grad_()
    leaves = [x, *module.parameters()]
    exact = torch.autograd.grad(module(x).sin().sum(), leaves)
    for options in ({"use_cache": True}, {"kv_cache": cache_for(module)}):
        found = torch.autograd.grad(module(x, **options).sin().sum(), leaves)
        for ours, expected in zip(found, exact, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)
        module.reset_cache()


@pytest.mark.parametrize("kind", ["slots", "pages"])
def test_padding_has_no_gradient(kind):
    """Prompts of different lengths."""
    module = made_cached("MultiHeadAttention")
    x, cached = sequences(2, 5).requires_grad_(), cache_for(module, **KINDS[kind])
    out = module(x, kv_cache=cached, lengths=[5, 2])
    gradient, weight = torch.autograd.grad(out[:, :2].sum() + out[0].sum(), [x, module.W_key.weight])
    assert not gradient[1, 2:].any()
    alone = sequences(2, 5)
    alone.copy_(x.detach())
    parts = module(alone[:1]).sum() + module(alone[:1])[:, :2].sum() + module(alone[1:, :2]).sum()
    (expected,) = torch.autograd.grad(parts, [module.W_key.weight])
    torch.testing.assert_close(weight, expected, rtol=1e-10, atol=1e-12)


def test_second_derivatives():
    module = made_cached("MultiHeadAttention")
    x, cached = sequences(2, 6), cache_for(module)
    module(x[:, :4], kv_cache=cached)
    last = x[:, 4:].clone().requires_grad_()
    (first,) = torch.autograd.grad(module(last, kv_cache=cached).sin().sum(), last, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), module.W_key.weight)
    assert second.abs().max() > 0


def test_a_frozen_query_projection():
    module = made_cached("MultiHeadAttention")
    module.W_query.requires_grad_(False)
    x = sequences(2, 5)
    (exact,) = torch.autograd.grad(module(x).sum(), module.W_key.weight)
    for options in KINDS.values():
        if "window" not in options:
            (found,) = torch.autograd.grad(module(x, kv_cache=cache_for(module, **options)).sum(), module.W_key.weight)
            torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-12)


def test_appending_again_before_backward_raises():
    module = made_cached("MultiHeadAttention")
    x, cached = sequences(2, 6), cache_for(module)
    loss = module(x[:, :4], kv_cache=cached).sum()
    module(x[:, 4:], kv_cache=cached)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "extra", "kind", "new"),
    [
        *(("MultiHeadAttention", "", kind, new) for kind in KINDS for new in (2, 7)),
        *(("GroupedQueryAttention", "rotary", kind, 7) for kind in ("slots", "pages")),
        *(("MultiHeadLatentAttention", "", kind, 7) for kind in KINDS),
    ],
)
def test_compiled(name, extra, kind, new):
    """Backward runs after the append, and must use the lengths before it."""
    module = made_cached(name, extra)
    x = sequences(2, 4 + new)
    results = []
    for call in (module, graph_of(module)):
        cached = cache_for(module, **KINDS[kind])
        with torch.no_grad():
            module(x[:, :4], kv_cache=cached)
        out = call(x[:, 4:], kv_cache=cached)
        results.append([out, *torch.autograd.grad(out.sin().sum(), [*module.parameters()])])
    for eager, compiled in zip(*results, strict=True):
        assert_same(compiled, eager)


def test_without_gradients_nothing_is_copied(monkeypatch):
    module = nn.MultiHeadAttention(8, 8, 16, 0.0, 2)
    cached = nn.heads.KVCache(1, 2, 16, 4)
    monkeypatch.setattr(nn.heads, "attention_with_cache", lambda q, cache, **_: (seen.append(cache), q)[1])
    seen: list[Any] = []
    with torch.no_grad():
        module(torch.randn(1, 3, 8), kv_cache=cached)
    module(torch.randn(1, 3, 8), kv_cache=cached)
    assert seen[0] is cached
    assert seen[1] is not cached
    assert seen[1].k.data_ptr() == cached.k.data_ptr()


@pytest.mark.parametrize("options", [{}, {"page_size": 16}, {"window": (9, 0)}])
@pytest.mark.parametrize("name", ["MultiHeadAttention", "MultiHeadLatentAttention"])
def test_forward_mode(name, options):
    """Tangents reach a call's own keys and values, also under and over gradients."""
    module = made_cached(name).requires_grad_(False)
    x, tangent = sequences(2, 6), sequences(2, 6)

    def cached(x: Tensor) -> Tensor:
        return module(x, kv_cache=cache_for(module, **options))

    def orders(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        gradient = torch.func.grad(lambda x: call(x).square().sum())
        along = torch.func.grad(lambda x: torch.func.jvp(call, (x,), (tangent,))[1].square().sum())
        with forward_ad.dual_level():
            dual = forward_ad.unpack_dual(call(forward_ad.make_dual(x, tangent))).tangent
        return [
            dual,
            torch.func.jvp(call, (x,), (tangent,))[1],
            torch.func.jvp(gradient, (x,), (tangent,))[1],
            along(x),
        ]

    for ours, expected in zip(orders(cached), orders(module), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_append_drops_tangents(kind):
    cached = cache_for(made_cached("MultiHeadAttention"), **KINDS[kind])
    heads = cached.k.shape[1 if cached.block_table is None else 2]
    rows = torch.randn(2, heads, 4, cached.k.shape[-1], dtype=torch.float64)
    with forward_ad.dual_level():
        cached.append(forward_ad.make_dual(rows, rows), forward_ad.make_dual(rows, rows))
        assert forward_ad.unpack_dual(cached.k).tangent is None
