"""Promise: need_weights=True over a cache gives the last rows of the weights over all tokens."""

import pytest
import torch
from modules.cases import (
    ARGUMENTS,
    CONTEXT_LENGTH,
    D_IN,
    EXTRAS,
    WITH_EXTRAS,
    arguments,
    assert_same,
    cache_for,
    made,
    made_cached,
    sequences,
)

from pyattn import masks, nn

STEPS = (5, 1, 3, 1)
"""New tokens per call; 10 in all."""
EFFICIENT = ("MHAEinsum", "MHAPyTorchScaledDotProduct")


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize(
    ("name", "extra"), [(name, extra) for name in WITH_EXTRAS for extra in ("", *EXTRAS)] + [(x, "") for x in EFFICIENT]
)
def test_steps_equal_the_whole(name, extra, page_size):
    module = made_cached(name, extra)
    x = sequences(2, sum(STEPS))
    _, whole = module(x, *arguments(module, 0, x.shape[1], x.shape[1]), need_weights=True)
    cached, without, begin = cache_for(module, page_size=page_size), cache_for(module, page_size=page_size), 0
    for new in STEPS:
        end = begin + new
        step = x[:, begin:end], *arguments(module, begin, end, CONTEXT_LENGTH)
        out, weights = module(*step, kv_cache=cached, need_weights=True)
        assert_same(weights, whole[:, :, begin:end, :end])
        assert torch.equal(out, module(*step, kv_cache=without)), "weights change no result"
        begin = end


@pytest.mark.parametrize("extra", ["", "alibi", "sinks", "rotary"])
def test_a_ring_shows_all_positions(extra):
    """Positions that the ring has dropped have weight 0, as under the window."""
    options = EXTRAS.get(extra, {}) | {"window": (4, 0)}
    module = nn.GroupedQueryAttention(*ARGUMENTS["GroupedQueryAttention"], **options).double()
    x = sequences(2, 60)
    _, whole = module(x, need_weights=True)
    cached, begin = cache_for(module, window=(4, 0)), 0
    for part in x.split(7, 1):
        end = begin + part.shape[1]
        _, weights = module(part, kv_cache=cached, need_weights=True)
        assert_same(weights, whole[:, :, begin:end, :end])
        begin = end


@pytest.mark.parametrize("kind", [{}, {"page_size": 16}, {"window": (7, 0)}])
def test_dropped_weights_are_those_used(kind):
    """out is their product with the values of all tokens."""
    module = made("MultiHeadAttention", "rotary")
    module.dropout.p = 0.5
    x = sequences(2, 12)
    values = module.W_value(x).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
    cached = cache_for(module, **kind)
    with torch.no_grad():
        for part in (slice(8), slice(8, 12)):
            out, weights = module(x[:, part], kv_cache=cached, need_weights=True)
            product = weights @ values[:, :, : weights.shape[-1]]
            assert_same(out, module.out_proj(product.transpose(1, 2).flatten(2)))
            assert (weights.masked_select(nn.causal_mask(12)[..., part, : weights.shape[-1]].logical_not()) == 0).any()


def test_ranges_and_masks():
    module, ranges = made("Attention", "all"), masks.padding([7, 4], 7, side="left")
    x, mask = sequences(2, 7), torch.rand(2, 1, 7, CONTEXT_LENGTH) < 0.3
    _, whole = module(x, mask[..., :7] | nn.causal_mask(7), key_ranges=ranges, need_weights=True)
    cached = cache_for(module)
    hidden = mask | nn.causal_mask(CONTEXT_LENGTH)[:, :, :7]
    for part in (slice(5), slice(5, 7)):
        options = {"kv_cache": cached, "key_ranges": ranges[:, part], "need_weights": True}
        _, weights = module(x[:, part], hidden[:, :, part], **options)
        assert_same(weights, whole[:, :, part, : part.stop])


def test_use_cache():
    module = made("GroupedQueryAttention", "all")
    x = sequences(2, 9)
    _, whole = module(x, need_weights=True)
    for part in (slice(6), slice(6, 9)):
        _, weights = module(x[:, part], use_cache=True, need_weights=True)
        assert_same(weights, whole[:, :, part, : part.stop])


def test_nothing_is_there():
    """No batch, and no new tokens."""
    module = made("MultiHeadAttention")
    empty = torch.zeros(0, 3, D_IN, dtype=torch.float64)
    assert module(empty, kv_cache=cache_for(module, 0), need_weights=True)[1].shape == (0, 2, 3, 0)
    none_new = torch.zeros(2, 0, D_IN, dtype=torch.float64)
    assert module(none_new, kv_cache=cache_for(module), need_weights=True)[1].shape == (2, 2, 0, 0)


@pytest.mark.parametrize("kind", [{}, {"page_size": 16}, {"window": (7, 0)}])
def test_compiles_to_one_graph(kind):
    torch._dynamo.reset()
    module = made("MultiHeadAttention", "all")
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    x = sequences(2, 3)
    ours, expected = cache_for(module, **kind), cache_for(module, **kind)
    with torch.no_grad():
        for _ in range(3):
            results = [f(x, kv_cache=c, need_weights=True) for f, c in ((compiled, ours), (module, expected))]
            for found, target in zip(*results, strict=True):
                assert_same(found, target)
