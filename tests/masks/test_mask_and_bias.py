"""A bool mask beside a bias: together they are the bias with -inf where the mask is False, whatever shape each has."""

import itertools
import math
from typing import Any

import case_options
import pytest
import torch
from backends import Backend
from helpers import Case, assert_case_accurate, each_dtype, memory_needed, run
from torch import Tensor

from pyattn import attention, reference

BOTH = [
    Case(2, 2, 1, 37, 193, 40, 31, causal=False, mask="random bhqk", bias="float bhqk"),
    Case(2, 2, 2, 65, 140, 16, 16, mask="random qk", bias="bands bhqk", dropout_p=0.2),
    Case(2, 4, 2, 50, 90, 16, 24, mask="random k", bias="bands hqk", window=(30, -1)),
    Case(1, 2, 1, 130, 130, 20, 24, causal=False, mask="causal qk", bias="lowest k"),
    Case(2, 4, 2, 37, 150, 16, 16, causal=False, mask="padding bk", bias="bands hk"),
    Case(2, 2, 1, 50, 70, 16, 16, mask="random bq strided", bias="bands qk strided", key_ranges="random"),
    Case(2, 2, 1, 50, 70, 16, 16, causal=False, mask="random bhqk", bias="float q", softcap=2.0, sinks=True),
    Case(2, 2, 1, 70, 100, 16, 16, mask="random hk", bias="bands bhqk", key_ranges="documents", alibi="bh", wide=True),
    Case(2, 2, 2, 20, 30, 8, 8, mask="random -", bias="float hqk"),
    # Few queries, whose keys are split.
    Case(1, 6, 2, 3, 1300, 32, 16, mask="random bhqk", bias="bands bhqk", key_ranges="random"),
    Case(2, 4, 1, 2, 1100, 32, 16, causal=False, mask="padding bk", bias="bands h"),
    Case(2, 4, 2, 1, 300, 16, 16, causal=False, mask="random k", bias="bands k", sinks=True),
    # Many queries to a key, whose rows are split.
    Case(1, 6, 1, 200, 250, 24, 16, mask="random hqk", bias="bands k", window=(60, 0), dropout_p=0.1),
]


def joined(mask: Tensor, bias: Tensor) -> Tensor:
    """One bias that hides what either hides, in the shape to which both broadcast."""
    return torch.where(mask, bias, -math.inf)


def assert_as_one(
    backend: Backend,
    qkv: tuple[Tensor, Tensor, Tensor],
    gradients: tuple[Tensor, Tensor],
    mask: Tensor,
    bias: Tensor,
    **options: Any,
) -> None:
    """The results with both have the bits of those with one bias, but for roundings of a dbias that is narrower."""
    one = joined(mask, bias)
    ours = run(backend.attention, qkv, *gradients, **options, mask=mask, bias=bias)
    expected = run(backend.attention, qkv, *gradients, **options, bias=one)
    backend.assert_same((*ours[:5], *ours[6:]), (*expected[:5], *expected[6:]))
    dbias, wide = ours[5], expected[5].double()
    assert dbias.shape == bias.shape
    if one.shape == bias.shape:
        assert torch.equal(dbias, expected[5])
    else:  # each element of wide is rounded, and so is their sum, in whatever order
        rounding = 8 * torch.finfo(bias.dtype).eps * wide.abs().sum_to_size(bias.shape)
        assert ((dbias - wide.sum_to_size(bias.shape)).abs() <= rounding).all()


@each_dtype
@pytest.mark.parametrize("case", BOTH, ids=str)
def test_forward_and_backward(backend: Backend, case: Case, dtype: torch.dtype) -> None:
    assert_case_accurate(case, dtype, backend.attention)


@each_dtype
@pytest.mark.parametrize("case", BOTH, ids=str)
def test_together_they_are_one_bias(backend: Backend, case: Case, dtype: torch.dtype) -> None:
    options = case.options | case.tensors(dtype)
    assert_as_one(backend, case.inputs(dtype), case.gradients(dtype), **options)


@pytest.mark.parametrize("queries", [2, 17])
def test_any_two_shapes(repeatable: Backend, queries: int) -> None:
    """Each of the 16 shapes of a mask beside 4 of a bias, in turn."""
    shapes = ["".join(x) or "-" for n in range(5) for x in itertools.combinations("bhqk", n)]
    for n, mask in enumerate(shapes):
        for bias in shapes[n % 4 :: 4]:
            words = {"mask": f"random {mask}", "bias": f"bands {bias}"}
            case = Case(2, 4, 2, queries, 35, 8, 8, q_offset=20, **words)
            options = case.options | case.tensors(torch.float32)
            assert_as_one(repeatable, case.inputs(torch.float32), case.gradients(torch.float32), **options)


HIDING = [
    Case(2, 4, 2, 36, 50, 21, 19, causal=False, mask="random bhqk", bias="bands hqk"),
    Case(2, 2, 1, 36, 50, 16, 16, mask="random qk", bias="bands bk", window=(20, -1), key_ranges="random", softcap=3.0),
    Case(1, 4, 2, 3, 150, 32, 16, causal=False, mask="random bhqk", bias="bands bhqk"),
]


@each_dtype
@pytest.mark.parametrize("case", HIDING, ids=str)
def test_what_either_hides_changes_no_bit(backend: Backend, case: Case, dtype: torch.dtype) -> None:
    """NaN in a key and its value reaches the rows that see it and no others."""
    (q, k, v), (dout, dlse), tensors = case.inputs(dtype), case.gradients(dtype), case.tensors(dtype)
    options = case.options | tensors
    named = {x: y for x, y in case.options.items() if x in ("causal", "q_offset", "window", "key_ranges")}
    seen = reference.visible(case.seqlen_q, case.seqlen_k, **named) & tensors["mask"] & (tensors["bias"] != -math.inf)
    seen = seen.expand(case.batch, case.num_heads_q, case.seqlen_q, case.seqlen_k)
    clean = run(backend.attention, (q, k, v), dout, dlse, **options)
    for key in (case.seqlen_k // 2, case.seqlen_k - 9):
        soiled = k.clone(), v.clone()
        for x in soiled:
            x[:, :, key] = math.nan
        rows, blind = run(backend.attention, (q, *soiled), dout, dlse, **options), ~seen[..., key]
        backend.assert_same(tuple(x[blind] for x in rows[:3]), tuple(x[blind] for x in clean[:3]))
        assert not rows[0][~blind].isfinite().all(-1).any()


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
    qkv, (dout, dlse), (mask, bias) = case.inputs(dtype), case.gradients(dtype), case.tensors(dtype).values()
    clean = run(repeatable.attention, qkv, dout, dlse, mask=mask, bias=bias)
    for bad in (math.nan, math.inf):
        soiled = run(repeatable.attention, qkv, dout, dlse, mask=mask, bias=bias.masked_fill(~mask, bad))
        repeatable.assert_same(soiled, clean)
        assert torch.equal(soiled[5], clean[5])
        assert not soiled[5].masked_fill(mask, 0).any()


@each_dtype
@pytest.mark.parametrize("queries", [5, 20])
def test_rows_that_one_or_both_leave_empty(backend: Backend, dtype: torch.dtype, queries: int) -> None:
    """Row 1 is hidden by the mask, row 2 by the bias, row 3 by both; row 4 sees even keys of one, odd ones of other."""
    case = Case(2, 2, 1, queries, 40, 16, 16, causal=False)
    qkv, (dout, dlse) = case.inputs(dtype), case.gradients(dtype)
    mask, hidden = torch.ones(queries, 40, dtype=torch.bool), torch.zeros(queries, 40, dtype=torch.bool)
    mask[[1, 3]], hidden[[2, 3]] = False, True
    mask[4, ::2], hidden[4, 1::2] = False, True
    bias = torch.randn(2, queries, 40).to(dtype).masked_fill(hidden, -math.inf)
    out, lse, dq, dk, dv, dbias = run(
        backend.attention, qkv, dout, dlse, **case.options, mask=mask[None, None], bias=bias
    )
    empty = slice(1, 5)
    assert not any(x[:, :, empty].any() for x in (out, dq))
    assert not dbias[:, empty].any()
    assert (lse[:, :, empty] == -math.inf).all()
    assert lse[:, :, 5:].isfinite().all()
    assert lse[:, :, 0].isfinite().all()
    assert all(x.isfinite().all() for x in (out, dq, dk, dv, dbias))


@each_dtype
def test_the_layout_of_a_mask_changes_no_bit(repeatable: Backend, dtype: torch.dtype) -> None:
    """Any strides, and any number of dimensions that mean the same."""
    case, sizes = Case(2, 2, 1, 9, 33, 8, 8, bias="bands hk"), (2, 2, 9, 33)
    qkv, (dout, dlse) = case.inputs(dtype), case.gradients(dtype)
    bias = case.tensors(dtype)["bias"]
    for words in ("random bhqk", "random bk", "random q", "random -"):
        mask = case_options.mask(words, sizes)
        more = mask[(None,) * (4 - mask.dim())]
        forms = (mask, case_options.strided(mask), more, more.expand(sizes), more.expand(sizes).clone())
        first, *others = (run(repeatable.attention, qkv, dout, dlse, mask=x, bias=bias) for x in forms)
        for other in others:
            repeatable.assert_same(other, first)
            assert torch.equal(other[5], first[5])


@pytest.mark.usefixtures("isa", "threads")
@pytest.mark.parametrize("case", BOTH[1:10:4], ids=str)
def test_same_bits_for_any_number_of_threads(case: Case) -> None:
    qkv, (dout, dlse) = case.inputs(torch.float32), case.gradients(torch.float32)
    options = case.options | case.tensors(torch.float32)
    torch.set_num_threads(1)
    once = run(attention, qkv, dout, dlse, **options)
    for n in (2, 3, 7):
        torch.set_num_threads(n)
        for x, y in zip(run(attention, qkv, dout, dlse, **options), once, strict=True):
            assert torch.equal(x, y)


def test_no_tensor_joins_them() -> None:
    """A mask of keys beside a bias of queries is no tensor of all pairs, which takes 64 MB."""
    qkv = Case(1, 1, 1, 4096, 4096, 16, 16).inputs(torch.float32)
    mask, bias = torch.rand(4096) < 0.5, torch.randn(4096, 1)

    def call() -> None:
        run(attention, qkv, torch.ones_like(qkv[0]), causal=False, mask=mask, bias=bias)

    call()
    assert memory_needed(call) < 16e6
