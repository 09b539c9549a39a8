"""Promise: tensors may have any strides and any size, and extra memory is linear."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.assertions import nan_filled
from support.backends import Backend
from support.cases import Case, alternate, assert_case_accurate, assert_equal, each_dtype, memory_needed, run
from torch import Tensor

from pyattn import attention, masks

Layout = Callable[[Tensor], Tensor]


def nan_padded(x: Tensor) -> Tensor:
    return x.new_full([n + 3 for n in x.shape], math.nan)[1:-2, 2:-1, 1:-2, 1:-2].copy_(x)


def heads_inside(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def flipped_strides(x: Tensor) -> Tensor:
    return x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)


def every_other_column(x: Tensor) -> Tensor:
    return x.new_full((*x.shape[:-1], 2 * x.shape[-1]), math.nan)[..., ::2].copy_(x)


def every_other_row(x: Tensor) -> Tensor:
    return x.new_full((*x.shape[:2], 2 * x.shape[2], x.shape[3] + 8), math.nan)[:, :, ::2, : x.shape[3]].copy_(x)


def expanded(x: Tensor) -> Tensor:
    return x[:1, :1].expand_as(x)


def assert_layout_changes_no_bit(backend: Backend, case: Case, dtype: torch.dtype, layout: Layout) -> None:
    qkv, *gradients = case.drawn(dtype)
    *qkv, dout = (layout(x) for x in (*qkv, gradients[0]))
    copies = tuple(x.contiguous() for x in qkv)
    assert_equal(run(backend.attention, tuple(qkv), dout), run(backend.attention, copies, dout.contiguous()))


@each_dtype
@pytest.mark.parametrize("layout", [nan_padded, heads_inside, every_other_row, expanded])
def test_layout_of_rows_changes_no_bit(repeatable: Backend, dtype: torch.dtype, layout: Layout) -> None:
    sizes = {"cpu": (2, 4, 2, 37, 110), "emulated": (2, 2, 1, 20, 40), "cuda": (2, 4, 2, 137, 210)}[repeatable.family]
    for head_dim in repeatable.head_dims:
        assert_layout_changes_no_bit(repeatable, Case(*sizes, head_dim, head_dim), dtype, layout)


@each_dtype
@pytest.mark.parametrize("layout", [flipped_strides, every_other_column])
def test_layout_of_columns_changes_no_bit(native: Backend, dtype: torch.dtype, layout: Layout) -> None:
    """Columns that are not contiguous are copied before the kernels run."""
    for head_dim in native.head_dims:
        assert_layout_changes_no_bit(native, Case(2, 4, 2, 37, 110, head_dim, head_dim), dtype, layout)


@each_dtype
def test_results_are_dense_in_the_order_of_the_inputs(native: Backend, dtype: torch.dtype) -> None:
    q, k, v = (heads_inside(x) for x in Case(2, 4, 2, 9, 11, 8, 5).inputs(dtype))
    out, _, dq, dk, dv = run(native.attention, (q, k, v), torch.randn(2, 4, 9, 5).to(dtype))
    for x in (out, dq, dk, dv):
        assert x.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("shape", [(2, 3, 5), (2, 1, 5), (1, 3, 5), (2, 3, 1)])
@pytest.mark.usefixtures("device")
def test_out_lies_in_memory_as_empty_like(order: tuple[int, ...], shape: tuple[int, ...]) -> None:
    q = torch.randn(*(shape[d] for d in order), 8).permute(*(order.index(d) for d in range(3)), 3)
    expanded = [q.narrow(d, 0, 1).expand_as(q) for d in range(3) if 1 not in shape]
    for x in (q, *expanded):
        out, like = attention(x, x, x), torch.empty_like(x)
        strides = [(out.stride(d), like.stride(d)) for d in range(4) if x.shape[d] > 1]
        assert all(ours == torchs for ours, torchs in strides)


@each_dtype
@pytest.mark.usefixtures("native")
def test_strides_of_what_goes_with_rows(dtype: torch.dtype) -> None:
    """row_max, row_sum, dlse and q_offset need not be contiguous."""
    case = Case(2, 4, 2, 9, 11, 8, 5)
    (q, k, v), dout, dlse = case.drawn(dtype)
    offsets = torch.tensor([2, 77, -3, 77])[::2]
    results = [torch.ops.pyattn.attention_forward(q, k, v, q_offsets=x) for x in (offsets, offsets.contiguous())]
    assert_equal(*results)
    out, lse, row_max, row_sum = results[0]
    rows = [dlse.to(lse.dtype), row_max, row_sum]
    results = [
        torch.ops.pyattn.attention_backward(dout, dlse_, q, k, v, out, max_, sum_, q_offsets=offsets_)[:3]
        for (dlse_, max_, sum_), offsets_ in (
            (rows, offsets.contiguous()),
            ([flipped_strides(x[..., None])[..., 0] for x in rows], offsets),
        )
    ]
    assert_equal(*results)


@each_dtype
@pytest.mark.parametrize(
    "case",
    [
        Case(2, 3, 3, 70, 45, 24, 20, q_offset=-8),
        Case(2, 3, 3, 70, 45, 24, 20, q_offset=-66),
        Case(2, 3, 3, 170, 145, 72, 40, q_offset=-66),
    ],
    ids=str,
)
def test_every_element_is_written(native: Backend, case: Case, dtype: torch.dtype) -> None:
    with nan_filled():
        results = run(native.attention, *case.drawn(dtype), **case.options)
    assert not any(x.isnan().any() for x in results)


SIZES = ("batch", "heads", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v")
EVERY_SCORE = {"softcap": 2.0, "bias": "float hqk", "alibi": "h", "sinks": True, "dropout_p": 0.2}


@each_dtype
@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize("dimension", SIZES)
def test_sizes_zero_and_one(backend: Backend, dtype: torch.dtype, dimension: str, size: int) -> None:
    """One tile and several, one query to many keys, with plain scores and with every mask and score option in turn."""
    many = backend.lengths(dtype)[-1]
    for lengths, more, of in alternate([(3, 5), (3, many), (many - 8, many)], [{}, EVERY_SCORE], [0, 1]):
        if of != size:
            continue
        batch = 1 if backend.family == "emulated" else 2
        sizes = dict(zip(SIZES, (batch, 2, *lengths, 4, 6), strict=True)) | {dimension: size}
        b, h, sq, sk, d, dv = sizes.values()
        case = Case(b, h, h, sq, sk, d, dv, causal=False, **more)
        if backend.takes(dtype, case):
            assert_case_accurate(case, dtype, backend.attention)


AROUND_2_16 = [
    Case(b, h * g, h, sq, sk, d, dv, causal=False)
    for size in (65535, 65536, 65537)
    for dimension in range(7)
    for b, h, g, sq, sk, d, dv in [[size if i == dimension else n for i, n in enumerate((1, 1, 1, 1, 2, 3, 2))]]
]
"""Large sizes of each dimension: batch, KV heads, query heads per KV head, queries, keys, columns of q and k, of v."""


@pytest.mark.parametrize("case", AROUND_2_16, ids=str)
def test_sizes_around_two_to_the_16th(native: Backend, case: Case) -> None:
    # float64's bound is there to catch wrong indices: a float32 sum over 65,536 rows has its own error.
    assert_case_accurate(case, torch.float64, native.attention)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_offsets_past_two_to_the_31st(native: Backend, dtype: torch.dtype) -> None:
    """One position every 2^26 elements, in q, k, v and dout; a CPU never touches the memory between them."""
    native.needs_memory(12e9)
    case = Case(1, 1, 1, 40, 40, 64, 64)
    near = (*case.inputs(dtype), case.gradients(dtype)[0])
    buffer = torch.empty(40 * 2**26, dtype=dtype)
    far = [buffer[64 * i :].as_strided(x.shape, (0, 0, 2**26, 1)).copy_(x) for i, x in enumerate(near)]
    native.assert_same(run(native.attention, tuple(far[:3]), far[3]), run(native.attention, near[:3], near[3]))


def needed(seqlen: int, heads: int = 1, head_dim: int = 16, **options: Any) -> int:
    """The peak rise of resident memory, in bytes, over forward and backward: scratch and results."""
    qkv = [torch.randn(1, h, seqlen, head_dim, requires_grad=True) for h in (heads, 1, 1)]
    leaves = [*qkv, *(t for t in options.values() if isinstance(t, Tensor) and t.requires_grad)]
    attention(*(x[:, :, :512] for x in qkv)).sum().backward()  # does all one-time loading
    return memory_needed(lambda: torch.autograd.grad(attention(*qkv, **options).sum(), leaves))


KEPT = 8 << 20
"""Bytes that the allocator may have kept, so one of two calls is served from them and the other is not.

Even in a fresh process, a call with 8,192 rows needed 6 MB one time and 9 MB another.
"""


@pytest.mark.usefixtures("isa")
def test_extra_memory_is_linear() -> None:
    half, whole = needed(8192), needed(16384)
    assert 0 < whole <= 3 * half + KEPT  # 2 plus the system's rounding; 4 if it were not linear
    assert whole < 16384 * 16384 * 4 / 50


@pytest.mark.usefixtures("isa")
def test_extra_memory_of_many_queries_to_a_key() -> None:
    """Beyond out, dout and dq, of equal size: half of one for shares of dk and dv, plus a part linear in the keys."""
    dq = 32 * 1024 * 64 * 4
    assert needed(1024, heads=32, head_dim=64) < 3 * dq + 1.25 * dq


def features(seqlen: int, *bias: int) -> dict[str, Any]:
    """Every mask and every score, with a bias of this shape; the window keeps time linear too."""
    bias_, slopes, sinks = (torch.randn(shape, requires_grad=True) for shape in (bias, (1,), (1,)))
    ranges = masks.documents([seqlen // 2] * 2)
    scores = {"softcap": 2.0, "bias": bias_, "alibi_slopes": slopes, "sinks": sinks}
    return scores | {"window": (100, -1), "key_ranges": ranges, "dropout_p": 0.1}


@pytest.mark.usefixtures("isa")
def test_extra_memory_of_masks_and_scores_is_linear() -> None:
    """Except for the gradient of a bias, which is as large as the bias."""
    half, whole = (needed(n, **features(n, n)) for n in (4096, 8192))
    assert 0 < whole <= 3 * half + KEPT
    assert whole < 8192 * 8192 * 4 / 20
    half, whole = (needed(n, **features(n, n, n)) - n * n * 4 for n in (1024, 2048))
    assert whole <= 3 * half + KEPT
    assert whole < 2048 * 2048 * 4 / 4
