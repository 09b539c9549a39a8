"""Promise: softcap, biases, ALiBi and sinks have the right results and gradients, and the stated equivalents."""

import math
from typing import Any

import pytest
import torch
from support.backends import Backend
from support.cases import Case, Truth, assert_case_accurate, assert_equal, each_dtype, run
from support.yardstick import assert_accurate

from pyattn import attention, reference

CASES = [
    Case(1, 4, 2, 70, 130, 16, 20, softcap=1.5, dropout_p=0.2),
    Case(1, 2, 2, 100, 100, 64, 64, softcap=30.0, softmax_scale=2.0),
    Case(1, 2, 1, 33, 90, 24, 17, causal=False, softcap=0.1),
    Case(1, 4, 2, 90, 90, 16, 16, alibi="h", window=(40, -1)),
    Case(2, 2, 1, 50, 90, 24, 20, causal=False, q_offset=20, alibi="bh", wide=True),
    Case(2, 2, 1, 60, 120, 16, 16, causal=False, key_ranges="empty", sinks=True),
    Case(1, 2, 1, 65, 63, 20, 24, sinks=True, wide=True, dropout_p=0.3),
    Case(1, 1, 1, 150, 150, 16, 16, sinks=True),
    Case(2, 2, 1, 66, 70, 16, 20, bias="float bhqk"),
    Case(2, 2, 1, 66, 70, 32, 32, causal=False, bias="float qk", wide=True),
    Case(2, 2, 1, 40, 150, 16, 16, bias="float hk strided", dropout_p=0.2),
    Case(2, 2, 1, 40, 150, 16, 16, causal=False, bias="float bq"),
    Case(2, 2, 1, 40, 100, 16, 16, causal=False, bias="float -"),
    Case(1, 2, 1, 33, 330, 16, 16, causal=False, bias="bands hqk"),
    Case(1, 1, 1, 130, 200, 72, 40, bias="bands bqk strided", window=(90, -1)),
    Case(2, 2, 1, 40, 100, 16, 16, causal=False, bias="lowest bhqk"),
    Case(2, 2, 2, 70, 90, 16, 20, relative="h 200"),
    Case(2, 4, 2, 70, 200, 24, 16, causal=False, relative="bh 30", window=(90, 60), dropout_p=0.2),
    Case(1, 6, 1, 66, 70, 64, 32, q_offset=-9, relative="- 12", wide=True),
    Case(2, 12, 1, 100, 130, 16, 16, causal=False, relative="b 0"),
    # Few queries, whose keys are split.
    Case(2, 8, 2, 1, 1100, 32, 16, bias="float bhqk"),
    Case(1, 6, 2, 8, 1100, 16, 16, softcap=2.0, alibi="h", sinks=True, bias="float k strided"),
    Case(1, 4, 1, 3, 700, 16, 16, causal=False, sinks=True, bias="bands hqk"),
    Case(2, 2, 1, 2, 1200, 64, 16, alibi="bh", window=(900, -1), dropout_p=0.2),
    Case(2, 4, 2, 2, 1300, 64, 64, relative="h 1000"),
    # All of them together.
    Case(
        *(2, 4, 2, 50, 80, 24, 20),
        **{"q_offset": 10, "window": (40, -1), "key_ranges": "documents", "dropout_p": 0.3, "softmax_scale": -0.4},
        **{
            "softcap": 3.0,
            "bias": "bands bhqk strided",
            "alibi": "bh",
            "sinks": True,
            "wide": True,
            "relative": "bh 20",
        },
    ),
    Case(
        *(2, 2, 1, 33, 90, 16, 16),
        **{"causal": False, "window": (30, 40), "key_ranges": "random"},
        **{"softcap": 3.0, "bias": "float k", "alibi": "h", "sinks": True, "relative": "h 300"},
    ),
]


@each_dtype
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_and_backward(repeatable: Backend, case: Case, dtype: torch.dtype) -> None:
    assert_case_accurate(case, dtype, repeatable.attention)


@each_dtype
@pytest.mark.parametrize("q_offset", [None, -7, 2000])
def test_alibi_equals_its_bias(repeatable: Backend, dtype: torch.dtype, q_offset: int | None) -> None:
    """Slopes multiply the distance to the query's position, however far beyond the last key it is."""
    case = Case(1, 2, 1, 40, 60, 16, 16, causal=q_offset == -7, q_offset=q_offset, alibi="h")
    slopes = torch.tensor([0.25, -0.5]).to(dtype)
    bias = -slopes[:, None, None].double() * reference.distances(40, 60, q_offset=q_offset).abs()
    same = case.options | {"bias": bias}
    truth = Truth(case.drawn(dtype), case.options | {"alibi_slopes": slopes}, same)
    truth.assert_allows(repeatable.attention)


@each_dtype
def test_a_large_softcap_equals_none(repeatable: Backend, dtype: torch.dtype) -> None:
    """``c tanh(s / c)`` is ``s (1 - (s / c)^2 / 3 + ...)``; plain float16 has no larger cap, nor smaller quotients."""
    case, softcap = Case(1, 2, 1, 40, 60, 16, 16), 2.0 ** (10 if dtype == torch.float16 else 40)
    truth = Truth(case.drawn(dtype), case.options | {"softcap": softcap}, case.options)
    truth.assert_allows(repeatable.attention)


@each_dtype
@pytest.mark.parametrize("ratio", [1.0, 8.0, 17.0])
def test_softcap_near_its_bounds_has_an_exact_gradient(repeatable: Backend, dtype: torch.dtype, ratio: float) -> None:
    """Two keys with scores near the cap, where 1 - tanh^2 would cancel to a few bits, or to none at 17.

    dq has two terms, of both signs. Each errs by some roundings of P, dP and dS in their types, and by twice the
    ratio's rounding, which exp(-2 ratio) amplifies that much. In float16 dS is subnormal.
    """
    q, k = torch.ones(1, 1, 1, 1, dtype=dtype), torch.tensor([[[[ratio], [ratio - 0.5]]]], dtype=dtype)
    v, dout = torch.tensor([[[[1.0], [-1.0]]]], dtype=dtype), torch.ones(1, 1, 1, 1, dtype=dtype)
    dq = run(repeatable.attention, (q, k, v), dout, softmax_scale=1.0, softcap=1.0)[2]
    scores, u = k.flatten().double().tanh(), torch.exp(-2 * k.flatten().double())
    weights = scores.softmax(0)
    dp = torch.tensor([1.0, -1.0]).double()
    terms = weights * (dp - (weights * dp).sum()) * 4 * u / (1 + u) ** 2 * k.flatten().double()
    compute = torch.promote_types(dtype, torch.float32)
    bound = (8 * torch.finfo(dtype).eps + 4 * ratio * torch.finfo(compute).eps) * terms.abs().sum()
    smallest = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    assert abs(dq.item() - terms.sum().item()) <= bound + smallest * (1 + k.sum().item())


@each_dtype
@pytest.mark.parametrize("powers", [(0, 0), (4, 3), (40, 40), (-40, -40), (0, 80), (-10, 60)])
def test_a_scale_takes_powers_of_two_from_queries_and_keys(
    repeatable: Backend, dtype: torch.dtype, powers: tuple[int, int]
) -> None:
    """Same bits, except for dq and dk, which carry the power themselves; in float16 as far as its range goes."""
    a, b = (max(0, min(n, 8)) if dtype == torch.float16 else n for n in powers)
    (q, k, v), dout, _ = Case(1, 2, 1, 40, 70, 16, 16).drawn(dtype)
    if repeatable.cuda_kernels and dtype == torch.float32:
        q, k = (x.bfloat16().float() for x in (q, k))  # both halves of TF32 in range
    plain = run(repeatable.attention, (q, k, v), dout, softmax_scale=1.0)
    ours = run(repeatable.attention, (q * 2.0**a, k * 2.0**b, v), dout, softmax_scale=2.0 ** -(a + b))
    assert_equal((ours[0], ours[1], ours[4]), (plain[0], plain[1], plain[4]))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_least_scale_counts(dtype: torch.dtype) -> None:
    """A subnormal scale, without which the products would overflow: scores of 2 and 3."""
    q, k, v = Case(1, 1, 1, 4, 40, 1, 8).inputs(dtype)
    q[:], k[:] = 2.0**120, torch.tensor([1.0, 1.5]).repeat(20)[:, None] * 2.0**30
    out = attention(q, k, v, softmax_scale=2.0**-149, causal=False)
    exact = attention(q.double(), k.double(), v.double(), softmax_scale=2.0**-149, causal=False)
    assert (out.double() - exact).abs().max() <= 8 * torch.finfo(dtype).eps * exact.abs().max()


@pytest.mark.usefixtures("isa")
def test_a_scale_far_above_the_softcap_is_no_nan() -> None:
    """The quotient of the two is infinite in float32; a product of 0 still has score 0."""
    q, k, v = Case(1, 1, 1, 8, 40, 16, 16).inputs(torch.float32)
    k[:, :, ::2] = 0
    results = run(attention, (q, k, v), torch.ones_like(q), softmax_scale=1e30, softcap=1e-25, causal=False)
    exact = attention(q.double(), k.double(), v.double(), softmax_scale=1e30, softcap=1e-25, causal=False)
    torch.testing.assert_close(results[0], exact.float())
    assert all(x.isfinite().all() for x in results[:3])


@each_dtype
def test_softcap_bounds_the_scores(repeatable: Backend, dtype: torch.dtype) -> None:
    """Scores far beyond the cap weigh as much as the cap, and their gradient is 0."""
    q, k, v = Case(1, 1, 1, 3, 90, 16, 16).inputs(dtype)
    q[:], k[:] = 10, 10
    k[:, :, ::2] = -10
    out, lse, dq, dk, _ = run(repeatable.attention, (q, k, v), torch.randn(1, 1, 3, 16), causal=False, softcap=1.0)
    weights = torch.tensor([math.exp(-1), math.exp(1)], dtype=torch.float64).repeat(45)
    expected = (weights[:, None] * v.double()).sum(2, keepdim=True) / weights.sum()
    assert_accurate("out", out, expected.to(dtype).expand_as(out), expected.expand_as(out))
    largest = torch.full_like(lse, math.log(45 * (math.exp(1) + math.exp(-1))), dtype=torch.float64)
    assert_accurate("lse", lse, largest.to(lse.dtype), largest)
    assert not dq.any()
    assert not dk.any()


@each_dtype
def test_a_sink_is_a_key_without_a_value(repeatable: Backend, dtype: torch.dtype) -> None:
    """out, lse and every gradient equal those with one more key, of value 0, whose score is the sink."""
    case = Case(2, 4, 2, 30, 50, 16, 20, key_ranges="random")
    (q, k, v), dout, dlse = case.drawn(dtype)
    sinks = torch.tensor([-3.0, 0.0, 2.0, 30.0]).to(dtype)
    options = {"causal": False, "key_ranges": case.options["key_ranges"], "sinks": sinks}
    seen = torch.cat([reference.visible(30, 50, causal=False, key_ranges=options["key_ranges"])] * 4, 1)
    bias = torch.zeros(seen.shape).double().masked_fill(~seen, -math.inf)
    column = sinks.double()[:, None, None].expand(2, 4, 30, 1)
    bias = torch.cat([bias.expand(2, 4, 30, 50), column], 3)
    more_k, more_v = (torch.cat([x.double(), x.new_zeros(2, 2, 1, x.shape[3])], 2) for x in (k, v))
    exact = run(reference.attention, (q.double(), more_k, more_v), dout.double(), dlse, causal=False, bias=bias)
    out, lse, dq, dk, dv, dbias = exact
    expected = (out, lse, dq, dk[:, :, :50], dv[:, :, :50], dbias[..., 50].sum((0, 2)))
    truth = Truth(((q, k, v), dout, dlse), options)
    torch.testing.assert_close(truth.exact, expected, rtol=1e-12, atol=1e-12)
    truth.assert_allows(repeatable.attention)


@each_dtype
def test_extreme_sinks(repeatable: Backend, dtype: torch.dtype) -> None:
    """-inf equals no sink; beside the largest number keys have weight 0; a row without keys has its sink as lse."""
    case = Case(1, 2, 2, 40, 60, 16, 16, q_offset=-5)
    qkv, dout, dlse = case.drawn(dtype)
    none = run(repeatable.attention, qkv, dout, dlse, **case.options)
    sinks = torch.full((2,), -math.inf, dtype=dtype)
    out, lse, dq, dk, dv, dsinks = run(repeatable.attention, qkv, dout, dlse, **case.options, sinks=sinks)
    repeatable.assert_same((out, lse, dq, dk, dv), none)
    assert not dsinks.any()
    largest = torch.finfo(dtype).max
    results = run(repeatable.attention, qkv, dout, dlse, **case.options, sinks=torch.full((2,), largest, dtype=dtype))
    assert not any(x.any() for x in (results[0], *results[2:5]))
    assert (results[1] == largest).all()
    sinks = torch.tensor([0.3, -1.7]).to(dtype)
    out, lse = repeatable.attention(*qkv, **case.options, sinks=sinks, return_lse=True)
    assert torch.equal(lse[:, :, :5], sinks.to(lse.dtype)[:, None].expand(1, 2, 5))
    assert not out[:, :, :5].any()


@each_dtype
@pytest.mark.parametrize("form", ["sinks", "alibi_slopes", "bias", "relative_bias"])
def test_nan_that_is_seen_arrives(repeatable: Backend, dtype: torch.dtype, form: str) -> None:
    """In the rows that see it: those of one head, or those of the bias's entry."""
    case = Case(1, 2, 1, 20, 50, 16, 16)
    qkv, rows = case.inputs(dtype), torch.zeros(1, 2, 20, dtype=torch.bool)
    value = torch.ones((2, 20, 50) if form == "bias" else (2,), dtype=dtype)
    if form == "bias":
        value[1, 4, 30], rows[0, 1, 4] = math.nan, True
    elif form == "relative_bias":  # of the key 30 before each query, which are at positions 30 to 49
        value, rows[0, 1] = torch.ones(2, 81, dtype=dtype), True
        value[1, 10] = math.nan
    else:
        value[1], rows[0, 1] = math.nan, True
    options: dict[str, Any] = {form: value}
    out, lse = repeatable.attention(*qkv, return_lse=True, **options)
    assert torch.equal(lse.isnan(), rows)
    assert torch.equal(out.isnan().any(-1), rows)


@each_dtype
def test_lowest_numbers_average(repeatable: Backend, dtype: torch.dtype) -> None:
    """A row of the lowest number gives all keys equal weight, as in torch, and finite gradients."""
    case = Case(1, 2, 2, 20, 90, 16, 16, causal=False)
    qkv, dout, dlse = case.drawn(dtype)
    qkv[0].div_(1e3)  # float16's lowest number plus a score is no longer the lowest
    bias = torch.zeros(20, 90, dtype=dtype)
    bias[7] = torch.finfo(dtype).min
    bias[8, 3:] = torch.finfo(dtype).min
    out, *gradients = run(repeatable.attention, qkv, dout, dlse, causal=False, bias=bias)
    plain, exact = (
        reference.attention(*(x.to(t) for x in qkv), causal=False, bias=bias.to(t)) for t in (dtype, torch.float64)
    )
    assert_accurate("out", out, plain, exact)
    mean = qkv[2].double().mean(2, keepdim=True)
    assert (out[:, :, 7:8] - mean).abs().max() < 0.01
    assert all(x.isfinite().all() for x in gradients[1:])


@each_dtype
def test_bands_wider_than_a_key_block(repeatable: Backend, dtype: torch.dtype) -> None:
    """-inf at the first 300 keys, or at some in the middle, changes only which keys take part."""
    case = Case(1, 1, 1, 10, 400, 16, 16, causal=False)
    (q, k, v), dout, dlse = case.drawn(dtype)
    for hidden in (slice(0, 300), slice(50, 350), slice(200, 400)):
        bias = torch.zeros(400, dtype=dtype)
        bias[hidden] = -math.inf
        kept = bias == 0
        truth = Truth(((q, k, v), dout, dlse), {"causal": False, "bias": bias})
        alone = reference.attention(*(x.double() for x in (q, k[:, :, kept], v[:, :, kept])), causal=False)
        torch.testing.assert_close(truth.exact[0], alone, rtol=1e-12, atol=1e-12)
        truth.assert_allows(repeatable.attention)


@each_dtype
def test_gradients_of_scores_alone(native: Backend, dtype: torch.dtype) -> None:
    """Bias, slopes, sinks and relative bias have the same gradients if q, k and v need none."""
    case = Case(2, 2, 1, 20, 50, 16, 16, bias="float hqk", alibi="h", sinks=True, softcap=2.0, relative="h 9")
    (qkv, dout, dlse), tensors = case.drawn(dtype), case.tensors(dtype)
    expected = run(native.attention, qkv, dout, dlse, **case.options, **tensors)[5:]
    for x in tensors.values():
        x.requires_grad_()
    out, lse = native.attention(*qkv, **case.options, **tensors, return_lse=True)
    assert_equal(torch.autograd.grad([out, lse], list(tensors.values()), [dout, dlse.to(lse.dtype)]), expected)
    for name, y in zip(tensors, expected, strict=True):
        out, lse = native.attention(*qkv, **case.options, **tensors, return_lse=True)
        (x,) = torch.autograd.grad([out, lse], [tensors[name]], [dout, dlse.to(lse.dtype)])
        assert torch.equal(x, y)
