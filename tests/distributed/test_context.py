"""Promise: within context_parallel, a script for one process computes on parts what it computes alone."""

from typing import Any

import pytest
import torch
from distributed import ranks
from distributed.pool import pool

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")

LAYOUTS = ("zigzag", "contiguous", "chunk")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kwargs", [{"is_causal": True}, {}, {"scale": 0.3}], ids=["causal", "mask", "scale"])
def test_context_parallel(layout: str, kwargs: dict[str, Any]) -> None:
    """A script for one process, with its buffers cut in place and torch's own function called."""
    (truth,) = pool().run(1, ranks.training_step, None, kwargs)
    for found in pool().run(3, ranks.training_step, layout, kwargs):
        torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("how", ["module", "checkpoint"])
def test_context_parallel_reaches_every_call(how: str) -> None:
    """Calls within a function of torch, and those that checkpoints make in backward."""
    (truth,) = pool().run(1, ranks.training_step, None, {"is_causal": True}, how)
    for found in pool().run(3, ranks.training_step, "zigzag", {"is_causal": True}, how):
        torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)


def test_buffers_of_a_context() -> None:
    """Views are cut and whole again, and the memory that they share with others is as it was."""
    whole = torch.randn(4, 10)
    for found in pool().run(2, ranks.buffers, whole):
        for (inside, after, base), view in zip(found, (whole[:, ::2], whole.T, whole[:1].expand(4, -1)), strict=True):
            assert torch.equal(inside, view)
            assert torch.equal(after, view)
            assert torch.equal(base, whole)
