"""Promise: every result, forward and backward, is as exact as plain PyTorch in its dtype, by yardstick.py's rule."""

import pytest
import torch
from support.backends import Backend
from support.cases import CASES, Case, assert_case_accurate, each_dtype, run
from support.yardstick import NAMES, assert_accurate

from pyattn import reference

TILES = [
    case
    for dim in (32, 64, 96, 128, 192, 256)
    for case in (
        Case(1, 1, 1, 131 if dim <= 128 else 67, 137, dim, dim),
        Case(1, 2, 1, 66, 127, dim - 8, dim - 15, False, dropout_p=0.2),
    )
]
"""Slightly more and less than whole tiles, for each head dimension that has its own CUDA tiles."""


@each_dtype
@pytest.mark.parametrize("case", CASES + TILES, ids=str)
def test_forward_and_backward(backend: Backend, case: Case, dtype: torch.dtype) -> None:
    assert_case_accurate(case, dtype, backend.attention)


@each_dtype
@pytest.mark.parametrize(
    "case", [Case(3, 2, 1, 40, 70, 16, 16), Case(3, 2, 1, 40, 70, 16, 16, window=(9, -1), alibi="h")], ids=str
)
def test_offset_per_sequence(backend: Backend, case: Case, dtype: torch.dtype) -> None:
    qkv, dout, dlse = case.drawn(dtype)
    offsets, options = [30, -5, 12], case.given(dtype)
    results = run(backend.attention, qkv, dout, dlse, **options | {"q_offset": torch.tensor(offsets)})[:5]
    for b, offset in enumerate(offsets):
        one = slice(b, b + 1)
        options["q_offset"] = offset
        alone = run(backend.attention, tuple(t[one] for t in qkv), dout[one], dlse[one], **options)[:5]
        together = tuple(x[one] for x in results)
        backend.assert_same(together if backend.cuda_kernels else together[:2], alone)
        for name, x, y in zip(NAMES, together, alone, strict=True):
            assert_accurate(name, x, y, y.double())


@each_dtype
@pytest.mark.parametrize("seqlen_k", [1, 5, 100])
def test_a_row_that_sees_one_key(backend: Backend, dtype: torch.dtype, seqlen_k: int) -> None:
    case = Case(2, 4, 2, 5, seqlen_k, 40, 100, q_offset=0)
    qkv, dout, _ = case.drawn(dtype)
    out, _, dq, _, _ = run(backend.attention, qkv, dout, **case.options)
    first, value = out[:, :, 0], qkv[2][:, :, 0].repeat_interleave(2, 1)
    if backend.cuda_kernels and dtype == torch.float32:
        assert_accurate("out", first, value, value.double())
    else:
        assert torch.equal(first, value)
    assert torch.count_nonzero(dq[:, :, 0]) == 0
    assert (torch.count_nonzero(dq[:, :, 1]) > 0) == (seqlen_k > 1)


@each_dtype
@pytest.mark.parametrize("softmax_scale", [8.0, -8.0, 1e6])
def test_large_scales_do_not_overflow(backend: Backend, dtype: torch.dtype, softmax_scale: float) -> None:
    """The scale multiplies the score, not the query."""
    # In float32, the smaller half of a number below 2^-114 would be subnormal.
    normal = 2**12 if backend.cuda_kernels and dtype == torch.float32 else 1
    largest, softmax_scale = torch.finfo(dtype).max / 4 / normal, softmax_scale * normal
    q = torch.full((1, 1, 2, 4), largest, dtype=dtype)
    k = torch.randn(1, 1, 50, 4).sign() * (1 + torch.rand(1, 1, 50, 4))  # still normal numbers at that size
    k = k.to(dtype) * torch.finfo(dtype).tiny * normal
    v = torch.randn(1, 1, 50, 8).to(dtype)
    options = {"causal": False, "softmax_scale": softmax_scale}
    plain = reference.attention(q, k, v, **options)
    exact = reference.attention(q.double(), k.double(), v.double(), **options)
    assert_accurate("out", backend.attention(q, k, v, **options), plain if plain.isfinite().all() else exact, exact)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_scores_as_large_as_the_dtype_allows(backend: Backend, dtype: torch.dtype, sign: int) -> None:
    """Equal scores near the largest number get weight 1 / n each, as in torch.softmax."""
    largest = torch.finfo(dtype).max ** 0.5 * 0.99
    q = torch.full((1, 1, 3, 1), largest, dtype=dtype)
    k = torch.full((1, 1, 200, 1), sign * largest, dtype=dtype)
    v = torch.randn(1, 1, 200, 8, dtype=dtype)
    dout = torch.randn(1, 1, 3, 8, dtype=dtype)
    out, _, dq, dk, dv = run(backend.attention, (q, k, v), dout, causal=False, softmax_scale=1.0)
    assert_accurate("out", out, v.mean(2, keepdim=True).expand_as(out), v.double().mean(2, keepdim=True).expand_as(out))
    truth = (dout.double().sum(2, keepdim=True) / 200).expand_as(dv)
    assert_accurate("dv", dv, truth, truth)
    assert dq.isfinite().all()
    assert dk.isfinite().all()


def test_long_sums_of_float(backend: Backend) -> None:
    """Tensor cores truncate sums; over many keys of one sign this would add up without separate float32 sums."""
    q, k = torch.randn(1, 1, 16, 32), torch.randn(1, 1, 3000, 32)
    v = torch.rand(1, 1, 3000, 32) + 1
    out = backend.attention(q, k, v, causal=False)
    exact = reference.attention(q.double(), k.double(), v.double(), causal=False)
    assert ((out - exact) / exact).abs().max() < 8 * torch.finfo(torch.float32).eps
