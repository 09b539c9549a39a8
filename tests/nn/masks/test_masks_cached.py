"""Promise: over a cache, a module gives the results of all tokens at once, whatever masks its caller adds."""

import re
from typing import Any

import pytest
import torch
from support.assertions import Refusals, assert_close, each_refusal, refused
from support.modules import (
    CACHED,
    CONTEXT_LENGTH,
    EXTRAS,
    ROWS,
    WITH_EXTRAS,
    assert_same,
    cache_for,
    gradients,
    made,
    made_cached,
    sequences,
)
from torch import Tensor

from pyattn import masks, nn
from pyattn.nn import growing_cache

each_module = pytest.mark.parametrize("name", [*CACHED, "MultiHeadAttentionCombinedQKV"])
each_kind = pytest.mark.parametrize("kind", ["mask", "bias", "mask bias"])
each_page_size = pytest.mark.parametrize("page_size", [None, 16])

MODULES = (*CACHED, "MultiHeadAttentionCombinedQKV")
STEPS = [(name, "all", kind) for name in MODULES for kind in ("", "key_ranges", "mask", "bias", "key_ranges mask bias")]
STEPS += [(name, extra, "") for name in WITH_EXTRAS for extra in ("", *EXTRAS) if extra != "all"]
"""Modules, their extras, and what the caller adds."""


def added(kind: str, heads: int) -> dict[str, Tensor]:
    """Options for all positions that a cache holds; rows broadcast in the bias, heads in the mask."""
    every = {
        "key_ranges": masks.padding([ROWS, 5], ROWS, side="left"),
        "mask": torch.rand(2, 1, CONTEXT_LENGTH, CONTEXT_LENGTH) < 0.7,
        "bias": torch.randn(heads, 1, CONTEXT_LENGTH, dtype=torch.float64).requires_grad_(),
    }
    return {name: every[name] for name in kind.split()}


def call(module: torch.nn.Module, x: Tensor, begin: int, keys: int, given: dict[str, Tensor], **options: Any) -> Any:
    """The module over tokens from ``begin`` on, which see ``keys`` keys. Attention's mask is True where masked out."""
    end = begin + x.shape[1]
    cuts = {
        "key_ranges": lambda t: t[:, begin:end].clamp(max=keys),
        "mask": lambda t: t[..., begin:end, :keys],
        "bias": lambda t: t[..., :keys],
    }
    part = {name: cuts[name](t) for name, t in given.items()}
    if isinstance(module, nn.Attention):
        causal = nn.causal_mask(CONTEXT_LENGTH)[..., begin:end, :keys]
        part["mask"] = causal | ~part["mask"] if "mask" in part else causal
    return module(x, **part, **options)


@pytest.mark.parametrize(("name", "extra", "kind"), STEPS)
@each_page_size
def test_steps_equal_the_whole(name, extra, kind, page_size):
    """With and without weights, and with the gradients of the newest tokens and of the bias."""
    module = made_cached(name, extra)
    x, more = sequences(2, ROWS).requires_grad_(), added(kind, module.num_heads)
    whole, shown = call(module, x, 0, ROWS, more, need_weights=True)
    (cached, without), begin = (cache_for(module, page_size=page_size) for _ in range(2)), 0
    learned = [t for t in more.values() if t.requires_grad]
    for new in (5, 1, 3):
        end = begin + new
        step = module, x[:, begin:end], begin, CONTEXT_LENGTH, more
        out, weights = call(*step, kv_cache=cached, need_weights=True)
        assert_same(out, whole[:, begin:end])
        assert_same(weights, shown[:, :, begin:end, :end])
        assert torch.equal(out, call(*step, kv_cache=without)), "weights change no result"
        if learned:
            found, target = gradients(out, learned), gradients_of_rows(whole[:, begin:end], learned)
            assert_close(found, target)
        begin = end


def gradients_of_rows(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(out.sin().sum(), leaves, retain_graph=True))


@pytest.mark.parametrize("name", MODULES)
@each_kind
@each_page_size
def test_a_ragged_prompt(name, kind, page_size):
    """Each sequence gets the results it gets alone, and the padding none."""
    module, lengths = made_cached(name, "all"), [4, 2]
    x, more = sequences(2, 6), added(kind, module.num_heads)
    cached = cache_for(module, page_size=page_size)
    options = {"kv_cache": cached, "lengths": lengths, "need_weights": True}
    out, weights = call(module, x[:, :4], 0, CONTEXT_LENGTH, more, **options)
    for b, count in enumerate(lengths):
        own = {key: t[b : b + 1] if t.dim() == 4 else t for key, t in more.items()}
        expected, shown = call(module, x[b : b + 1, :count], 0, count, own, need_weights=True)
        assert_same(out[b : b + 1, :count], expected)
        assert_same(weights[b : b + 1, :, :count, :count], shown)
        assert not weights[b, :, count:].any()
        assert not weights[b, ..., count:].any()


@pytest.mark.parametrize("kind", ["", "key_ranges", "mask", "bias", "mask bias"])
@pytest.mark.parametrize("fewest", [1, 256])
def test_with_use_cache(kind, fewest, monkeypatch):
    """With weights. The keys are the tokens so far, however many the module has room for."""
    monkeypatch.setattr(growing_cache, "FEWEST", fewest)
    module = made("GroupedQueryAttention", "all")
    x, more = sequences(2, ROWS), added(kind, module.num_heads)
    (whole, shown), begin = call(module, x, 0, ROWS, more, need_weights=True), 0
    with torch.no_grad():
        for new in (5, 1, 3):
            end = begin + new
            out, weights = call(module, x[:, begin:end], begin, end, more, use_cache=True, need_weights=True)
            assert_same(out, whole[:, begin:end])
            assert_same(weights, shown[:, :, begin:end, :end])
            begin = end
        message = re.escape("mask must broadcast to (batch, num_heads, seqlen, keys) = (2, 4, 1, 10), got shape (1, 9)")
        with pytest.raises(ValueError, match=f"^pyattn: {message}$"):
            module(x[:, :1], use_cache=True, mask=torch.ones(1, 9, dtype=torch.bool))
        row = {"mask": torch.ones(1, 1, dtype=torch.bool), "bias": torch.zeros(1, dtype=torch.float64)}
        assert_same(module(x[:, :1], use_cache=True, **row), module(torch.cat([x, x[:, :1]], 1))[:, -1:])


@pytest.mark.parametrize("kind", ["key_ranges", "mask", "bias"])
def test_a_ring_has_none(kind):
    module = made("GroupedQueryAttention")
    ring = cache_for(module, window=(3, 0))
    message = rf"^pyattn: a cache .* no {kind}, got window=\(3, 0\)$"
    if kind == "mask":
        message = r"^pyattn: over a cache with a window, a mask has the keys of the 3 queries alone, got .*=\(3, 0\)$"
    with pytest.raises(NotImplementedError, match=message):
        call(module, sequences(2, 3), 0, CONTEXT_LENGTH, added(kind, 4), kv_cache=ring)
    with pytest.raises(ValueError, match=r"^pyattn: over a cache with window=\(3, 0\), seqlen_q .*, got 18$"):
        module(sequences(2, 18), kv_cache=ring)
    assert ring.lengths.tolist() == [0, 0]


TOKENS = torch.ones(3, CONTEXT_LENGTH)
FITS = "{} must broadcast to (batch, num_heads, seqlen, keys) = (2, 2, 3, 19), got shape "
BAD: Refusals = [
    ({"mask": TOKENS}, TypeError, "mask must be bool, True = takes part (numbers to add to the scores are bias), got "),
    ({"bias": TOKENS > 0}, TypeError, "bias must be floating-point, added to the scores (a bool tensor, True = takes "),
    ({"bias": TOKENS.long()}, TypeError, "bias must be floating-point, added to the scores (a bool tensor, True = "),
    ({"bias": TOKENS.half()}, TypeError, "bias must have dtype "),
    ({"mask": [[True]]}, TypeError, "mask must be Tensor, got [[True]]"),
    ({"bias": 0.5}, TypeError, "bias must be Tensor, got 0.5"),
    ({"mask": TOKENS[:, :4] > 0}, ValueError, FITS.format("mask")),
    ({"bias": TOKENS[:, :3]}, ValueError, FITS.format("bias")),
    ({"mask": TOKENS.expand(3, 3, 19) > 0}, ValueError, FITS.format("mask")),
    ({"bias": TOKENS.expand(1, 1, 1, 3, 19)}, ValueError, FITS.format("bias")),
    ({"bias": torch.tensor(1.0)}, ValueError, FITS.format("bias")),
    ({"mask": (TOKENS > 0).to("meta")}, ValueError, "mask must be on the device of x, got meta and cpu"),
    ({"bias": TOKENS.to("meta")}, ValueError, "bias must be on the device of x, got meta and cpu"),
]


@each_refusal(BAD)
@pytest.mark.parametrize("extra", ["", "rotary"])
def test_wrong_ones_leave_a_cache_as_it_was(changes, kind, message, extra):
    module = made("MultiHeadAttention", extra)
    cached = cache_for(module)
    with refused(kind, message):
        module(sequences(2, 3), kv_cache=cached, **changes)
    assert cached.lengths.tolist() == [0, 0]
