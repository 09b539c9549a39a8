"""Promise: layers that share keys and values compute what they would with the other layer's projections."""

from typing import Any

import pytest
import torch
from support.assertions import Refusals, each_refusal, refused
from support.modules import ARGUMENTS, CONTEXT_LENGTH, assert_same, cache_for, class_of, gradients, sequences

from pyattn import KVCache

NAMES = ("MultiHeadAttention", "GroupedQueryAttention")
each_module = pytest.mark.parametrize("name", NAMES)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norms": {"qk_norm": True},
    "rotary": {"rotary": 100.0},
    "all": {"qk_norm": "all_heads", "rotary": 10.0, "sinks": True, "window": (3, 0), "softmax_scale": 0.5},
}


def layers(name: str, variant: str = "plain") -> tuple[torch.nn.Module, torch.nn.Module, torch.nn.Module]:
    """Two layers, and the second one with the first one's keys and values in one module."""
    first, second, merged = (class_of(name)(*ARGUMENTS[name], **VARIANTS[variant]).double() for _ in range(3))
    merged.load_state_dict(second.state_dict())
    merged.W_key, merged.W_value, merged.k_norm = first.W_key, first.W_value, first.k_norm
    second.W_key = second.W_value = None
    return first, second, merged


@each_module
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_layer_reads_another_ones_keys(name, variant):
    """The input is the same here, so that one module can have both projections; gradients reach both layers."""
    first, second, merged = layers(name, variant)
    x, mask = sequences(2, 9).requires_grad_(), torch.rand(2, 1, 9, 9) < 0.8
    kv = first.keys_and_values(x)
    assert_same(first(x, kv_from=kv), first(x))
    for options in ({}, {"mask": mask, "bias": torch.randn(9, 9).double()}):
        out, exact = second(x, kv_from=kv, **options), merged(x, **options)
        assert_same(out, exact)
    (out, weights), (_, expected) = second(x, kv_from=kv, need_weights=True), merged(x, need_weights=True)
    assert_same(weights, expected)
    leaves = [x, first.W_key.weight, first.W_value.weight]
    found = gradients(out, [*leaves, second.W_query.weight])
    for ours, theirs in zip(found, gradients(merged(x), [*leaves, merged.W_query.weight]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@each_module
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", [{}, {"page_size": 16}])
def test_over_the_other_ones_cache(name, variant, kind):
    first, second, merged = layers(name, variant)
    x, cached = sequences(2, 9), cache_for(first, **kind)
    exact = merged(x)
    with torch.no_grad():
        for begin, end in ((0, 5), (5, 6), (6, 9)):
            first(x[:, begin:end], kv_cache=cached)
            assert_same(second(x[:, begin:end], kv_from=cached), exact[:, begin:end])
    assert cached.lengths.tolist() == [9, 9]


@each_module
def test_the_newest_of_more_keys(name):
    first, second, merged = layers(name, "rotary")
    x = sequences(2, 9)
    assert_same(second(x[:, 6:], kv_from=first.keys_and_values(x)), merged(x)[:, 6:])


@each_module
def test_tables(name):
    first, second, merged = layers(name)
    half = first.head_dim // 2
    angle = torch.outer(torch.arange(CONTEXT_LENGTH).double(), 100.0 ** (-torch.arange(half).double() / half))
    tables = tuple(torch.cat([t, t], -1) for t in (angle.cos(), angle.sin()))
    x = sequences(2, 9)
    kv = first.keys_and_values(x, position_embeddings=tables)
    assert_same(second(x, kv_from=kv, position_embeddings=tables), merged(x, position_embeddings=tables))


FIRST = layers("MultiHeadAttention")[0]
CACHE = cache_for(FIRST)
REFUSED: Refusals = [
    ({"kv_from": 3}, TypeError, "kv_from must be tuple or KVCache, got 3"),
    (
        {"kv_from": FIRST.keys_and_values(sequences(3, 4))},
        ValueError,
        "kv_from must be k and v (batch, num_heads_kv, ",
    ),
    (
        {"kv_from": FIRST.keys_and_values(sequences(2, 3))},
        ValueError,
        "kv_from must be k and v (batch, num_heads_kv, ",
    ),
    ({"kv_from": CACHE, "kv_cache": CACHE}, ValueError, "kv_from must come without kv_cache, got both"),
    (
        {"kv_from": CACHE, "use_cache": True},
        ValueError,
        "use_cache must be False with kv_from, whose module has the",
    ),
]


@each_refusal(REFUSED)
def test_refusals(changes, kind, message):
    with refused(kind, message):
        layers("MultiHeadAttention")[1](sequences(2, 4), **changes)


def test_padding_is_refused():
    first, second, _ = layers("MultiHeadAttention")
    x, cached = sequences(2, 4), cache_for(first)
    first(x, kv_cache=cached, lengths=[4, 2])
    with refused(NotImplementedError, "kv_from must have no padding, got a cache after an append with lengths"):
        second(x, kv_from=cached)


def test_a_cache_of_8_bits():
    first, second, merged = (module.float() for module in layers("MultiHeadAttention"))
    x = sequences(2, 9).float()
    cached = KVCache(2, 2, CONTEXT_LENGTH, 4, kv_dtype=torch.int8)
    with torch.no_grad():
        first(x, kv_cache=cached)
        torch.testing.assert_close(second(x, kv_from=cached), merged(x), rtol=0.0, atol=0.05)


def test_a_cache_without_the_tokens_is_refused():
    """A layer that is called before the one that it shares with."""
    first, second, _ = layers("MultiHeadAttention")
    x, cached = sequences(2, 4), cache_for(first)
    first(x[:, :3], kv_cache=cached)
    with refused(ValueError, "each of the lengths of kv_from, which has x's tokens, must be at least 4, got 3 at 0"):
        second(x, kv_from=cached)


@each_module
def test_a_call_over_other_keys_resets_the_own_cache(name):
    first, second, _ = (class_of(name)(*ARGUMENTS[name]).double() for _ in range(3))
    x = sequences(2, 9)
    second(x[:, :4], use_cache=True)
    second(x, kv_from=first.keys_and_values(x))
    assert_same(second(x, use_cache=True), second(x))
