"""Promise: prompts of different lengths, padded on the right, fill a cache in one call, and text continues there."""

import re

import pytest
import torch
from support.assertions import Refusals, assert_close, each_refusal, refused
from support.caches import KINDS
from support.modules import (
    ARGUMENTS,
    CACHED,
    D_IN,
    EXTRAS,
    WITH_EXTRAS,
    assert_same,
    cache_for,
    class_of,
    doubles,
    made,
    pair,
    sequences,
)
from torch import Tensor

from pyattn import nn
from pyattn.nn import growing_cache

LENGTHS = [7, 3, 0]
NEW = [2, 0, 3]
"""Tokens of the second call."""


def alone(module: torch.nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Out and weights of one sequence without padding."""
    return module(x, *([nn.causal_mask(x.shape[1])] if isinstance(module, nn.Attention) else []), need_weights=True)


def mask_of(module: torch.nn.Module, lengths: list[int], new: int, keys: int) -> list[Tensor]:
    """The causal mask over a cache, which the caller of Attention passes: (B, 1, new, keys)."""
    if not isinstance(module, nn.Attention):
        return []
    position = torch.tensor(lengths)[:, None] + torch.arange(new)
    return [torch.arange(keys) > position[:, None, :, None]]


def bias_of(module: torch.nn.Module) -> Tensor:
    """The output row of a padding query: the last projection's bias."""
    project = module.W_o if isinstance(module, nn.Attention) else getattr(module, "out_proj", None) or module.proj
    return torch.zeros(project.out_features, dtype=torch.float64) if project.bias is None else project.bias


def windowed(name: str, extra: str) -> torch.nn.Module:
    """A module whose window matches the ring's."""
    return class_of(name)(*ARGUMENTS[name], **EXTRAS.get(extra, {}) | {"window": (3, 0)}).double()


def cases() -> list[tuple[str, str, str]]:
    """Modules, extras and caches: rings for modules with a window whose caller gives no mask."""
    of_all = [(name, extra, kind) for name in WITH_EXTRAS for extra in ("", *EXTRAS) for kind in KINDS]
    others = [(name, "", kind) for name in ("MHAEinsum", "MHAPyTorchScaledDotProduct") for kind in KINDS]
    return [case for case in of_all if case[2] != "ring" or case[0] != "Attention"] + [
        case for case in others if case[2] != "ring"
    ]


@pytest.mark.parametrize(("name", "extra", "kind"), cases())
def test_each_sequence_gets_what_it_gets_alone(name, extra, kind):
    """Whatever the padding holds; a padding query gets only the last projection's bias."""
    if name not in WITH_EXTRAS:
        module = doubles(name)[0]
    else:
        module = windowed(name, extra) if kind == "ring" else made(name, extra)
    x = sequences(3, 10)
    cached, before = cache_for(module, 3, **KINDS[kind]), [0, 0, 0]
    for new in (LENGTHS, NEW, [1, 1, 1]):
        width = max(new)
        padded = torch.full((3, width, D_IN), torch.nan, dtype=torch.float64)
        for b, (begin, count) in enumerate(zip(before, new, strict=True)):
            padded[b, :count] = x[b, begin : begin + count]
        mask = mask_of(module, before, width, cached.max_seqlen)
        out, weights = module(padded, *mask, kv_cache=cached, lengths=new, need_weights=True)
        for b, (begin, count) in enumerate(zip(before, new, strict=True)):
            end = begin + count
            if count:
                expected, shown = alone(module, x[b : b + 1, :end])
                assert_same(out[b : b + 1, :count], expected[:, begin:])
                assert_same(weights[b : b + 1, :, :count, :end], shown[:, :, begin:])
            assert torch.equal(out[b, count:], bias_of(module).expand(width - count, -1))
            assert not weights[b, :, count:].any()
            assert not weights[b, :, :, end:].any()
        before = [begin + count for begin, count in zip(before, new, strict=True)]
        assert cached.lengths.tolist() == before
        assert weights.shape[-1] == max(before)


def test_gradients_of_what_counts():
    """Padding sends no gradients, and the cache's keys receive none."""
    module = made("MultiHeadAttention", "all")
    x = sequences(3, 7).requires_grad_()
    out = module(x, kv_cache=cache_for(module, 3), lengths=LENGTHS)
    (gradient,) = torch.autograd.grad(out.sin().sum(), x)
    assert not gradient[2].any()
    for b, count in enumerate(LENGTHS[:2]):
        assert not gradient[b, count:].any()
        own = x[b : b + 1, :count].detach().requires_grad_()
        expected = module(own, kv_cache=cache_for(module, 1))
        (target,) = torch.autograd.grad(expected.sin().sum(), own)
        assert_close(gradient[b : b + 1, :count], target)


@pytest.mark.parametrize("fewest", [1, 256])
def test_with_use_cache(monkeypatch, fewest):
    """A growing cache keeps the length of each sequence."""
    monkeypatch.setattr(growing_cache, "FEWEST", fewest)
    module = made("GroupedQueryAttention", "rotary")
    x = sequences(3, 7)
    module(x, use_cache=True, lengths=LENGTHS)
    out, weights = module(x, use_cache=True, need_weights=True)
    assert weights.shape == (3, 4, 7, 14)
    for b, count in enumerate(LENGTHS):
        whole = torch.cat([x[b : b + 1, :count], x[b : b + 1]], 1)
        assert_same(out[b : b + 1], module(whole)[:, count:])


BAD: Refusals = [
    ([1, 2], ValueError, "lengths must have "),
    ([8, 3, 0], ValueError, "each of lengths must be "),
    ([1.5, 3, 0], TypeError, "each of lengths must be int, got 1.5"),
    (torch.tensor([1.0, 2.0, 3.0]), TypeError, "lengths must be int32 or int64, got torch.float32"),
]


@each_refusal(BAD)
def test_wrong_lengths(changes, kind, message):
    module = made("MultiHeadAttention")
    cached = cache_for(module, 3)
    with refused(kind, message):
        module(sequences(3, 7), kv_cache=cached, lengths=changes)
    assert cached.lengths.tolist() == [0, 0, 0]


@pytest.mark.parametrize("name", CACHED)
def test_lengths_without_a_cache(name):
    module, _ = pair(name)
    message = "pyattn: lengths must come with a kv_cache, got [7, 3, 0] alone; key_ranges=pyattn.masks.padding("
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        module(torch.randn(3, 7, D_IN), lengths=LENGTHS)
