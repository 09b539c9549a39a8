"""Promise: a module compiles to one graph with all that its callers add, and over a cache once for all lengths."""

import pytest
import torch
from support.assertions import assert_close
from support.modules import (
    ARGUMENTS,
    CONTEXT_LENGTH,
    ROWS,
    WITH_EXTRAS,
    WITH_RANGES,
    assert_same,
    cache_for,
    doubles,
    gradients,
    made,
    sequences,
    set_dropout,
)

from pyattn import masks, nn

# torch's own warning while it traces.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


VARIANTS = [*((name, "") for name in ARGUMENTS), *((name, "all") for name in WITH_EXTRAS), ("MHAPyTorchClass", "key")]
"""Modules; three with all extras; one with a key that all queries see, which takes no key_ranges."""


@pytest.mark.parametrize(("name", "extra"), VARIANTS)
def test_one_graph(name, extra):
    """In training with dropout: weights and gradients, with key_ranges, mask and bias where the module takes them.

    This graph holds the plain call's, because the weights are computed after its result.
    """
    arguments = () if extra == "key" else WITH_RANGES.get(name, ())
    module = made(name, extra) if extra == "all" else doubles(name, *arguments)[0]
    set_dropout(module, 0.5)
    leaves, options = [sequences(2, ROWS).requires_grad_()], {}
    if name in WITH_RANGES:
        leaves += [torch.randn(2, 1, 1, ROWS, dtype=torch.float64).requires_grad_()]
        options = {"mask": torch.rand(2, 1, ROWS, ROWS) < 0.7, "bias": leaves[1]}
        options |= {} if extra == "key" else {"key_ranges": masks.padding([ROWS, 5], ROWS)}
    results = []
    for call in (torch.compile(module, backend="eager", fullgraph=True), module):
        torch.manual_seed(0)
        out, weights = call(leaves[0], need_weights=True, **options)
        results.append((out.detach(), weights.detach(), *gradients(out, leaves)))
    assert_close(*results)


@pytest.mark.parametrize("name", WITH_EXTRAS)
def test_once_for_all_lengths(name):
    """Over a cache, with every extra, a mask and a bias."""
    module = made(name, "all")
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    x, mask = sequences(2, ROWS), torch.rand(2, 1, ROWS, CONTEXT_LENGTH) < 0.4
    if name == "Attention":
        mask |= nn.causal_mask(CONTEXT_LENGTH)[:, :, :ROWS]
    bias = torch.randn(module.num_heads, 1, CONTEXT_LENGTH, dtype=torch.float64)
    ours, expected = cache_for(module), cache_for(module)
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        for t in range(ROWS):
            step, options = x[:, t : t + 1], {"mask": mask[:, :, t : t + 1].clone(), "bias": bias}
            assert_same(compiled(step, **options, kv_cache=ours), module(step, **options, kv_cache=expected))
