"""Promise: need_weights=True over a cache gives the last rows of the weights over all tokens."""

import pytest
import torch
from support.modules import ARGUMENTS, D_IN, EXTRAS, assert_same, cache_for, made, sequences

from pyattn import nn


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


def test_nothing_is_there():
    """No batch, and no new tokens."""
    module = made("MultiHeadAttention")
    empty = torch.zeros(0, 3, D_IN, dtype=torch.float64)
    assert module(empty, kv_cache=cache_for(module, 0), need_weights=True)[1].shape == (0, 2, 3, 0)
    none_new = torch.zeros(2, 0, D_IN, dtype=torch.float64)
    assert module(none_new, kv_cache=cache_for(module), need_weights=True)[1].shape == (2, 2, 0, 0)


@pytest.mark.parametrize("kind", [{}, {"page_size": 16}, {"window": (7, 0)}])
def test_compiles_to_one_graph(kind):
    """Also for prompts of different lengths."""
    module = made("MultiHeadAttention", "all")
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    x, lengths = sequences(2, 3), torch.tensor([3, 1])
    ours, expected = cache_for(module, **kind), cache_for(module, **kind)
    with torch.no_grad():
        for _ in range(3):
            calls = (compiled, ours), (module, expected)
            results = [f(x, kv_cache=c, lengths=lengths, need_weights=True) for f, c in calls]
            for found, target in zip(*results, strict=True):
                assert_same(found, target)
    assert torch.equal(ours.lengths, expected.lengths)
