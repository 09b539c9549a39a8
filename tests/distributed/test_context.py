"""Promise: within context_parallel, a script for one process computes on parts what it computes alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support import fresh
from support.cases import seeded
from support.ranks import contexts
from support.ranks.pool import pool
from torch.nn.functional import scaled_dot_product_attention

from pyattn import attention

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")

LAYOUTS = ("zigzag", "contiguous", "chunk")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kwargs", [{"is_causal": True}, {}, {"scale": 0.3}], ids=["causal", "mask", "scale"])
def test_context_parallel(layout: str, kwargs: dict[str, Any]) -> None:
    """A script for one process, with its buffers cut in place and torch's own function called."""
    (truth,) = pool().run(1, contexts.training_step, None, kwargs)
    for found in pool().run(3, contexts.training_step, layout, kwargs):
        torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("how", ["module", "checkpoint"])
def test_context_parallel_reaches_every_call(how: str) -> None:
    """Calls within a function of torch, and those that checkpoints make in backward."""
    (truth,) = pool().run(1, contexts.training_step, None, {"is_causal": True}, how)
    for found in pool().run(3, contexts.training_step, "zigzag", {"is_causal": True}, how):
        torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)


def test_buffers_of_a_context() -> None:
    """Views are cut and whole again, and the memory that they share with others is as it was."""
    whole = torch.randn(4, 10)
    for found in pool().run(2, contexts.buffers, whole):
        for (inside, after, base), view in zip(found, (whole[:, ::2], whole.T, whole[:1].expand(4, -1)), strict=True):
            assert torch.equal(inside, view)
            assert torch.equal(after, view)
            assert torch.equal(base, whole)


def test_buffers_that_are_not_restored() -> None:
    whole = torch.randn(3, 10)
    for part, again in pool().run(2, contexts.not_restored, whole):
        assert part.shape == (3, 5)
        assert torch.equal(again, whole)


def test_a_causal_mask_begins_at_the_upper_left_corner() -> None:
    """Where queries and keys differ in number: as torch has it, unlike pyattn."""
    seeded(0)
    qkv = [torch.randn(1, 2, length, 8).double() for length in (7, 12, 12)]
    expected = scaled_dot_product_attention(*qkv, is_causal=True)
    for found in pool().run(2, contexts.attended, qkv, {"is_causal": True}):
        torch.testing.assert_close(found, expected)


def test_dropout() -> None:
    """The weights that one process drops, with a seed that rank 0 draws."""
    qkv = torch.randn(3, 1, 2, 12, 8).double().unbind()
    torch.manual_seed(0)
    expected = attention(*qkv, dropout_p=0.4)
    for found in pool().run(2, contexts.attended, qkv, {"is_causal": True, "dropout_p": 0.4}):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("how", ["function", "module", "checkpoint"])
def test_one_graph(how: str) -> None:
    """torch.compile replaces torch's function too, with the bits of eager calls."""
    for eager, graph in pool().run(3, contexts.compiled, how):
        assert all(torch.equal(a, b) for a, b in zip(eager, graph, strict=True))


def test_a_graph_is_of_one_layout() -> None:
    for layouts in pool().run(2, contexts.compiled_once, torch.randn(12, 1, 16)):
        for eager, graph in layouts:
            assert torch.equal(eager, graph)


def test_the_first_graph_of_a_process(tmp_path: Path) -> None:
    """torch.compile lists the functions that may be replaced when it first needs them."""
    code = f"from support.ranks import contexts; print(contexts.first_graph({str(tmp_path / 'rendezvous')!r}))"
    found = fresh.python("-c", code)
    assert "pyattn_distributed.attend" in found.stdout, found.stderr
