"""Promise: the functions on several ranks compile to one graph, whose results are those of eager calls to the bit."""

from typing import Any

import pytest
import torch
from support.cases import seeded
from support.ranks import compiled
from support.ranks.pool import pool

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")


NAMES = ("ring_attention", "ring_attention_varlen", "ulysses_attention")
PLACES = [
    *((name, size, meshed) for name in NAMES for size, meshed in ((2, False), (2, True))),
    # All ranks of the pool: torch names a new group by how many a rank has made.
    ("ring_attention 2x4", 8, True),
    ("usp_attention 2x4", 8, True),
]


@pytest.mark.parametrize(("name", "size", "meshed"), PLACES)
def test_one_graph(name: str, size: int, meshed: bool) -> None:
    """With gradients of q, k, v and of what is learned, and dropout whose seed rank 0 draws."""
    seeded(0)
    packed = name == "ring_attention_varlen"
    whole = torch.randn(3, *((20, 4, 8) if packed else (2, 4, 20, 8))).double().unbind()
    cu_seqlens = [torch.tensor([0, 7, 20])] * 2 if packed else []
    options: dict[str, Any] = {"sinks": torch.randn(4).double(), "dropout_p": 0.3, "window": (9, 0)}
    options["alibi_slopes"] = torch.rand(4).double()
    options["relative_bias"] = torch.randn(4, 11).double()
    if not packed:
        options["bias"] = torch.randn(4, 1, 20).double()
    for eager, graph in pool().run(size, compiled.both, name, meshed, whole, cu_seqlens, options):
        assert len(eager) == len(graph) == 6 + len(options) - 2
        assert all(torch.equal(a, b) for a, b in zip(eager, graph, strict=True))


FUNCTIONS = pytest.mark.parametrize("name", ["ring_attention", "attention_with_cache"])


@FUNCTIONS
def test_ranks_that_differ(name: str) -> None:
    """The ranks agree when the graph runs, so they all raise."""
    for error in pool().run(2, compiled.error_of, name, 2, False, (0.0, 1.0)):
        assert "softcap must be the same on all ranks, got 0.0 on rank 0 and 1.0 on rank 1" in error


@FUNCTIONS
def test_a_graph_of_one_rank(name: str) -> None:
    """As when the others have compiled too often; backward of a graph and an eager one would wait for one another."""
    assert pool().run(2, compiled.error_of, name, 1, False, (0.0, 0.0)) == ["", ""]
    for error in pool().run(2, compiled.error_of, name, 1, True, (0.0, 0.0)):
        expected = "torch.compile of a call with gradients must be the same on all ranks, got True on rank 0 and False"
        assert error == f"pyattn: {expected} on rank 1"


def test_strides_under_inductor() -> None:
    """Results have the strides that Inductor expects: it checks them."""
    whole = torch.randn(3, 2, 4, 20, 8).unbind()
    for eager, graph in pool().run(2, compiled.strided, whole):
        assert all(torch.equal(a, b) for a, b in zip(eager, graph, strict=True))


@pytest.mark.parametrize("page_size", [None, 16])
def test_one_graph_over_caches(page_size: int | None) -> None:
    """Backward of a cache with pages has copies of them."""
    seeded(0)
    k, v, q = torch.randn(2, 2, 20, 8).double(), torch.randn(2, 2, 20, 8).double(), torch.randn(2, 4, 3, 8).double()
    options: dict[str, Any] = {"sinks": torch.randn(4).double(), "dropout_p": 0.3, "window": (9, 0)}
    options |= {"alibi_slopes": torch.rand(4).double(), "relative_bias": torch.randn(4, 11).double()}
    options |= {"bias": torch.randn(4, 3, 20).double(), "mask": torch.rand(3, 3) < 0.7}
    for eager, graph in pool().run(3, compiled.decoded, k, v, q, page_size, options):
        assert len(eager) == len(graph) == 3 + 5 + 3
        assert all(torch.equal(a, b) for a, b in zip(eager, graph, strict=True))


@pytest.mark.parametrize("page_size", [None, 16])
def test_a_cache_that_changes_after_attention(page_size: int | None) -> None:
    """Backward uses the rows and lengths before a change later in the graph."""
    for eager, graph in pool().run(2, compiled.changed_after, page_size):
        torch.testing.assert_close(graph, eager)


@pytest.mark.parametrize(
    ("name", "size", "dims"),
    [
        *(("attention", 2, (dim,)) for dim in (0, 1, 2)),
        ("attention", 8, (0, 2)),
        ("attention_varlen", 2, (0,)),
        ("attention_varlen", 2, (1,)),
    ],
)
def test_one_graph_of_dtensors(name: str, size: int, dims: tuple[int, ...]) -> None:
    """Also with dropout, whose seed rank 0 draws in the graph."""
    seeded(0)
    packed = name == "attention_varlen"
    whole = torch.randn(3, *((20, 4, 8) if packed else (4, 4, 20, 8))).double().unbind()
    packing = (*[torch.tensor([0, 7, 20])] * 2, 13, 13) if packed else ()
    options = {"alibi_slopes": torch.rand(4).double(), "dropout_p": 0.3, "window": (9, 0)}
    for eager, graph in pool().run(size, compiled.of_dtensors, name, dims, whole, packing, options):
        assert all(torch.equal(a, b) for a, b in zip(eager, graph, strict=True))
