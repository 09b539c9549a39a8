"""Promise: few queries against many keys, cut into ranges of 1024, blocks of 512 or 96 and vectors, are exact."""

import math

import pytest
import torch
from support.backends import Backend
from support.cases import Case, assert_case_accurate, assert_equal, each_dtype
from support.yardstick import assert_accurate

from pyattn import attention, reference

CASES = [
    Case(2, 3, 3, 1, 1, 64, 64),
    Case(1, 2, 1, 1, 127, 16, 16),
    Case(2, 2, 2, 1, 1025, 128, 64),
    Case(1, 8, 1, 1, 1024, 32, 96),
    Case(1, 6, 2, 1, 2500, 80, 48),
    Case(3, 4, 2, 2, 1300, 64, 64),
    Case(1, 7, 7, 8, 1030, 32, 256),
    Case(1, 3, 1, 2, 140, 96, 32, q_offset=60),
    Case(2, 2, 1, 3, 1100, 160, 16, q_offset=1023),
    Case(1, 1, 1, 5, 3000, 16, 128, q_offset=1020),
    Case(1, 2, 2, 6, 40, 32, 32, q_offset=-3),
    Case(1, 1, 1, 8, 1200, 64, 112, causal=False, softmax_scale=-0.4),
    Case(1, 5, 5, 4, 0, 32, 32),
    Case(1, 4, 1, 2, 1100, 64, 64, dropout_p=0.3),
    Case(1, 9, 1, 1, 300, 64, 64),
    Case(1, 6, 2, 1, 1500, 72, 40),
    Case(2, 4, 1, 1, 1100, 67, 35),
    Case(2, 2, 2, 3, 900, 33, 17, q_offset=800),
    Case(1, 8, 1, 1, 300, 20, 100, causal=False),
    # One block of query rows, from 9 to 64 of them, in ranges.
    Case(1, 16, 1, 1, 2500, 80, 48),
    Case(2, 6, 2, 5, 1300, 67, 35),
    Case(1, 1, 1, 40, 2100, 64, 40, q_offset=1010),
    Case(1, 4, 1, 5, 1500, 72, 40, dropout_p=0.3),
    Case(1, 2, 1, 32, 1100, 32, 32, window=(50, 0), sinks=True),
    Case(1, 12, 1, 1, 1100, 20, 7, softcap=3.0, causal=False),
]


@each_dtype
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_and_backward(native: Backend, case: Case, dtype: torch.dtype) -> None:
    assert_case_accurate(case, dtype, native.attention)


@each_dtype
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(("heads", "head_dim", "head_dim_v"), [(2, 32, 64), (2, 41, 35), (5, 41, 35)])
def test_what_is_not_seen_changes_no_bit(
    native: Backend, dtype: torch.dtype, bad: float, heads: int, head_dim: int, head_dim_v: int
) -> None:
    """Row i sees the keys up to 1020 + i, so in each range and block some keys are visible to some rows only."""
    q, k, v = Case(1, heads, 1, 4, 1300, head_dim, head_dim_v).inputs(dtype)
    clean = native.attention(q, k, v, q_offset=1020, return_lse=True)
    for i in range(4):
        k_, v_ = k.clone(), v.clone()
        k_[:, :, 1021 + i :], v_[:, :, 1021 + i :] = bad, bad
        out, lse = native.attention(q, k_, v_, q_offset=1020, return_lse=True)
        assert_equal((out[:, :, : i + 1], lse[:, :, : i + 1]), tuple(t[:, :, : i + 1] for t in clean))
        assert not out[:, :, i + 1 :].isfinite().any()


@each_dtype
@pytest.mark.parametrize("position", [0, 127, 1024, 1299])
def test_nan_that_is_seen_arrives(native: Backend, dtype: torch.dtype, position: int) -> None:
    q, k, v = Case(1, 2, 1, 2, 1300, 32, 64).inputs(dtype)
    k[:, :, position] = math.nan
    out, lse = native.attention(q, k, v, causal=False, return_lse=True)
    assert out.isnan().all()
    assert lse.isnan().all()
    v[:, :, position, 3] = math.nan
    out = native.attention(q, k.nan_to_num(), v, causal=False)
    assert out[..., 3].isnan().all()
    assert native.cuda_kernels or not out[..., torch.arange(64) != 3].isnan().any()


@each_dtype
def test_scores_of_minus_infinity(native: Backend, dtype: torch.dtype) -> None:
    """Keys that score -inf have weight 0, even if they fill a range; a row with no others is NaN, as in softmax."""
    q, k, v = Case(1, 1, 1, 2, 2100, 32, 32).inputs(dtype)
    q = q.abs() + 0.1
    k[:, :, :1500] = -math.inf
    v[:, :, :1500] = 1.0
    assert native.attention(q, k[:, :, :1500], v[:, :, :1500], causal=False).isnan().all()
    if native.keeps_infinity(dtype):
        out = native.attention(q, k, v, causal=False)
        truth = reference.attention(*(t.double() for t in (q, k[:, :, 1500:], v[:, :, 1500:])), causal=False)
        assert_accurate("out", out, truth, truth)


@each_dtype
def test_one_infinite_column(native: Backend, dtype: torch.dtype) -> None:
    """A score of -inf from any column: the last vector of columns overlaps the one before it."""
    q, k, v = Case(1, 1, 1, 1, 60, 42, 39).inputs(dtype)
    q = q.abs() + 0.1
    if native.keeps_infinity(dtype):
        for column in range(42):
            k_ = k.clone()
            k_[:, :, 7, column] = -math.inf
            shown = torch.arange(60) != 7
            truth = reference.attention(*(t.double() for t in (q, k[:, :, shown], v[:, :, shown])), causal=False)
            assert_accurate("out", native.attention(q, k_, v, causal=False), truth, truth)


@each_dtype
def test_keys_of_any_strides(native: Backend, dtype: torch.dtype) -> None:
    """A cache stores positions before heads, in rows of odd strides, with more room than it uses."""
    q, k, v = Case(2, 4, 2, 2, 1500, 64, 32).inputs(dtype)
    dense = native.attention(q, k, v)
    room = torch.full((2, 1600, 2, 97), math.nan, dtype=dtype)
    room[:, 50:1550, :, 1:65], room[:, 50:1550, :, 65:] = k.transpose(1, 2), v.transpose(1, 2)
    k_, v_ = (room[:, 50:1550, :, columns].transpose(1, 2) for columns in (slice(1, 65), slice(65, 97)))
    assert torch.equal(native.attention(q, k_, v_), dense)


NEIGHBOURS = [
    Case(2, 6, 3, 1, 2500, 64, 40),
    Case(1, 12, 12, 1, 4100, 32, 32),
    Case(2, 4, 2, 3, 1300, 67, 35, softcap=3.0, alibi="bh", sinks=True, relative="h 700"),
    Case(1, 8, 2, 2, 2100, 72, 96, window=(1500, 0)),
    Case(2, 4, 4, 1, 1300, 32, 32, causal=False, mask="padding bk"),
    Case(2, 4, 4, 1, 1300, 32, 32, causal=False, mask="padding bhk"),
    Case(2, 4, 2, 2, 1300, 33, 32, mask="random bhqk"),
    Case(1, 4, 2, 4, 1300, 32, 32, bias="bands hqk"),
    Case(2, 4, 2, 1, 1300, 32, 48, causal=False, key_ranges="pieces"),
]


@each_dtype
@pytest.mark.parametrize("case", NEIGHBOURS, ids=str)
@pytest.mark.usefixtures("isa", "threads")
def test_heads_that_are_neighbours(dtype: torch.dtype, case: Case) -> None:
    """A task decodes all heads of a position, or one where heads see different keys or tasks are few: the same bits."""
    (q, k, v), options = case.inputs(dtype), case.given(dtype)
    expected = attention(q, k, v, return_lse=True, **options)
    k_, v_ = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert_equal(attention(q, k_, v_, return_lse=True, **options), expected)


@each_dtype
@pytest.mark.usefixtures("isa")
def test_masked_keys_of_neighbours(dtype: torch.dtype) -> None:
    """NaN that the last query alone sees, where heads of a position decode together."""
    q, k, v = Case(1, 4, 2, 2, 1300, 41, 35).inputs(dtype)
    clean = attention(q, k, v)
    k_, v_ = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    k_[:, :, -1], v_[:, :, -1] = math.nan, math.nan
    out = attention(q, k_, v_)
    assert torch.equal(out[:, :, :1], clean[:, :, :1])
    assert out[:, :, 1:].isnan().all()
