"""Promise: a bool mask beside a bias equals the bias with -inf where the mask is False, whatever their shapes."""

import itertools
import math
from typing import Any

import pytest
import torch
from masks.test_masks import visible
from support import case_options
from support.backends import Backend
from support.cases import Case, Drawn, assert_equal, each_dtype, memory_needed, run, truth_of
from torch import Tensor

from pyattn import attention

BOTH = [
    Case(2, 2, 1, 37, 193, 40, 31, causal=False, mask="random bhqk", bias="float bhqk"),
    Case(2, 1, 1, 65, 140, 16, 16, mask="random qk", bias="bands bhqk", dropout_p=0.2),
    Case(1, 4, 2, 50, 90, 16, 24, mask="random k", bias="bands hqk", window=(30, -1)),
    Case(1, 2, 1, 130, 130, 20, 24, causal=False, mask="causal qk", bias="lowest k"),
    Case(2, 2, 1, 37, 150, 16, 16, causal=False, mask="padding bk", bias="bands hk"),
    Case(2, 2, 1, 50, 70, 16, 16, mask="random bq strided", bias="bands qk strided", key_ranges="random"),
    Case(2, 2, 1, 50, 70, 16, 16, causal=False, mask="random bhqk", bias="float q", softcap=2.0, sinks=True),
    Case(2, 2, 1, 70, 100, 16, 16, mask="random hk", bias="bands bhqk", key_ranges="documents", alibi="bh", wide=True),
    Case(2, 2, 2, 20, 30, 8, 8, mask="random -", bias="float hqk"),
    # Few queries, whose keys are split.
    Case(1, 6, 2, 3, 1300, 32, 16, mask="random bhqk", bias="bands bhqk", key_ranges="random"),
    Case(2, 2, 1, 2, 1100, 32, 16, causal=False, mask="padding bk", bias="bands h"),
    Case(1, 4, 2, 1, 300, 16, 16, causal=False, mask="random k", bias="bands k", sinks=True),
    # Many queries per key, whose rows are split.
    Case(1, 6, 1, 200, 250, 24, 16, mask="random hqk", bias="bands k", window=(60, 0), dropout_p=0.1),
]


def forms(x: Tensor) -> tuple[Tensor, ...]:
    """x, strided, with all dimensions, expanded to (2, 2, 9, 33), and that dense."""
    expanded = x.expand(2, 2, 9, 33)
    return x, case_options.strided(x), x[(None,) * (4 - x.dim())], expanded, expanded.clone()


def joined(mask: Tensor, bias: Tensor) -> Tensor:
    """One bias that hides what either hides, in the shape to which both broadcast."""
    return torch.where(mask, bias, -math.inf)


def assert_as_one(
    backend: Backend, ours: tuple[Tensor, ...], drawn: Drawn, mask: Tensor, bias: Tensor, **options: Any
) -> None:
    """Asserts the bits of a single bias, except for roundings of a narrower dbias."""
    one = joined(mask, bias)
    expected = run(backend.attention, *drawn, **options, bias=one)
    backend.assert_same((*ours[:5], *ours[6:]), (*expected[:5], *expected[6:]))
    dbias, wide = ours[5], expected[5].double()
    assert dbias.shape == bias.shape
    if one.shape == bias.shape:
        assert torch.equal(dbias, expected[5])
    else:  # each element of wide is a rounded difference, and the sum has its own order
        rounding = 32 * torch.finfo(bias.dtype).eps * wide.abs().sum_to_size(bias.shape)
        assert ((dbias - wide.sum_to_size(bias.shape)).abs() <= rounding).all()


@each_dtype
@pytest.mark.parametrize("case", BOTH, ids=str)
def test_accurate_and_as_one_bias(repeatable: Backend, case: Case, dtype: torch.dtype) -> None:
    truth = truth_of(case, dtype, torch.get_default_device())
    assert_as_one(repeatable, truth.assert_allows(repeatable.attention), truth.drawn, **truth.options)


@pytest.mark.parametrize("queries", [2, 17])
def test_any_two_shapes(repeatable: Backend, queries: int) -> None:
    """Each of the 16 shapes of a mask beside 2 shapes of a bias, in turn, and beside 2 others with more queries."""
    shapes = ["".join(x) or "-" for n in range(5) for x in itertools.combinations("bhqk", n)]
    heads = (2, 1) if repeatable.family == "emulated" else (4, 2)
    for n, mask in enumerate(shapes):
        for bias in shapes[(n + 4 * (queries > 2)) % 8 :: 8]:
            words = {"mask": f"random {mask}", "bias": f"bands {bias}"}
            case = Case(2, *heads, queries, 35, 8, 8, q_offset=20, **words)
            drawn, options = case.drawn(torch.bfloat16), case.given(torch.bfloat16)
            assert_as_one(repeatable, run(repeatable.attention, *drawn, **options), drawn, **options)


def assert_hidden_bias_changes_no_bit(
    backend: Backend, drawn: Drawn, bias: Tensor, hidden: Tensor, **options: Any
) -> None:
    clean = run(backend.attention, *drawn, **options, bias=bias)
    bad = torch.where(torch.rand(bias.shape) < 0.5, math.nan, math.inf).to(bias.dtype)
    soiled = run(backend.attention, *drawn, **options, bias=torch.where(hidden, bad, bias))
    backend.assert_same(soiled, clean)
    assert torch.equal(soiled[5], clean[5])
    assert not soiled[5].masked_fill(~hidden, 0).any()


@each_dtype
@pytest.mark.parametrize("shape", [(2, 2, 36, 50), (36, 50), (50,)], ids=str)
def test_nan_in_a_hidden_bias_changes_no_bit(repeatable: Backend, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    case = Case(2, 2, 1, 36, 50, 16, 16, window=(11, 2), key_ranges="documents")
    (qkv, dout, dlse), bias = case.drawn(dtype), torch.randn(shape).to(dtype)
    hidden = ~visible(case)
    if len(shape) == 1:  # hidden from all queries
        hidden = torch.arange(50) >= 41
        qkv[0][:, :, -10:] = 0
        case = Case(2, 2, 1, 36, 50, 16, 16, q_offset=5)
    hidden = hidden.expand(case.batch, *hidden.shape[1:]) if len(shape) == 4 else hidden
    hidden = hidden[0, 0] if len(shape) == 2 else hidden
    assert_hidden_bias_changes_no_bit(repeatable, (qkv, dout, dlse), bias, hidden, **case.options)


@each_dtype
@pytest.mark.parametrize(
    "case",
    [
        Case(2, 2, 1, 36, 50, 16, 16, mask="random hqk", bias="bands bhqk"),
        Case(1, 4, 2, 2, 150, 16, 16, mask="random k", bias="bands hqk"),
    ],
    ids=str,
)
def test_nan_in_a_bias_that_the_mask_hides_changes_no_bit(repeatable: Backend, dtype: torch.dtype, case: Case) -> None:
    drawn, (mask, bias) = case.drawn(dtype), case.tensors(dtype).values()
    assert_hidden_bias_changes_no_bit(repeatable, drawn, bias, ~mask, mask=mask)


@each_dtype
@pytest.mark.parametrize("words", ["bhqk", "bk", "q", "-"])
def test_the_layout_of_a_mask_changes_no_bit(repeatable: Backend, dtype: torch.dtype, words: str) -> None:
    """Any strides, and any number of dimensions with the same meaning."""
    case = Case(2, 2, 1, 9, 33, 8, 8, mask=f"random {words}", bias="bands hk")
    drawn, (mask, bias) = case.drawn(dtype), case.tensors(dtype).values()
    first, *others = (run(repeatable.attention, *drawn, mask=x, bias=bias) for x in forms(mask))
    for other in others:
        assert_equal(other, first)


@each_dtype
@pytest.mark.parametrize("words", ["bands bhqk", "float q", "bands hk", "float qk"])
def test_the_layout_of_a_bias_changes_no_bit(repeatable: Backend, dtype: torch.dtype, words: str) -> None:
    case = Case(2, 2, 1, 9, 33, 8, 8, bias=words)
    drawn, bias = case.drawn(dtype), case.tensors(dtype)["bias"]
    first, *others = (run(repeatable.attention, *drawn, bias=x) for x in forms(bias))
    for other in others:
        assert_equal(other[:5], first[:5])
    strided, more, *wide = (other[5] for other in others)
    assert_equal((strided, more.view(bias.shape)), (first[5], first[5]))
    assert torch.equal(*wide)


def test_no_tensor_joins_them() -> None:
    """A mask of keys beside a bias of queries never becomes a tensor of all pairs, which takes 64 MB."""
    qkv = Case(1, 1, 1, 4096, 4096, 16, 16).inputs(torch.float32)
    mask, bias = torch.rand(4096) < 0.5, torch.randn(4096, 1)

    def call() -> None:
        run(attention, qkv, torch.ones_like(qkv[0]), causal=False, mask=mask, bias=bias)

    call()
    assert memory_needed(call) < 16e6
