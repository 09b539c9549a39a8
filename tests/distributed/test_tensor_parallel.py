"""Promise: a multi-head module divided among ranks gives the results and gradients of one process."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.modules import CACHED, EXTRAS, WITH_EXTRAS
from support.ranks import compiled, parallel
from support.ranks.pool import pool

from pyattn import masks, nn
from pyattn.distributed.tensor_parallel.plans import plan_of

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")

SIZES = (2, 4)
HEADS = {name: 8 if name in (*WITH_EXTRAS, "MHAPyTorchScaledDotProduct") else 4 for name in parallel.CASES}


def given(name: str) -> list[dict[str, Any]]:
    """Options of calls: masks and biases with and without heads, ranges, and weights."""
    heads = HEADS[name]
    generator = torch.Generator().manual_seed(5)
    mask = torch.rand(2, heads, 7, 7, generator=generator) < 0.7
    bias = torch.randn(heads, 7, 7, generator=generator, dtype=torch.float64)
    ranges = {} if name in ("MHAPyTorchClass", "Attention") else {"key_ranges": masks.padding(torch.tensor([7, 5]), 7)}
    return [{"mask": mask, "bias": bias, "need_weights": True}, {"mask": mask[:, :1], "bias": bias[:1], **ranges}]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", parallel.CASES)
def test_results(name: str, size: int) -> None:
    """Forward and backward, in two dtypes, with dropout and without, masks, biases and weights."""
    cases: list[tuple[Any, ...]] = [(name, torch.float64, 0.3, {}, options) for options in given(name)]
    if size == 2:
        cases += [(name, torch.float64, 0.0), (name, torch.float32, 0.3), (name, torch.float64, 1.0)]
    pool().run(size, parallel.compare_all, cases)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", WITH_EXTRAS)
def test_extras(name: str, size: int) -> None:
    cases = [(name, torch.float64, 0.3, extra, {}) for extra in EXTRAS.values()]
    grouped = {"num_heads_kv": 4} if name != "GroupedQueryAttention" else {}
    cases.append((name, torch.float64, 0.3, EXTRAS["all"] | grouped, {"need_weights": True}))
    pool().run(size, parallel.compare_all, cases)


def test_a_mask_without_heads_of_the_tutorials() -> None:
    """Attention's mask of three dimensions has one for each sequence, not for each head."""
    mask = torch.rand(2, 7, 7) < 0.3
    pool().run(2, parallel.compare, "Attention", torch.float64, 0.3, {}, {"mask": mask})


@pytest.mark.parametrize("own_cache", [False, True])
def test_decoding(own_cache: bool) -> None:
    for name in ["GroupedQueryAttention"] if own_cache else CACHED:
        pool().run(2, parallel.decoding, name, own_cache)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("MultiHeadAttention", "fsdp"),
        ("MultiHeadAttentionCombinedQKV", "fsdp"),
        ("MultiHeadLatentAttention", "fsdp"),
        ("MHAPyTorchClass", "ddp"),
        ("MultiHeadLatentAttention", "ddp"),
        ("Ch03_MHA_Wrapper", "ddp"),
        ("GroupedQueryAttention", "checkpoint"),
        ("MultiHeadLatentAttention", "checkpoint"),
        ("MultiHeadAttentionWrapper", "checkpoint"),
    ],
)
def test_training(name: str, how: str) -> None:
    """On 4 x 2 ranks, beside data parallelism of two kinds, and with activations that are computed again."""
    pool().run(8, parallel.train, name, how)


@pytest.mark.parametrize("name", parallel.CASES)
def test_states(name: str) -> None:
    pool().run(2, parallel.states, name)


@pytest.mark.parametrize("name", ["MHAPyTorchClass", "Ch03_MHA_Wrapper"])
def test_distributed_checkpoints(name: str, tmp_path: Path) -> None:
    pool().run(8, parallel.saved, name, str(tmp_path))


@pytest.mark.parametrize(
    "name",
    [
        "MultiHeadAttention",
        "MultiHeadLatentAttention",
        "MHAPyTorchScaledDotProduct",
        "MHAPyTorchClass",
        "MultiHeadAttentionWrapper",
    ],
)
def test_one_graph(name: str) -> None:
    """torch.compile takes the module in one graph, with dropout, and gives the bits of an eager call."""
    for eager, graph in pool().run(2, compiled.of_module, name):
        assert all(torch.equal(a, b) for a, b in zip(eager, graph, strict=True))


def test_generators_out_of_step() -> None:
    pool().run(4, parallel.out_of_step)


def test_dtensors() -> None:
    pool().run(2, parallel.from_dtensor)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        (
            "CausalAttention",
            {0: (12, 8, 9, 0.0)},
            "TypeError: pyattn: module must be one of Multi.*got C",
        ),
        (
            "Attention",
            {0: (12, 3)},
            "ValueError: pyattn: num_heads must be a multiple of the mesh's .*, got 3 and 2",
        ),
        ("GroupedQueryAttention", {0: (12, 8, 0.0, 4, 1)}, "ValueError: pyattn: num_kv_groups must be .*, got 1 and 2"),
        ("MultiHeadAttentionWrapper", {0: (12, 2, 9, 0.0, 3)}, "ValueError: pyattn: num_heads must be .*, got 3 and 2"),
        ("Attention", {0: (12, 4), 1: (12, 2)}, "ValueError: pyattn: number of heads must be the same on all ranks"),
        (
            "Attention",
            {0: (12, 4), 1: (8, 4)},
            "ValueError: pyattn: parameters of module must be the same on",
        ),
    ],
    ids=["single", "heads", "groups", "list", "number", "width"],
)
def test_modules_that_cannot_be_divided(name: str, arguments: dict[int, tuple[Any, ...]], message: str) -> None:
    for error in pool().run(2, parallel.refusal, name, arguments):
        assert re.match(message, error)


def test_an_error_of_one_rank_reaches_all() -> None:
    first, second = pool().run(2, parallel.refusal, "Attention", {0: (12, 4), 1: (12, 3)})
    assert second.startswith("ValueError: pyattn: num_heads must be a multiple")
    assert first == "ValueError: pyattn: tensor_parallel failed on rank 1: " + second.partition("n: ")[2]


def test_a_module_is_divided_once() -> None:
    for error in pool().run(2, parallel.refusal, "Attention", {0: (12, 4)}, True):
        assert re.match(r"ValueError: pyattn: module must be whole, got a rank's part with heads range\(., .\)", error)


def test_refusals() -> None:
    expected = (
        "ValueError: pyattn: mesh must have one dimension, got DeviceMesh",
        "TypeError: pyattn: mesh must be DeviceMesh, got ",
        r"ValueError: pyattn: mask must have all 8 heads, or 1, got shape \(2, 7, 7\)",
        r"ValueError: pyattn: the last dimension of x must be 16, got shape \(2, 7, 5\)",
        "TypeError: pyattn: MultiHeadAttention.forward has no argument is_causal",
        "TypeError: pyattn: x must be Tensor, got 'x'",
    )
    for errors in pool().run(8, parallel.refusals_of_a_call):
        for error, message in zip(errors, expected, strict=True):
            assert re.match(message, error), error


@pytest.mark.parametrize("check", ["0", "1"])
def test_calls_that_differ(check: str) -> None:
    """The first call compares them, and with PYATTN_CHECK=1 every call: no rank waits for a sum that another lacks."""
    expected = (
        "x must be the same on all ranks, got torch.float64 of shape [2, 7, 16] on rank 0 and torch.float64 of shape "
        "[2, 6, 16] on rank 1",
        "mask must be the same on all ranks, got None on rank 0 and torch.bool of shape [7, 7] on rank 1",
        "arguments must be the same on all ranks, got ['x'] on rank 0 and ['x', 'mask'] on rank 1",
    )
    for errors in pool().run(2, parallel.differing_calls, check):
        for first, later, message in zip(errors[::2], errors[1::2], expected, strict=True):
            assert first == f"pyattn: {message}"
            assert later == (first if check == "1" else "no error")


def test_every_class_with_several_heads_has_a_plan() -> None:
    named = {cls.__name__ for cls in nn.MODULES if issubclass(cls, nn.heads.Heads)}
    planned = {name.partition(",")[0].removeprefix("book.") for name in parallel.CASES}
    assert named == planned | {"MultiHeadAttentionWithDSA"}  # refused: its indexer belongs to no head
    with pytest.raises(TypeError, match="got MultiHeadAttentionWithDSA"):
        plan_of(nn.book.MultiHeadAttentionWithDSA(8, 8, 0.0, 2))
