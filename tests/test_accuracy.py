"""Every result, forward and backward, is as exact as plain PyTorch in the same dtype: see helpers.assert_accurate."""

import pytest
import torch
from helpers import CASES, NAMES, Case, assert_accurate, assert_case_accurate, each_dtype, run

from pyattn import attention, reference


@pytest.mark.usefixtures("isa")
@each_dtype
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_and_backward(case: Case, dtype: torch.dtype) -> None:
    assert_case_accurate(case, dtype)


@pytest.mark.usefixtures("isa")
@each_dtype
def test_offset_per_sequence(dtype: torch.dtype) -> None:
    case = Case(3, 2, 1, 40, 70, 16, 16)
    qkv, (dout, dlse) = case.inputs(dtype), case.gradients(dtype)
    offsets = [30, -5, 12]
    together = run(attention, qkv, dout, dlse, q_offset=torch.tensor(offsets))
    for b, offset in enumerate(offsets):
        alone = run(attention, tuple(t[b : b + 1] for t in qkv), dout[b : b + 1], dlse[b : b + 1], q_offset=offset)
        for x, y in zip(together[:2], alone[:2], strict=True):
            assert torch.equal(x[b : b + 1], y)
        for name, x, y in zip(NAMES[2:], together[2:], alone[2:], strict=True):
            assert_accurate(name, x[b : b + 1], y, y.double())


@pytest.mark.usefixtures("isa")
@each_dtype
@pytest.mark.parametrize("seqlen_k", [5, 100])
def test_a_row_that_sees_one_key(dtype: torch.dtype, seqlen_k: int) -> None:
    case = Case(2, 4, 2, 5, seqlen_k, 40, 100, q_offset=0)
    qkv, (dout, _) = case.inputs(dtype), case.gradients(dtype)
    out, _, dq, _, _ = run(attention, qkv, dout, **case.options)
    assert torch.equal(out[:, :, 0], qkv[2][:, :, 0].repeat_interleave(2, 1))
    assert torch.count_nonzero(dq[:, :, 0]) == 0
    assert torch.count_nonzero(dq[:, :, 1]) > 0


@pytest.mark.usefixtures("isa")
@each_dtype
@pytest.mark.parametrize("softmax_scale", [8.0, -8.0, 1e6])
def test_large_scales_do_not_overflow(dtype: torch.dtype, softmax_scale: float) -> None:
    """The scale meets the score, not the query."""
    largest = torch.finfo(dtype).max / 4
    q = torch.full((1, 1, 2, 4), largest, dtype=dtype)
    k = torch.randn(1, 1, 50, 4).sign() * (1 + torch.rand(1, 1, 50, 4))  # normal numbers, once they are that small
    k = k.to(dtype) * torch.finfo(dtype).tiny
    v = torch.randn(1, 1, 50, 8).to(dtype)
    options = {"causal": False, "softmax_scale": softmax_scale}
    plain = reference.attention(q, k, v, **options)
    exact = reference.attention(q.double(), k.double(), v.double(), **options)
    assert_accurate("out", attention(q, k, v, **options), plain if plain.isfinite().all() else exact, exact)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_scores_as_large_as_the_dtype_allows(dtype: torch.dtype, sign: int) -> None:
    """All scores equal and near the largest number: the weights are 1 / n, as torch.softmax has them."""
    largest = torch.finfo(dtype).max ** 0.5 * 0.99
    q = torch.full((1, 1, 3, 1), largest, dtype=dtype)
    k = torch.full((1, 1, 200, 1), sign * largest, dtype=dtype)
    v = torch.randn(1, 1, 200, 8, dtype=dtype)
    dout = torch.randn(1, 1, 3, 8, dtype=dtype)
    out, _, dq, dk, dv = run(attention, (q, k, v), dout, causal=False, softmax_scale=1.0)
    assert_accurate("out", out, v.mean(2, keepdim=True).expand_as(out), v.double().mean(2, keepdim=True).expand_as(out))
    truth = (dout.double().sum(2, keepdim=True) / 200).expand_as(dv)
    assert_accurate("dv", dv, truth, truth)
    assert dq.isfinite().all()
    assert dk.isfinite().all()
