"""Promise: wrong or different arguments raise on every rank; none waits forever."""

import re
from typing import Any

import pytest
import torch
from support.cases import seeded
from support.ranks import refusals
from support.ranks.pool import Pool, pool

from pyattn import attention
from pyattn.options.attention_options import Draws

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")

ONE = torch.zeros(1, 2, 4, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({1: {"softcap": 2.0}}, "softcap must be the same on all ranks, got 0.0 on rank 0 and 2.0 on rank 1"),
        ({2: {"layout": "contiguous"}}, "layout must be the same on all ranks, got zigzag on rank 0 and contiguous on"),
        ({0: {"q": ONE.double(), "k": ONE.double(), "v": ONE.double()}}, "dtype must be the same on all ranks, got "),
        ({1: {"q": ONE[:, :1], "k": ONE[:, :1], "v": ONE[:, :1]}}, "shape of q without its positions must be the same"),
        ({1: {"q": ONE[:, :, :2]}}, r"q of 10 positions must be cut into parts of \[3, 4, 3\] for layout zigzag, got "),
        ({1: {"dropout_p": 0.5, "dropout_seed": 1}}, "dropout_p must be the same on all ranks, got 0.0 on rank 0 and"),
        (
            {1: {"return_max_score": True}},
            "return_max_score must be the same on all ranks, got False on rank 0 and True",
        ),
        ({2: {"mask": torch.ones(3, 12).bool()}}, "mask must be the same on all ranks, got None on rank 0 and "),
        (
            {1: {"key_ranges": torch.zeros(1, 4, 2).long()}},
            "intervals of key_ranges must be the same on all ranks, got None on rank 0 and 1 on rank 1",
        ),
        (
            {1: {"q": ONE.clone().requires_grad_()}},
            r"requires_grad of q, k, v, bias, .* must be the same on all ranks, got \[False, .* and \[True, False, ",
        ),
        ({1: {"softmax_scale": -0.0}, 0: {"softmax_scale": 0.0}, 2: {"softmax_scale": 0.0}}, "softmax_scale must be"),
    ],
    ids=["option", "layout", "dtype", "heads", "length", "dropout", "max_score", "mask", "ranges", "gradient", "sign"],
)
def test_arguments_that_differ(changes: dict[int, dict[str, Any]], message: str) -> None:
    """Every rank raises, before any waits for another's keys."""
    errors = pool().run(3, refusals.refusal, changes)
    assert len(set(errors)) == 1
    assert re.match(f"ValueError: pyattn: {message}", errors[0])


def test_an_error_of_one_rank_reaches_all() -> None:
    errors = pool().run(3, refusals.refusal, {1: {"window": (-2, 0)}})
    assert errors[1].startswith("ValueError: pyattn: window ")
    assert (
        errors[0]
        == errors[2]
        == "ValueError: pyattn: ring_attention failed on rank 1: " + errors[1].partition("n: ")[2]
    )


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("ring_attention", {"q": ONE.to_sparse()}, "q must be a dense tensor, got layout torch.sparse_coo"),
        ("ring_attention", {"v": ONE[:, :, :3]}, "k and v must have as many positions as one another, got 4 and 3"),
        ("ring_attention_varlen", {"cu_seqlens_q": [0, 8]}, "cu_seqlens_q must be Tensor, got [0, 8]"),
        (
            "ring_attention_varlen",
            {"cu_seqlens_k": torch.tensor([0.0, 8.0])},
            "cu_seqlens_k must be (sequences + 1,) of int32 or int64, got torch.float32 of shape (2,)",
        ),
        ("attention_with_cache", {"q": ONE.to("meta")}, "q must be on the cache's device, got meta and cpu"),
        ("unshard", {"layout": "zig"}, "layout must be one of zigzag, contiguous, chunk, zigzag_varlen, got 'zig'"),
        ("unshard", {"tensor": None}, "tensor must be Tensor, got None"),
        (
            "context_parallel",
            {"key": ONE[:, :1]},
            "query, key and value must have as many heads as one another without enable_gqa, got 2, 1 and 2",
        ),
    ],
)
def test_an_argument_of_one_rank(name: str, changes: dict[str, Any], message: str) -> None:
    first, last = pool().run(2, refusals.of_one_rank, name, changes)
    assert last.partition(": ")[2] == f"pyattn: {message}"
    called = {"context_parallel": "ring_attention"}.get(name, name)
    assert first == f"ValueError: pyattn: {called} failed on rank 1: {message}"


@pytest.mark.parametrize("how", ["missing", "twice", "more"])
@pytest.mark.parametrize("name", ["ring_attention", "ring_attention_varlen", "attention_with_cache", "unshard"])
def test_arguments_that_do_not_fit_on_one_rank(name: str, how: str) -> None:
    """All ranks hear of it, also where Python refuses the call before the function runs; the next call is right."""
    check_misfit(2, name, how)


@pytest.mark.parametrize("how", ["missing", "more", "mesh", "group"])
def test_a_mesh_that_does_not_fit_on_one_rank(how: str) -> None:
    """A group or another mesh of the same ranks, in place of a mesh of two dimensions."""
    check_misfit(8, "usp_attention", how)


def check_misfit(size: int, name: str, how: str) -> None:
    *others, (last, result) = pool().run(size, refusals.misfit, name, how)
    kinds = {
        "missing": r"missing \d required positional",
        "twice": "got multiple values for argument '(q|tensor)",
    }
    kinds |= {"more": "takes .* by position|takes from 2 to 3 positional"}
    kinds |= dict.fromkeys(("mesh", "group"), "pyattn: mesh must be a DeviceMesh of two dimensions, got ")
    assert re.match(f"TypeError: .*({kinds[how]})", last)
    message = last.partition(": ")[2].removeprefix("pyattn: ")
    assert all(error == f"ValueError: pyattn: {name} failed on rank {size - 1}: {message}" for error, _ in others)
    assert result.isfinite().all()


@pytest.mark.parametrize(
    ("name", "other", "message"),
    [
        ("unshard", {"tensor": ONE.double()}, "dtype must be the same on all ranks, got torch.float32 on rank 0 and "),
        ("unshard", {"tensor": ONE[..., :7]}, "shape without dim must be the same on all ranks, got [1, 2, 8] on "),
        ("unshard", {"name": "attention_with_cache"}, "function must be the same on all ranks, got unshard on rank 0 "),
    ],
)
def test_calls_that_differ(name: str, other: dict[str, Any], message: str) -> None:
    """gloo would end the processes, were their messages of different sizes."""
    errors = pool().run(2, refusals.of_one_rank, name, other)
    assert errors[0] == errors[1]
    assert errors[0].startswith(f"ValueError: pyattn: {message}")


def test_rows_of_a_mask_are_the_ranks_own() -> None:
    errors = pool().run(2, refusals.refusal, {rank: {"mask": torch.ones(4 - rank, 8).bool()} for rank in (0, 1)})
    expected = (
        "ValueError: pyattn: mask must have 4 rows, those of the rank's queries, and 8 columns on rank 1, got 3 and 8"
    )
    assert errors == [expected] * 2


@pytest.mark.parametrize("name", ["ring_attention", "ulysses_attention"])
@pytest.mark.parametrize(
    "ranges",
    [[5, 2], [0, 9], [-1, 3], [3, 5, 1, 2], [0, 5, 4, 6]],
    ids=["reversed", "beyond", "negative", "unsorted", "overlapping"],
)
def test_key_ranges_of_one_rank_that_do_not_fit(ranges: list[int], name: str) -> None:
    rows = {0: torch.tensor(([0, 8] * 2)[: len(ranges)]).sort().values, 1: torch.tensor(ranges)}
    several = len(ranges) > 2
    given = {
        rank: {"key_ranges": row.view(1, 1, *(-1,) * several, 2).expand(1, 4, *(-1,) * (several + 1))}
        for rank, row in rows.items()
    }
    errors = pool().run(2, refusals.refusal, given, name)
    rule = "sorted, disjoint intervals 0" if several else "0"
    expected = f"key_ranges must hold {rule} <= begin <= end <= seqlen_k = 8, got {ranges} for query 0 of rank 1"
    assert errors[1] == f"ValueError: pyattn: {expected}"
    assert errors[0] == f"ValueError: pyattn: {name} failed on rank 1: {expected}"


def test_key_ranges_of_packed_sequences_end_with_them() -> None:
    """The last query of the first sequence, on rank 0, sees a key beyond its three."""
    tokens, begins = torch.zeros(3, 8, 2, 4), torch.tensor([0, 3, 8])
    ranges = torch.tensor([[0, 3], [1, 2], [0, 4], *[[0, 5]] * 5])
    for error in pool().run(2, refusals.packed_refusal, tokens, begins, ranges):
        assert "key_ranges must hold 0 <= begin <= end <= seqlen_k = 3, got [0, 4] for query 2 of rank 0" in error


@pytest.mark.parametrize("transform", ["grad", "vmap", "one rank"])
@pytest.mark.parametrize(
    "name", ["ring_attention", "ulysses_attention", "ring_attention_varlen", "attention_with_cache"]
)
def test_transforms_are_refused(name: str, transform: str) -> None:
    """On every rank, also if one alone is within a transform."""
    sentence = f"{name} has no rule for transforms of torch.func or forward mode"
    *others, last = pool().run(2, refusals.transformed, name, transform)
    assert last == f"NotImplementedError: pyattn: {sentence}"
    alone = f"ValueError: pyattn: {name} failed on rank 1: {sentence}"
    assert others == [alone if transform == "one rank" else last]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": torch.zeros(1, 2, 4, 5)}, "head_dim"),
        ({"sinks": torch.zeros(3)}, "sinks"),
        ({"sinks": torch.zeros(2).double()}, "sinks"),
        ({"mask": torch.ones(4, 12)}, "mask"),
        ({"alibi_slopes": torch.zeros(1, 2, 2)}, "alibi_slopes"),
        (
            {"dropout_p": 0.5, "dropout_seed": Draws(torch.tensor(3), torch.tensor([[0, -1, 0, 0, 0]]))},
            "dropout_origins",
        ),
        ({"dropout_p": 0.5, "dropout_seed": torch.zeros(2).long()}, "dropout_seed must be an int64 scalar, got"),
    ],
    ids=["columns", "sinks", "dtype", "mask", "slopes", "origin", "seed"],
)
def test_refused_calls_leave_no_message(arguments: dict[str, Any], message: str) -> None:
    """Arguments that are alike on all ranks but wrong are refused before anything is sent."""
    seeded(0)
    truth = attention(*torch.randn(3, 1, 2, 12, 8))
    for error, out in pool().run(3, refusals.refused_then_right, arguments):
        assert message in error
        torch.testing.assert_close(out, truth)


def test_groups_without_this_process() -> None:
    rule = "ValueError: pyattn: this process must be a rank of"
    both = Pool(sizes=(2,), module="support.ranks.refusals")  # a group is made by all processes
    try:
        outcomes = both.run(2, refusals.group_refusals)
    finally:
        both.close()
    for rank, errors in enumerate(outcomes):
        assert errors[:2] == [f"{rule} the group, got a group without it"] * 2
        assert all(error.startswith(f"{rule} the mesh, got rank {rank} and DeviceMesh(") for error in errors[2:4])
        assert errors[4:] == ["TypeError: pyattn: group must be a ProcessGroup or a DeviceMesh, got str"] * 2


def test_layouts_of_packed_sequences() -> None:
    layouts = "pyattn: layout must be one of zigzag, contiguous, chunk"
    given = "pyattn: cu_seqlens must be given for layout zigzag_varlen, and for no other, got"
    expected = (
        "ValueError: pyattn: dim must be a dimension of the tensor, got 3 and shape (9, 2, 8)",
        "ValueError: pyattn: dim must be a dimension of the tensor, got -4 and shape (9, 2, 8)",
        f"ValueError: {layouts}, zigzag_varlen, got 'zig'",
        f"ValueError: {given} none for zigzag_varlen",
        f"ValueError: {given} some for zigzag",
        "TypeError: pyattn: cu_seqlens must be (sequences + 1,) of int32 or int64, got torch.float32 of shape (5,)",
        "ValueError: pyattn: cu_seqlens must be (sequences + 1,) of int32 or int64, got torch.int64 of shape (1, 5)",
        "ValueError: pyattn: cu_seqlens must start at 0, never decrease and end at most at 9, got [1, 2, 3, 4, 10]",
        "ValueError: pyattn: a sequence of 9 has parts of [5, 4] in layout zigzag_varlen, got [3, 6]",
        f"ValueError: {layouts}, got 'zigzag_varlen'",
        f"ValueError: {layouts}, zigzag_varlen, got 'zig'",
        "ValueError: pyattn: cu_seqlens_q and cu_seqlens_k must have one length, got 5 and 4",
        "ValueError: pyattn: cu_seqlens_k must start at 0, never decrease and end at most at 9, got [1, 2, 3, 4, 10]",
        "ValueError: pyattn: q of 9 positions must be cut into parts of [5, 4] for layout zigzag_varlen, got [3, 6]",
        "ValueError: pyattn: q_offset must have shape [4], got [3]",
    )
    for errors in pool().run(2, refusals.layout_refusals):
        assert errors == list(expected)
