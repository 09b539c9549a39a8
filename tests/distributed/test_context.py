"""Promise: within context_parallel, a script for one process computes on parts what it computes alone; a wrong
argument on one rank raises on all.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from support import fresh
from support.cases import seeded
from support.ranks import contexts, refusals
from support.ranks.pool import pool
from torch.nn.functional import scaled_dot_product_attention

from pyattn import attention

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")

LAYOUTS = ("zigzag", "contiguous", "chunk")
ONE = torch.zeros(1, 2, 4, 8)


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


@pytest.mark.parametrize(
    ("changes", "positional", "message"),
    [
        ({"attn_mask": [True]}, (), "pyattn: attn_mask must be Tensor, got [True]"),
        ({"key": None, "value": ONE}, (ONE,), "pyattn: key must be Tensor, got None"),
        ({}, (ONE, ONE), "_arguments() missing 1 required positional argument: 'value'"),
        ({"dropout": 0.5}, (), "_arguments() got an unexpected keyword argument 'dropout'"),
        ({"buffer_seq_dims": [4]}, (), "pyattn: dim must be a dimension of the tensor, got 4 and shape (1, 2, 8, 8)"),
        ({"layout": "zig"}, (), "pyattn: layout must be one of zigzag, contiguous, chunk, got 'zig'"),
        ({"buffers": ONE}, (), "pyattn: buffers must be list or tuple, got torch.Tensor of shape (1, 2, 4, 8)"),
        ({"buffers": [None]}, (), "pyattn: each of buffers must be Tensor, got None"),
        ({"buffer_seq_dims": {2}}, (), "pyattn: buffer_seq_dims must be list or tuple, got {2}"),
        (
            {"no_restore_buffers": {ONE}},
            (),
            "pyattn: no_restore_buffers must be among buffers, got one of shape (1, 2, 4, 8) that is not",
        ),
        ({"buffer": ONE}, (), "context_parallel() got an unexpected keyword argument 'buffer'"),
    ],
    ids=["mask", "tensor", "missing", "unknown", "dim", "layout", "buffers", "None", "set", "others", "more"],
)
def test_a_context_of_one_rank(changes: dict[str, Any], positional: tuple[Any, ...], message: str) -> None:
    """Also arguments of the context itself: all ranks agree as they enter it."""
    first, last = (
        error.split(". Did you mean")[0]  # of Python 3.13
        for error in pool().run(2, refusals.in_a_context, changes, positional)
    )
    assert last.partition(": ")[2] == message
    called = "context_parallel" if changes.keys() & refusals.OF_CONTEXT else "ring_attention"
    assert first == f"ValueError: pyattn: {called} failed on rank 1: {message.removeprefix('pyattn: ')}"
