"""Promise: attention_weights gives the weights of chosen rows and heads, with every option, differentiably."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support.assertions import assert_close, each_refusal, graph_of, refused
from support.cases import Case, allocated, each_dtype
from support.weights import CASES, CHOSEN, each_case, inputs, lse_of
from support.yardstick import in_double, learned
from torch import Tensor
from torch.autograd import gradcheck

from pyattn import attention, attention_weights, reference


def expected(q: Tensor, k: Tensor, options: dict[str, Any]) -> Tensor:
    """The reference's weights in float64."""
    return reference.attention(q.double(), k.double(), k.double(), return_weights=True, **in_double(options))[1]


@each_case
@each_dtype
@pytest.mark.parametrize("with_lse", [False, True])
def test_equals_reference(case: Case, dtype: torch.dtype, with_lse: bool) -> None:
    """16-bit results are rounded once, from float32; 12 keys and 8 columns leave few roundings before that."""
    q, k, options = inputs(case, dtype)
    lse = lse_of(q, k, options) if with_lse else None
    found = attention_weights(q, k, lse=lse, **options)
    exact = expected(q, k, options)
    assert found.dtype == dtype
    compute = torch.promote_types(dtype, torch.float32)
    bound = (
        torch.finfo(dtype).eps / 2 * exact.abs() + 64 * torch.finfo(compute).eps + torch.finfo(dtype).smallest_normal
    )
    assert ((found.double() - exact).abs() <= bound).all()
    assert torch.equal(found == 0, exact == 0) or dtype == torch.float16


@each_case
@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("given", [list, tuple, torch.tensor, lambda x: torch.tensor(x, dtype=torch.int32)])
def test_chosen_heads_and_rows(case: Case, with_lse: bool, given: Any) -> None:
    q, k, options = inputs(case, torch.float64)
    lse = lse_of(q, k, options) if with_lse else None
    exact = expected(q, k, options)
    heads, rows = (given(chosen) for chosen in CHOSEN.values())
    both = attention_weights(q, k, lse=lse, heads=heads, rows=rows, **options)
    assert_close(both, exact[:, CHOSEN["heads"]][:, :, CHOSEN["rows"]], 1e-14)
    of_rows = attention_weights(q, k, lse=lse, rows=rows, **options)
    assert_close(of_rows, exact[:, :, CHOSEN["rows"]], 1e-14)
    none = attention_weights(q, k, lse=lse, heads=heads, rows=[], **options)
    assert none.shape == (2, 2, 0, k.shape[2])


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)])
def test_nothing_to_weigh(shape: tuple[int, ...]) -> None:
    q = torch.randn(shape)
    assert attention_weights(q, q).shape == (*shape[:3], shape[2])
    assert attention_weights(q, torch.randn(shape)[:, :, :0]).shape == (*shape[:3], 0)
    relative = torch.randn(*shape[:2], 5)
    biased = attention_weights(q, q, relative_bias=relative, bias=relative[:, :, :1, None])
    assert biased.shape == (*shape[:3], shape[2])


@each_case
@pytest.mark.parametrize("with_lse", [False, True])
def test_gradcheck(case: Case, with_lse: bool) -> None:
    q, k, options = inputs(replace(case, head_dim=2), torch.float64)
    names = learned(options)
    leaves = [t.double().detach().requires_grad_() for t in (q, k, *(options[name] for name in names))]

    def chosen(q: Tensor, k: Tensor, *tensors: Tensor) -> Tensor:
        known = options | dict(zip(names, tensors, strict=True))
        lse = reference.attention(q, k, k, return_lse=True, **known)[1] if with_lse else None
        return attention_weights(q, k, lse=lse, **known, **CHOSEN)

    assert gradcheck(chosen, leaves, fast_mode=True)


def test_second_derivatives() -> None:
    q, k, options = inputs(CASES[5], torch.float64)
    assert torch.autograd.gradgradcheck(
        partial(attention_weights, heads=[1], rows=[7], **options),
        (q.requires_grad_(), k.requires_grad_()),
        fast_mode=True,
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_what_is_not_seen_does_not_leak(value: float, softcap: float) -> None:
    q, k, _ = Case(1, 2, 1, 6, 6, 4, 4).inputs(torch.float64)
    bias = torch.randn(2, 6, 6, dtype=torch.float64)
    dirty_k, dirty_q, dirty_bias = k.clone(), q.clone(), bias.clone()
    dirty_k[:, :, 4:] = value
    dirty_q[:, :, 4:] = value
    dirty_bias[:, :, 4:] = value
    results = []
    for x, y, z in ((q, k, bias), (dirty_q, dirty_k, dirty_bias)):
        leaves = [t.clone().requires_grad_() for t in (x, y, z)]
        found = attention_weights(leaves[0], leaves[1], bias=leaves[2], softcap=softcap, rows=[0, 1, 2, 3])
        grads = torch.autograd.grad(found.sin().sum(), leaves)
        results.append((found, grads[0][:, :, :4], grads[1], grads[2]))
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean.isnan(), dirty.isnan())
        assert_close(dirty, clean, 1e-14)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_seen_arrives(value: float) -> None:
    q, k, v = Case(1, 2, 1, 6, 6, 4, 4).inputs(torch.float64)
    k[:, :, 2, 1] = value
    found = attention_weights(q.requires_grad_(), k)
    exact = reference.attention(q, k, v, return_weights=True)[1]
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-14, equal_nan=True)
    dq = torch.autograd.grad(found.sin().sum(), q)[0]
    assert not dq[:, :, :2].isnan().any()


@each_case
def test_weights_times_values_are_out(case: Case) -> None:
    q, k, v = case.inputs(torch.float64)
    options = case.given(torch.float64)
    out, lse = attention(q, k, v, return_lse=True, **options)
    values = v.repeat_interleave(case.num_heads_q // case.num_heads_kv, 1)
    for known in (None, lse):
        assert_close(attention_weights(q, k, lse=known, **options) @ values, out, 1e-13)


def test_memory_is_linear_in_what_is_asked() -> None:
    """Two rows of one head over 16384 keys take 128 kB; all weights of the head would take a gigabyte."""
    q, k = torch.randn(2, 1, 8, 16384, 8)
    mask = torch.ones(16384, dtype=torch.bool)

    def call() -> None:
        found = attention_weights(q, k, heads=[3], rows=[5, -1], dropout_p=0.1, window=(100, -1), mask=mask)
        assert found.count_nonzero() <= 6 + 101

    assert 2**17 <= allocated(call) <= 2**23


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_autocast() -> None:
    q, k, _ = CASES[0].inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = attention_weights(q, k, bias=torch.zeros(1))
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, attention_weights(q.bfloat16(), k.bfloat16()))
    compiled = graph_of(attention_weights)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compiled(q, k), found)


def test_meta_tensors() -> None:
    q, k, _ = CASES[0].inputs(torch.bfloat16)
    found = attention_weights(q.to("meta"), k.to("meta"), heads=[1], sinks=torch.zeros(4, device="meta"))
    assert (found.device.type, found.dtype, found.shape) == ("meta", torch.bfloat16, (2, 1, 9, 12))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compile() -> None:
    q, k, options = inputs(replace(CASES[8], key_ranges="random"), torch.float64)
    call, leaf = partial(attention_weights, **CHOSEN, **options), q.requires_grad_()
    found = [f(leaf, k) for f in (graph_of(call), call)]
    assert_close(*found, 1e-14)
    assert_close(*(torch.autograd.grad(x.sin().sum(), leaf)[0] for x in found), 1e-14)


def test_functional_transforms() -> None:
    q, k, options = inputs(CASES[8], torch.float64)
    options.pop("dropout_p")
    call = partial(attention_weights, **CHOSEN, **options)
    grad = torch.func.grad(lambda q: call(q, k).sin().sum())
    leaf = q.clone().requires_grad_()
    torch.testing.assert_close(grad(q), torch.autograd.grad(call(leaf, k).sin().sum(), leaf)[0])
    many = torch.stack([q, q.sin()])
    torch.testing.assert_close(torch.vmap(call, (0, None))(many, k)[1], call(many[1], k))
    ranges = torch.tensor([0, 9]).expand(2, 1, 9, 2)
    one = attention_weights(q, k, key_ranges=ranges[1])
    assert torch.equal(torch.vmap(lambda r: attention_weights(q, k, key_ranges=r))(ranges)[1], one)


@each_refusal(
    [
        ({"heads": [0, 4]}, ValueError, "each of heads must be between -4 and 3, got 4 at 1"),
        ({"rows": torch.tensor([-10])}, ValueError, "each of rows must be between -9 and 8, got -10 at 0"),
        ({"rows": 3}, TypeError, "rows must be Sequence or Tensor, got 3"),
        ({"rows": [1.0]}, TypeError, "each of rows must be int, got 1.0"),
        ({"heads": torch.ones(4, dtype=torch.bool)}, TypeError, "heads must be int32 or int64, got torch.bool"),
        ({"lse": torch.zeros(2, 4, 8)}, ValueError, "lse must have shape (2, 4, 9), got (2, 4, 8)"),
        ({"lse": 1.0}, TypeError, "lse must be Tensor, got 1.0"),
        ({"window": (-3, 0)}, ValueError, "window must be (left, right), each at least -1, got [-3, 0]"),
        ({"bias": torch.zeros(3, 12)}, ValueError, "bias must have 1 to 4 dimensions, each 1 or that of [2, 4, 9, 12]"),
        (
            {"key_ranges": torch.zeros(1, 8, 2, dtype=torch.int64)},
            ValueError,
            "key_ranges must have shape (2 or 1, 9 or 1, 2)",
        ),
        ({"sinks": torch.zeros(3)}, ValueError, "sinks must have shape (4), got [3]"),
        ({"dropout_p": 1.0}, ValueError, "dropout_p must be at least 0 and below 1, got 1"),
        ({"k": torch.zeros(2, 3, 12, 8)}, ValueError, "num_heads_q must be a multiple of num_heads_kv, got 4 and 3"),
        ({"scale": 0.5}, TypeError, "attention_weights has no argument scale (use softmax_scale), got 0.5"),
    ]
)
def test_errors(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    q, k, _ = CASES[0].inputs(torch.float32)
    with refused(kind, message):
        attention_weights(**{"q": q, "k": k} | changes)


def test_ranges_out_of_bounds() -> None:
    q, k, _ = CASES[0].inputs(torch.float32)
    for begin, end in ((-1, 3), (4, 3), (0, 13)):
        ranges = torch.tensor([0, 12]).expand(1, 9, 2).clone()
        ranges[0, 4] = torch.tensor([begin, end])
        message = f"key_ranges must hold 0 <= begin <= end <= seqlen_k = 12, got [{begin}, {end}] for query 4"
        with refused(ValueError, message):
            attention_weights(q, k, key_ranges=ranges)
    several = torch.tensor([[0, 3], [2, 12]]).expand(1, 9, 2, 2)
    with refused(ValueError, "key_ranges must hold sorted, disjoint intervals 0 <= begin <= end <= seqlen_k = 12, "):
        attention_weights(q, k, key_ranges=several)
