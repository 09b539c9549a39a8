"""Promise: attention of DTensors, however they are sharded, is attention of whole tensors, and stays sharded."""

import re
from typing import Any

import pytest
import torch
from support.cases import seeded
from support.ranks import tensors
from support.ranks.pool import pool

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")

DROPPED = {"dropout_p": 0.3}


def inputs(batch: int, heads: tuple[int, int], seqlens: tuple[int, int]) -> list[torch.Tensor]:
    seeded(1)
    shapes = (batch, heads[0], seqlens[0], 8), (batch, heads[1], seqlens[1], 8), (batch, heads[1], seqlens[1], 4)
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def every_option(batch: int, heads: int, seqlens: tuple[int, int]) -> dict[str, Any]:
    """Options of all kinds of shapes."""
    seeded(2)
    return {
        "window": (9, 3),
        "softcap": 2.0,
        "bias": torch.randn(heads, *seqlens).double(),
        "mask": torch.rand(batch, 1, *seqlens) < 0.8,
        "key_ranges": torch.randint(seqlens[1] + 1, (batch, seqlens[0], 4)).sort(-1).values.unflatten(-1, (2, 2)),
        "alibi_slopes": torch.rand(batch, heads).double(),
        "relative_bias": torch.randn(batch, heads, 9).double(),
        "sinks": torch.randn(heads).double(),
        "q_offset": torch.randint(-2, 5, (batch,)),
        **DROPPED,
    }


def run(
    size: int, name: str, places: Any, qkv: Any, packing: Any = (), options: Any = None, shards: Any = None
) -> list[Any]:
    first, *others = pool().run(size, tensors.compare, name, places, qkv, packing, options or {}, shards or {})
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("seqlens", [(13, 13), (5, 21), (1, 9)])
def test_sequences(size: int, seqlens: tuple[int, int]) -> None:
    """Sharded over positions, which torch cuts into unequal parts."""
    for options in ({}, DROPPED, {"causal": False}):
        placements, kinds = run(size, "attention", [(2, 2, 2)], inputs(2, (4, 2), seqlens), (), options)
        assert placements == "(Shard(dim=2),)"
        assert all(kinds)


@pytest.mark.parametrize("shards", [{}, {"bias": 1, "mask": 2, "key_ranges": 1}, {"bias": 0, "sinks": 0, "mask": 3}])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_options(dim: int, shards: dict[str, int]) -> None:
    """Every option at once, as plain tensors or as DTensors, sharded in the dimension of q or in another."""
    options = every_option(4, 4, (11, 14))
    placements, _ = run(2, "attention", [(dim,) * 3], inputs(4, (4, 2), (11, 14)), (), options, shards)
    assert placements == f"(Shard(dim={dim}),)"


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ((0, 0, 0), "(Shard(dim=0),)"),
        ((1, 1, 1), "(Shard(dim=1),)"),
        ((1, None, None), "(Shard(dim=1),)"),
        ((None, 2, 2), "(Shard(dim=2),)"),
        ((3, 2, 1), "(Shard(dim=2),)"),
        ((None, None, None), "(Replicate(),)"),
    ],
)
def test_dropout(places: tuple[int | None, ...], expected: str) -> None:
    """The weights that one process drops, though ranks' generators differ; rank 0's seed is used."""
    found, _ = run(3, "attention", [places], inputs(3, (6, 3), (7, 7)), (), DROPPED)
    assert found == expected


@pytest.mark.parametrize("places", [(1, None, None), (0, 0, 0)], ids=["heads", "batch"])
def test_numbers_that_cannot_be_divided(places: tuple[int | None, ...]) -> None:
    """Query heads without their KV heads, and one sequence for three ranks, are put together."""
    options = {**DROPPED, "alibi_slopes": torch.rand(1, 4).double()}
    assert run(3, "attention", [places], inputs(1, (4, 2), (7, 7)), (), options)[0] == "(Replicate(),)"


def test_plain_options_without_dropout() -> None:
    """Options that are not DTensors beside q, k and v that are."""
    options = {"sinks": torch.ones(4).double(), "bias": torch.rand(2, 4, 7, 7).double()}
    for dim in (0, 1):
        run(2, "attention", [(dim,) * 3], inputs(2, (4, 2), (7, 7)), (), options)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_max_score(dim: int) -> None:
    options = {"sinks": torch.randn(4).double(), "return_max_score": True}
    shards = {"sinks": 0} if dim == 1 else {"sinks": None}
    assert run(2, "attention", [(dim,) * 3], inputs(2, (4, 2), (7, 7)), (), options, shards)[1] == [True] * 5


def test_meshes_of_two_dimensions() -> None:
    for far, near in ((0, 2), (2, 1), (0, 1)):
        qkv, options = inputs(4, (8, 4), (10, 10)), {**DROPPED, "sinks": torch.ones(8).double(), "dropout_seed": 5}
        options["return_max_score"] = True
        assert (
            run(8, "attention", [(far,) * 3, (near,) * 3], qkv, (), options)[0]
            == f"(Shard(dim={far}), Shard(dim={near}))"
        )


@pytest.mark.parametrize("options", [{}, {**DROPPED, "window": (5, 0)}], ids=["plain", "dropout"])
@pytest.mark.parametrize("dim", [0, 1, None])
def test_packed(dim: int | None, options: dict[str, Any]) -> None:
    """Sharded over tokens, wherever sequences begin, over heads, or whole."""
    seeded(3)
    qkv = [torch.randn(23, heads, 8, dtype=torch.float64) for heads in (4, 2, 2)]
    begins = torch.tensor([0, 3, 3, 15, 22])
    learned = {"alibi_slopes": torch.rand(4, 4).double(), "sinks": torch.randn(4).double()}
    learned["return_max_score"] = True
    several = torch.randint(4, (23, 6)).sort(-1).values.view(23, 3, 2)
    given = {**options, **learned, "key_ranges": several} if options else {}
    placements, kinds = run(2, "attention_varlen", [(dim,) * 3], qkv, (begins, begins, 12, 12), given)
    assert placements == ("(Replicate(),)" if dim is None else f"(Shard(dim={dim}),)")
    assert all(kinds)


@pytest.mark.parametrize(
    ("name", "places", "options", "message"),
    [
        (
            "attention",
            [2, None],
            {"k": torch.zeros(8, 8, 8, 4)},
            "TypeError: pyattn: k must be a DTensor on the mesh of",
        ),
        ("attention", [2, 2], {}, "NotImplementedError: pyattn: each dimension of q must be sharded by one dimension"),
        ("attention", [0, None], {"shape": (8, 2, 8, 8, 4)}, "NotImplementedError: pyattn: DTensors must have 4 dim"),
        ("attention", [2, None], {"window": (-2, 0)}, "ValueError: pyattn: window must be "),
        ("attention", [2, None], {"is_causal": True}, "TypeError: pyattn: .* no argument is_causal"),
        ("attention", [0, None], {"dropout_p": 2.0}, "ValueError: pyattn: dropout_p must be at least 0 and below 1"),
        ("attention", [2, None], {"sinks": torch.zeros(3)}, "ValueError: pyattn: sinks must"),
        (
            "attention_varlen",
            [0, None],
            {"mask": torch.ones(8, 8).bool()},
            "NotImplementedError: pyattn: packed sequences take no mask, got one of shape",
        ),
        (
            "attention_varlen",
            [0, None],
            {"seqused_k": torch.tensor([3])},
            "NotImplementedError: pyattn: seqused_k must",
        ),
    ],
)
def test_refusals(name: str, places: list[int | None], options: dict[str, Any], message: str) -> None:
    errors = set(pool().run(8, tensors.refusal, name, places, options))
    assert len(errors) == 1
    assert re.match(message, errors.pop())


@pytest.mark.parametrize("places", [[2], [None], [2, None], [0, 2]], ids=str)
def test_one_rank(places: list[int | None]) -> None:
    """Whatever one rank alone gives, every rank raises, and the next call is right."""
    for outcomes in zip(*pool().run(8 if len(places) > 1 else 2, tensors.of_one_rank, places), strict=True):
        for label, error, fault in outcomes:
            assert re.match(r"(TypeError|ValueError|NotImplementedError): pyattn: .*\b(got|has)\b .+", error), (
                label,
                error,
            )
            assert not fault, (label, fault)
