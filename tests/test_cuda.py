"""The CUDA kernels, their own source run on the host (emulated.py): every dtype, head dimension, mask and tail."""

import math
import subprocess
from pathlib import Path
from typing import Any

import emulated
import pytest
import torch
from emulated import attention
from helpers import Case, assert_case_accurate, assert_equal, each_dtype, run
from torch import Tensor

from pyattn import reference

ADDING = pytest.mark.parametrize("deterministic", [True, False], ids=["repeatable", "adding"])


@each_dtype
@ADDING
@pytest.mark.parametrize("size", ["batch", "heads", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v"])
def test_nothing_of_one_kind(size: str, dtype: torch.dtype, deterministic: bool) -> None:
    sizes = {"batch": 2, "heads": 2, "seqlen_q": 5, "seqlen_k": 7, "head_dim": 8, "head_dim_v": 16} | {size: 0}
    case = Case(sizes["batch"], sizes["heads"], sizes["heads"], *list(sizes.values())[2:])
    assert_case_accurate(case, dtype, attention, deterministic=deterministic)


@each_dtype
@ADDING
@pytest.mark.parametrize("dims", [(64, 64), (72, 20), (13, 250)])
def test_nothing_beyond_the_end_is_touched(dtype: torch.dtype, deterministic: bool, dims: tuple[int, int]) -> None:
    case = Case(1, 2, 1, 37, 70, *dims, dropout_p=0.1)
    tensors = (*case.inputs(dtype), case.gradients(dtype)[0])
    q, k, v, dout = (emulated.before_a_wall(*t.shape, dtype=dtype).copy_(t) for t in tensors)
    results = run(attention, (q, k, v), dout, deterministic=deterministic, **case.options)
    assert all(t.isfinite().all() for t in results)


def spread(t: Tensor, kind: str) -> Tensor:
    """``t`` as a view of that kind inside a buffer of NaN."""
    b, h, s, d = t.shape
    if kind == "transposed":
        view = torch.full((b, s, h, d), torch.nan, dtype=t.dtype).transpose(1, 2)
    elif kind == "odd":
        view = torch.full((b * h * (s + 3) * (d + 5) + 1,), torch.nan, dtype=t.dtype)[1:]
        view = view.view(b, h, s + 3, d + 5)[:, :, 2:-1, 3:-2]
    else:
        view = torch.full((b, h, 2 * s, d + 8), torch.nan, dtype=t.dtype)[:, :, ::2, :d]
    return view.copy_(t)


@each_dtype
@pytest.mark.parametrize("kind", ["transposed", "odd", "spaced"])
@pytest.mark.parametrize("dims", [(64, 64), (40, 13)])
def test_strides(kind: str, dtype: torch.dtype, dims: tuple[int, int]) -> None:
    case = Case(2, 4, 2, 37, 70, *dims)
    qkv, (dout, dlse) = case.inputs(dtype), case.gradients(dtype)
    options = case.options | {"deterministic": True}
    expected = run(attention, qkv, dout, dlse, **options)
    views = tuple(spread(t, kind) for t in qkv)
    results = attention(*(t.requires_grad_() for t in views), return_lse=True, **options)
    grads = torch.autograd.grad(results, views, (spread(dout, kind), dlse.to(results[1].dtype)))
    assert_equal((*(t.detach() for t in results), *grads), expected)


def test_expanded_tensors() -> None:
    q, k = torch.randn(2, 4, 33, 16), torch.randn(1, 1, 40, 16).expand(2, 4, 40, 16)
    assert torch.equal(attention(q, k, k), attention(q, k.contiguous(), k.contiguous()))


@each_dtype
@ADDING
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_seen_changes_no_bit(dtype: torch.dtype, deterministic: bool, value: float) -> None:
    """In tiles that some rows see, and keys or queries beyond them."""
    case, last = Case(1, 2, 1, 90, 140, 40, 72, q_offset=20), 60  # the queries up to last see the keys up to 80
    options = case.options | {"deterministic": deterministic}
    q, k, v = case.inputs(dtype)
    dout, dlse = case.gradients(dtype)
    clean = run(attention, (q, k, v), dout, dlse, **options)
    k[:, :, last + 21 + 5], v[:, :, last + 21 :: 7] = value, value
    soiled = run(attention, (q, k, v), dout, dlse, **options)
    for x, y in zip(clean[:2], soiled[:2], strict=True):
        assert torch.equal(x[:, :, : last + 1], y[:, :, : last + 1])
    assert not soiled[0][:, :, last + 1 :].isfinite().all(-1).any()
    dq, soiled_dq = clean[2][:, :, : last + 1], soiled[2][:, :, : last + 1]
    assert torch.equal(dq, soiled_dq) or (not deterministic and torch.allclose(dq, soiled_dq, rtol=0.02, atol=0.02))
    assert soiled[2][:, :, last + 6 :].isnan().all()

    q, k, v = case.inputs(dtype)
    clean = run(attention, (q, k, v), dout, dlse, **options)
    q[:, :, 10], dout[:, :, 11] = value, value  # which see the keys up to 31
    soiled = run(attention, (q, k, v), dout, dlse, **options)
    for x, y in zip(clean[3:], soiled[3:], strict=True):
        assert torch.equal(x[:, :, 32:], y[:, :, 32:])
        assert not y[:, :, :31].isfinite().any()


@each_dtype
@ADDING
def test_a_key_that_no_query_sees(dtype: torch.dtype, deterministic: bool) -> None:
    """has no gradient, be it NaN, and even where a tile has room for queries that would see it."""
    case = Case(1, 1, 1, 10, 40, 32, 32, q_offset=0)
    q, k, v = case.inputs(dtype)
    k[:, :, 12], v[:, :, 13] = torch.nan, torch.nan
    _, _, dq, dk, dv = run(attention, (q, k, v), *case.gradients(dtype), deterministic=deterministic, **case.options)
    assert dq.isfinite().all()
    assert (dk[:, :, 10:] == 0).all()
    assert (dv[:, :, 10:] == 0).all()


@each_dtype
def test_what_is_seen_arrives(dtype: torch.dtype) -> None:
    """NaN in the first, an inner and the last key, in tiles with a mask and without."""
    for causal in (True, False):
        for j in (0, 70, 129):
            case = Case(1, 1, 1, 130, 130, 33, 33, causal)
            q, k, v = case.inputs(dtype)
            k[:, :, j] = torch.nan
            out, lse = attention(q, k, v, causal=causal, return_lse=True)
            seen = reference.visible(130, 130, causal=causal)[:, j]
            assert torch.equal(out.isnan().all(-1)[0, 0], seen)
            assert torch.equal(out.isnan().any(-1)[0, 0], seen)
            assert torch.equal(lse.isnan()[0, 0], seen)


def test_a_key_that_scores_minus_infinity() -> None:
    """has weight 0; where all do, 0 is divided by 0, as softmax does."""
    q, k, v = torch.ones(3, 1, 1, 4, 8, dtype=torch.float16)
    k[:, :, 1:] = -math.inf
    out, lse = attention(q, k, v, causal=False, return_lse=True)
    assert torch.equal(out, torch.ones_like(out))
    assert torch.allclose(lse, torch.full_like(lse, 8**0.5))
    assert attention(q, k[:, :, 1:], v[:, :, 1:], causal=False).isnan().all()


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_gradcheck(dropout_p: float) -> None:
    case = Case(1, 2, 1, 4, 5, 3, 2, dropout_p=dropout_p)
    qkv = tuple(t.requires_grad_() for t in case.inputs(torch.float64))
    assert torch.autograd.gradcheck(lambda *t: attention(*t, return_lse=True, **case.options), qkv)


@pytest.fixture(scope="module")
def index_check(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("index") / "index_check"
    sources = ["tests/tools/emulation/index_check.cpp"]
    command = ["c++", *emulated.FLAGS, "-Wno-unused-function", *emulated.INCLUDES, *sources, "-o", str(program)]
    subprocess.run(command, cwd=emulated.ROOT, check=True)
    return program


def test_index_functions(index_check: Path) -> None:
    result: Any = subprocess.run([index_check], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "ok" in result.stdout
