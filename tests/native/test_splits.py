"""Promise: CUDA kernels split many keys among thread blocks, and only the order of sums changes."""

import math
from typing import Any

import pytest
import torch
from support.backends import Backend
from support.cases import Case, assert_case_accurate, assert_equal, each_dtype
from support.yardstick import assert_accurate, in_double
from torch import Tensor

from pyattn import reference

CASES = [
    Case(1, 2, 2, 1, 256, 24, 20),
    Case(1, 2, 2, 1, 257, 24, 20),
    Case(2, 3, 1, 1, 700, 64, 64),
    Case(1, 5, 1, 2, 2000, 31, 33),
    Case(1, 4, 2, 3, 600, 100, 128, causal=False, softmax_scale=-0.3),
    Case(1, 2, 2, 1, 530, 200, 250),
    Case(1, 3, 1, 7, 700, 33, 40, window=(400, -1)),
    Case(2, 2, 1, 3, 600, 40, 40, q_offset=250),
    Case(1, 2, 1, 2, 900, 40, 40, key_ranges="random", sinks=True),
    Case(1, 2, 1, 4, 700, 40, 40, mask="random hqk", softcap=3.0, alibi="h", sinks=True, wide=True, relative="h 400"),
    Case(1, 2, 1, 3, 700, 20, 40, bias="bands hqk", key_ranges="documents", causal=False),
    Case(1, 4, 2, 2, 700, 40, 20, dropout_p=0.3),
    Case(1, 2, 1, 2, 600, 64, 40, sinks=True, softmax_scale=1e-11),
    Case(1, 1, 1, 40, 700, 160, 40),
    Case(1, 8, 1, 2, 1100, 128, 128),
    Case(1, 17, 1, 1, 600, 64, 64),
    Case(1, 2, 2, 1, 700, 256, 256, softmax_scale=-0.2),
]
"""One split, two, three, eight; more keys per split if there are more rows; two tiles of wide rows; 16 rows and 17."""


def forward(backend: Backend, qkv: tuple[Tensor, ...], **options: Any) -> tuple[Tensor, Tensor]:
    out, lse = backend.attention(*qkv, return_lse=True, **options)
    return out, lse


@each_dtype
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward(cuda_kernels: Backend, case: Case, dtype: torch.dtype) -> None:
    """By the rule of yardstick.py, and with the same bits each time."""
    qkv, options = case.inputs(dtype), case.options | case.tensors(dtype)
    ours = forward(cuda_kernels, qkv, **options)
    plain = reference.attention(*qkv, return_lse=True, **options)
    exact = reference.attention(*(t.double() for t in qkv), return_lse=True, **in_double(options))
    for name, x, y, truth in zip(("out", "lse"), ours, plain, exact, strict=True):
        assert_accurate(name, x, y, truth)
    assert_equal(forward(cuda_kernels, qkv, **options), ours)


@each_dtype
@pytest.mark.parametrize(
    "case",
    [Case(1, 2, 1, 2, 300, 24, 20), Case(1, 2, 1, 3, 300, 40, 40, softcap=3.0, alibi="h", sinks=True)],
    ids=str,
)
def test_backward_takes_what_is_merged(cuda_kernels: Backend, case: Case, dtype: torch.dtype) -> None:
    assert_case_accurate(case, dtype, cuda_kernels.attention)


@each_dtype
@pytest.mark.parametrize(
    "case",
    [
        Case(1, 1, 1, 70, 600, 40, 40),
        Case(1, 1, 1, 70, 600, 40, 40, softcap=3.0, alibi="h", sinks=True, relative="h 90"),
    ],
    ids=str,
)
def test_the_same_rows_among_many(cuda_kernels: Backend, case: Case, dtype: torch.dtype) -> None:
    """The keys of these rows are not split."""
    (q, k, v), options = case.inputs(dtype), case.options | case.tensors(dtype)
    many = forward(cuda_kernels, (q, k, v), **options)
    few = forward(cuda_kernels, (q[:, :, -3:], k, v), **options)
    for name, x, y in zip(("out", "lse"), few, many, strict=True):
        assert_accurate(name, x, y[:, :, -3:], y[:, :, -3:].double())


LENGTHS = [(2, 300), (70, 70), (1, 0), (1, 700), (9, 700), (0, 300), (1, 256)]
"""Queries and keys: split or not, with more rows than can be split, without keys, without queries."""


@each_dtype
@pytest.mark.parametrize("options", [{}, {"window": (280, -1), "softcap": 3.0}], ids=str)
def test_same_bits_alone_in_a_batch_and_packed(
    cuda_kernels: Backend, options: dict[str, Any], dtype: torch.dtype
) -> None:
    """The split of a sequence's keys depends on no other sequence."""
    of_sequences = [
        Case(1, 4, 2, *n, 40, 36).inputs(dtype) for n in LENGTHS if dtype.itemsize < 8 or n[0] * n[1] < 1000
    ]
    alone = [forward(cuda_kernels, qkv, **options) for qkv in of_sequences]
    one = of_sequences[0]
    together = forward(cuda_kernels, tuple(torch.cat([t.neg(), t, t]) for t in one), **options)
    assert_equal(tuple(t[1:2] for t in together), alone[0])
    for count in (len(of_sequences), 1):  # with and without a sequence of too many rows to split
        some = of_sequences[:count]
        packed = [torch.cat([t[0].transpose(0, 1) for t in each]) for each in zip(*some, strict=True)]
        starts = [torch.tensor([0, *(qkv[i].shape[2] for qkv in some)]).cumsum(0) for i in (0, 1)]
        longest = [int(t.diff().max()) for t in starts]
        out, lse = cuda_kernels.attention_varlen(*packed, *starts, *longest, return_lse=True, **options)
        assert torch.equal(out, torch.cat([x[0].transpose(0, 1) for x, _ in alone[:count]]))
        assert torch.equal(lse, torch.cat([x[0] for _, x in alone[:count]], 1))


@each_dtype
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_what_is_not_seen_changes_no_bit(cuda_kernels: Backend, dtype: torch.dtype, softcap: float, bad: float) -> None:
    """Row i sees the keys from 190 + i to 510 + i: in each of three splits, only some rows see some keys."""
    q, k, v = Case(1, 2, 1, 4, 800, 24, 40).inputs(dtype)
    options: dict[str, Any] = {"q_offset": 510, "window": (320, 0), "softcap": softcap}
    clean = forward(cuda_kernels, (q, k, v), **options)
    for i in range(4):
        seen = slice(190 + i, 511 + i)
        k_, v_ = torch.full_like(k, bad), torch.full_like(v, bad)
        k_[:, :, seen], v_[:, :, seen] = k[:, :, seen], v[:, :, seen]
        out, lse = forward(cuda_kernels, (q, k_, v_), **options)
        assert_equal((out[:, :, i], lse[:, :, i]), tuple(t[:, :, i] for t in clean))
        assert not out[:, :, [j for j in range(4) if j != i]].isfinite().any()


@each_dtype
@pytest.mark.parametrize("position", [0, 255, 256, 599])
def test_nan_that_is_seen_arrives(cuda_kernels: Backend, dtype: torch.dtype, position: int) -> None:
    q, k, v = Case(1, 2, 1, 2, 600, 24, 40).inputs(dtype)
    k[:, :, position] = math.nan
    out, lse = forward(cuda_kernels, (q, k, v), causal=False)
    assert out.isnan().all()
    assert lse.isnan().all()
    v[:, :, position] = math.nan
    out, lse = forward(cuda_kernels, (q, k.nan_to_num(), v), causal=False)
    assert out.isnan().all()
    assert lse.isfinite().all()


@each_dtype
@pytest.mark.parametrize("sinks", [False, True])
def test_rows_that_see_no_key(cuda_kernels: Backend, dtype: torch.dtype, sinks: bool) -> None:
    """Beside a row that sees one, and where no row does."""
    q, k, v = Case(1, 2, 1, 3, 600, 24, 40).inputs(dtype)
    options = {"sinks": torch.tensor([0.5, -math.inf]).to(dtype)} if sinks else {}
    empty = torch.tensor([0.5, -math.inf])[:, None] if sinks else torch.full((2, 1), -math.inf)
    for offset, blind in ((-2, 2), (-5, 3)):
        out, lse = forward(cuda_kernels, (q, k, v), q_offset=offset, **options)
        assert (out[:, :, :blind] == 0).all()
        assert torch.equal(lse[0, :, :blind], empty.to(lse.dtype).expand(2, blind))
        assert out[:, :, blind:].isfinite().all()


@each_dtype
def test_scores_of_minus_infinity(cuda_kernels: Backend, dtype: torch.dtype) -> None:
    """Keys that score -inf have weight 0, even if they fill a split; a row with no others is NaN, as in softmax."""
    q, k, v = Case(1, 1, 1, 2, 700, 24, 40).inputs(dtype)
    q = q.abs() + 0.1
    k[:, :, :520] = -math.inf
    out, _ = forward(cuda_kernels, (q, k[:, :, :520], v[:, :, :520]), causal=False)
    assert out.isnan().all()
    if cuda_kernels.keeps_infinity(dtype):
        out, _ = forward(cuda_kernels, (q, k, v), causal=False)
        truth = reference.attention(*(t.double() for t in (q, k[:, :, 520:], v[:, :, 520:])), causal=False)
        assert_accurate("out", out, truth, truth)
