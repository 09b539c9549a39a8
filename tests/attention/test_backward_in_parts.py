"""Promise: gradients by parts of the keys, from the merged out and lse, equal those of attention over all keys."""

import re
from typing import Any

import pytest
import torch
from attention.test_merge import CASES, cuts, in_parts, part
from support.backends import Backend
from support.cases import Case, assert_case_accurate, each_dtype
from torch import Tensor

from pyattn import attention, ops, reference
from pyattn.options import LEARNED, Options
from pyattn.parts import attention_backward


def statistics(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(row_max, row_sum) of the whole, rounded once: a number near the largest score, and the matching sum."""
    wide = {name: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for name, t in options.items()}
    lse = reference.attention(q.double(), k.double(), v.double(), return_lse=True, **wide)[1]
    near = lse.floor()
    return near.to(dtype), torch.where(near.isinf(), 0, (lse - near).exp()).to(dtype)


class InParts(torch.autograd.Function):
    """Attention across devices that each hold a part of the keys: forward merges, backward runs part by part again."""

    @staticmethod
    def forward(
        ctx: Any, backend: Backend, count: int, options: dict[str, Any], *inputs: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        q, k, v, *learned = inputs
        given = options | {name: t for name, t in zip(LEARNED, learned, strict=True) if t is not None}
        out, lse = in_parts(backend.attention, count)(q, k, v, return_lse=True, **given)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = backend, count, given
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        backend, count, options = ctx.call
        q, k, v, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        options, offset = dict(options), options.get("q_offset")
        offset = k.shape[2] - q.shape[2] if offset is None else offset
        rows, found = statistics(q, k, v, lse.dtype, options), []
        for begin, end in cuts(k.shape[2], count):
            mine = part(options, begin, end, offset)
            keys = k[:, :, begin:end], v[:, :, begin:end]
            found.append(backend.attention_backward(dout, q, *keys, out, rows, dlse=dlse, **mine))
        dq, dk, dv, dbias, dslopes, dsinks, drelative = zip(*found, strict=True)
        bias = options.get("bias")
        if dbias[0] is not None:
            dbias = torch.cat(dbias, -1) if bias.shape[-1] > 1 else (sum(d.double() for d in dbias).to(bias.dtype),)
        dq, dslopes, drelative = (
            None if d[0] is None else sum(x.double() for x in d).to(d[0].dtype) for d in (dq, dslopes, drelative)
        )
        dbias = dbias if isinstance(dbias, Tensor) else dbias[0]
        return None, None, None, dq, torch.cat(dk, 2), torch.cat(dv, 2), dbias, dslopes, dsinks[0], drelative


def by_parts(backend: Backend, count: int) -> Any:
    def attend(q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Any) -> Any:
        learned = (options.pop(name, None) for name in LEARNED)
        return InParts.apply(backend, count, options, q, k, v, *learned)

    return attend


@each_dtype
@pytest.mark.parametrize("case", CASES, ids=str)
def test_parts_add_up_to_the_whole(repeatable: Backend, case: Case, dtype: torch.dtype) -> None:
    assert_case_accurate(case, dtype, by_parts(repeatable, 3))


@each_dtype
@pytest.mark.parametrize("count", [1, 2, 8])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fewer_and_more_parts(native: Backend, case: Case, count: int, dtype: torch.dtype) -> None:
    assert_case_accurate(case, dtype, by_parts(native, count))


@each_dtype
def test_error_from_lse_alone(repeatable: Backend, dtype: torch.dtype) -> None:
    """With one column of dout per query, dv holds the weights; each errs by 2 eps |lse| more than from a pair."""
    case = Case(1, 1, 1, 16, 60, 24, 16, softmax_scale=8.0)
    q, k, v = case.inputs(dtype)
    dout = torch.eye(16)[None, None].to(dtype)
    out, lse = repeatable.attention(q, k, v, softmax_scale=8.0, return_lse=True)
    exact = statistics(q, k, v, lse.dtype, {"softmax_scale": 8.0})
    assert lse.abs().max() > 20
    weights, rounded = (
        repeatable.attention_backward(dout, q, k, v, out, rows, softmax_scale=8.0)[2].double() for rows in (exact, lse)
    )
    eps = max(torch.finfo(t.dtype).eps for t in (lse, dout))
    bound = (2 * torch.finfo(lse.dtype).eps * lse.double().abs() + 16 * eps)[:, :, None]  # 16: |score - lse| twice
    assert ((weights - rounded).abs() <= bound * weights)[weights > 1e-3].all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [3, 300])  # rows of a split head, and of one that is not
def test_the_operator_rounds_no_share(native: Backend, rows: int, dtype: torch.dtype) -> None:
    """Callers add shares up in float32; the function rounds the same numbers."""
    case = Case(1, 2, 1, rows, 300, 24, 20)
    q, k, v = case.inputs(dtype)
    out, lse = native.attention(q, k, v, return_lse=True)
    rows = out, None, q, k, v, out, lse, torch.ones_like(lse)
    shares = ops.attention_backward(*rows, *Options(), True, [False] * len(LEARNED), True)[:3]
    rounded = native.attention_backward(out, q, k, v, out, lse)[:3]
    for share, gradient in zip(shares, rounded, strict=True):
        assert share.dtype == torch.float32
        assert (share != gradient.float()).any()
    native.assert_same((out, lse, *(share.to(dtype) for share in shares)), (out, lse, *rounded))


def test_a_part_without_keys(native: Backend) -> None:
    q, k, v = Case(2, 4, 2, 15, 20, 24, 20).inputs(torch.float32)
    out, lse = native.attention(q, k, v, return_lse=True)
    dq, dk, dv, *none = native.attention_backward(out, q, k[:, :, :0], v[:, :, :0], out, lse)
    assert not dq.any()
    assert dk.shape == (2, 2, 0, 24)
    assert dv.shape == (2, 2, 0, 20)
    assert none == [None] * len(LEARNED)


def test_errors() -> None:
    q, k, v = Case(1, 2, 2, 3, 5, 8, 8).inputs(torch.float32)
    out, lse = attention(q, k, v, return_lse=True)
    for error, message, arguments, options in (
        (TypeError, "pyattn: lse must be Tensor, got None", (out, None), {}),
        (TypeError, "pyattn: row_sum must be Tensor, got None", (out, (lse, None)), {}),
        (ValueError, "pyattn: lse must be a Tensor or (row_max, row_sum), got a tuple of 1", (out, (lse,)), {}),
        (ValueError, "pyattn: row_max must have shape [1, 2, 3], got [1, 2, 2]", (out, lse[..., :2]), {}),
        (TypeError, "pyattn: row_max must have dtype float32, got float64", (out, lse.double()), {}),
        (ValueError, "pyattn: out must have shape [1, 2, 3, 8], got [1, 2, 2, 8]", (out[:, :, :2], lse), {}),
        (
            ValueError,
            "pyattn: dropout_seed must be that of the forward, got None with dropout_p 0.5",
            (out, lse),
            {"dropout_p": 0.5},
        ),
        (ValueError, "pyattn: window", (out, lse), {"window": (-2, 0)}),
    ):
        with pytest.raises(error, match=re.escape(message)):
            attention_backward(out, q, k, v, *arguments, **options)
