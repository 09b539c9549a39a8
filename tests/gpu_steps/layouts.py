"""Where tensors lie and how large they are: strides, offsets past 2^31, more heads than a grid's second dimension."""

import itertools
import math
from collections.abc import Callable
from functools import partial

import torch
from gpu_steps.accuracy import compare
from gpu_steps.child import Check
from gpu_steps.common import assert_same, determinism, tensors
from helpers import DTYPES, Case, assert_equal, run
from torch import Tensor

from pyattn import attention
from pyattn.cli.timing import peak_memory

AROUND_2_16 = (65535, 65536, 65537)


def nan_padded(x: Tensor) -> Tensor:
    return x.new_full([n + 3 for n in x.shape], math.nan)[1:-2, 2:-1, 1:-2, 1:-2].copy_(x)


def heads_inside(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def columns_outside(x: Tensor) -> Tensor:
    return x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)


def every_other_column(x: Tensor) -> Tensor:
    return x.new_full((*x.shape[:-1], 2 * x.shape[-1]), math.nan)[..., ::2].copy_(x)


def expanded(x: Tensor) -> Tensor:
    return x[:1, :1].expand_as(x)


LAYOUTS = (nan_padded, heads_inside, columns_outside, every_other_column, expanded)


def changes_no_bit(layout: Callable[[Tensor], Tensor], dtype: torch.dtype, device: str) -> None:
    for head_dim in (20, 21, 64, 128, 200):
        qkv, dout, _ = tensors(Case(2, 4, 2, 137, 210, head_dim, head_dim), dtype, device)
        *views, dout = (layout(x) for x in (*qkv, dout))
        copies = tuple(x.contiguous() for x in views)
        assert_equal(run(attention, tuple(views), dout), run(attention, copies, dout.contiguous()))


def results_are_dense_in_the_order_of_the_inputs(device: str) -> None:
    qkv, dout, _ = tensors(Case(2, 4, 2, 90, 110, 64, 40), torch.bfloat16, device)
    out, _, dq, dk, dv = run(attention, tuple(heads_inside(x) for x in qkv), dout)
    for x in (out, dq, dk, dv):
        assert x.transpose(1, 2).is_contiguous()


def sizes_zero_and_one(dtype: torch.dtype, device: str) -> None:
    whole = {"batch": 2, "heads": 2, "seqlen_q": 3, "seqlen_k": 5, "head_dim": 4, "head_dim_v": 6}
    for dimension, size, deterministic in itertools.product(whole, (0, 1), (True, False)):
        b, h, *sizes = (whole | {dimension: size}).values()
        qkv, dout, _ = tensors(Case(b, h, h, *sizes, causal=False), dtype, device)
        with determinism(deterministic):
            out, _, *grads = run(attention, qkv, dout, causal=False)
        assert [g.shape for g in grads] == [x.shape for x in qkv]
        assert all(x.isfinite().all() for x in (out, *grads))
        if dimension == "seqlen_k" and size == 0:
            assert (out == 0).all()


def far_apart(dtype: torch.dtype, device: str, stride: int) -> None:
    """40 positions of q, k, v and dout alike, ``stride`` elements from one to the next, and next to each other."""
    buffer = torch.empty(40 * stride, dtype=dtype, device=device)
    qkv, dout, _ = tensors(Case(1, 1, 1, 40, 40, 64, 64), dtype, device)
    *far, far_dout = (
        buffer[64 * i :].as_strided(x.shape, (0, 0, stride, 1)).copy_(x) for i, x in enumerate((*qkv, dout))
    )
    for deterministic in (True, False):
        with determinism(deterministic):
            assert_same(run(attention, tuple(far), far_dout), run(attention, qkv, dout), deterministic)


def many_heads(device: str, heads: int) -> None:
    """Of 128 x 64 elements: the last ones are what they are alone. 2^18 of them are 2^31 elements, of results too."""
    *qkv, dout = (torch.randn(1, heads, 128, 64, dtype=torch.bfloat16, device=device) for _ in range(4))
    *last, last_dout = (x[:, -3:].clone() for x in (*qkv, dout))
    for deterministic in (True, False):
        with determinism(deterministic):
            alone = run(attention, tuple(last), last_dout)
            together = tuple(x[:, -3:].clone() for x in run(attention, tuple(qkv), dout))
        assert_same(together, alone, deterministic)


def extra_memory_is_linear(device: str) -> dict[str, int]:
    def peak(seqlen: int) -> int:
        q, k, v = (torch.randn(1, 1, seqlen, 64, dtype=torch.bfloat16, device=device) for _ in range(3))
        extra = peak_memory(partial(run, attention, (q, k, v), v), device)
        assert extra is not None
        return extra

    half, whole = peak(8192), peak(16384)
    assert 0 < whole <= 2.1 * half, f"{half} bytes for 8192 positions, {whole} for 16384"
    return {"bytes_at_16384": whole}


def checks(device: str) -> dict[str, Check]:
    named: dict[str, Check] = {
        f"{layout.__name__} {dtype}": partial(changes_no_bit, layout, dtype, device)
        for layout, dtype in itertools.product(LAYOUTS, DTYPES)
    }
    named |= {f"sizes_zero_and_one {dtype}": partial(sizes_zero_and_one, dtype, device) for dtype in DTYPES}
    named["results_are_dense_in_the_order_of_the_inputs"] = partial(
        results_are_dense_in_the_order_of_the_inputs, device
    )
    whole = {"batch": 1, "heads": 1, "seqlen_q": 1, "seqlen_k": 2, "head_dim": 8, "head_dim_v": 8}
    for dimension, size, dtype in itertools.product(
        ("batch", "heads", "seqlen_q", "seqlen_k"), AROUND_2_16, (torch.float64, torch.bfloat16)
    ):
        b, h, *sizes = (whole | {dimension: size}).values()
        case = Case(b, h, h, *sizes, causal=False)
        named[f"{case} {dtype}"] = partial(compare, case, None, dtype, device)
    if device != "cpu":
        named["offsets past 2^31"] = partial(far_apart, torch.bfloat16, device, 2**26)
        named["offsets past 2^31, float32"] = partial(far_apart, torch.float32, device, 2**26)
        named["results past 2^31"] = partial(many_heads, device, 2**18 + 5)
        named["extra_memory_is_linear"] = partial(extra_memory_is_linear, device)
    return named
