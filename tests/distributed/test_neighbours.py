"""Promise: within context_parallel every function that computes attention is the ring, or says that it can't be."""

import pytest
import torch
from support.ranks import neighbours
from support.ranks.pool import pool

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")

MODULES = "MultiHeadAttention", "MultiHeadAttention alibi", "MultiHeadAttention sinks"


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("name", [*neighbours.LAYERS, *MODULES])
def test_as_one_process(name: str, layout: str) -> None:
    (truth,) = pool().run(1, neighbours.step, name, None)
    for found in pool().run(2, neighbours.step, name, layout):
        torch.testing.assert_close(found, truth, rtol=1e-11, atol=1e-11)


def test_given_positions() -> None:
    (truth,) = pool().run(1, neighbours.rotary, None)
    for found in pool().run(3, neighbours.rotary, "zigzag"):
        torch.testing.assert_close(found, truth)


def test_one_graph() -> None:
    """A function that is compiled outside of the context is compiled again within it."""
    for calls in pool().run(2, neighbours.compiled):
        for eager, graph in calls:
            assert torch.equal(eager, graph)


def test_what_needs_all_positions_is_refused() -> None:
    for found in pool().run(2, neighbours.refusals):
        for name, error in found.items():
            rule = name.removesuffix(", softcap").partition(" by ")[0]
            assert f"pyattn: {rule} must be called outside of context_parallel" in error, (name, error)
            assert error.startswith("NotImplementedError") or rule == "torch's flex_attention", error
