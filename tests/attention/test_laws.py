"""Promise: on every backend masked keys change no bit, visible NaN propagates, parts and groups equal the whole."""

import itertools
import math

import pytest
import torch
from support.assertions import finite
from support.backends import Backend
from support.cases import DTYPES, Case, assert_equal, each_dtype, run
from support.yardstick import assert_accurate
from torch import Tensor
from torch.autograd import gradcheck

import pyattn
from pyattn import attention, reference
from pyattn.instruction_sets import BFLOAT16_PRODUCTS


@each_dtype
@pytest.mark.parametrize("bad", [math.nan, math.inf, 7.0])
def test_what_is_not_seen_changes_no_bit(backend: Backend, dtype: torch.dtype, bad: float) -> None:
    """Rows up to t ignore keys and values after t; keys from t on ignore queries and dout before t."""
    dims = ((24, 20), (64, 64), (128, 128), (256, 192)) if backend.family == "cuda" else ((24, 20),)
    for seqlen, head_dims in itertools.product(backend.lengths(dtype), dims):
        case = Case(1, 2, 1, seqlen, seqlen, *head_dims)
        (q, k, v), dout, _ = case.drawn(dtype)
        t = seqlen // 2
        clean = run(backend.attention, (q, k, v), dout)
        future_k, future_v, past_q, past_dout = (x.clone() for x in (k, v, q, dout))
        future_k[:, :, t + 1 :], future_v[:, :, t + 1 :], past_q[:, :, :t], past_dout[:, :, :t] = bad, bad, bad, bad
        rows = run(backend.attention, (q, future_k, future_v), dout)[:3]
        backend.assert_same(tuple(x[:, :, : t + 1] for x in rows), tuple(x[:, :, : t + 1] for x in clean))
        keys = run(backend.attention, (past_q, k, v), past_dout)[3:]
        assert_equal(tuple(x[:, :, t:] for x in keys), tuple(x[:, :, t:] for x in clean[3:]))


@each_dtype
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("case", [Case(1, 2, 1, 90, 140, 40, 72, q_offset=20)], ids=str)
def test_bad_keys_and_queries_within_a_tile(backend: Backend, case: Case, dtype: torch.dtype, bad: float) -> None:
    """Rows that see bad keys have no finite result and no finite gradient; other rows of the tile keep their bits."""
    last = 60  # the queries up to it see the keys up to 80
    (q, k, v), *gradients = case.drawn(dtype)
    clean = run(backend.attention, (q, k, v), *gradients, **case.options)
    soiled_k, soiled_v = k.clone(), v.clone()
    soiled_k[:, :, last + 21 + 5], soiled_v[:, :, last + 21 :: 7] = bad, bad
    soiled = run(backend.attention, (q, soiled_k, soiled_v), *gradients, **case.options)
    backend.assert_same(tuple(x[:, :, : last + 1] for x in soiled[:3]), tuple(x[:, :, : last + 1] for x in clean[:3]))
    assert not soiled[0][:, :, last + 1 :].isfinite().all(-1).any()
    assert soiled[2][:, :, last + 6 :].isnan().all()

    dout = gradients[0].clone()
    q[:, :, 10], dout[:, :, 11] = bad, bad  # these queries see the keys up to 31
    soiled = run(backend.attention, (q, k, v), dout, gradients[1], **case.options)
    assert_equal(tuple(x[:, :, 32:] for x in soiled[3:]), tuple(x[:, :, 32:] for x in clean[3:]))
    assert not any(x[:, :, :31].isfinite().any() for x in soiled[3:])


@each_dtype
@pytest.mark.parametrize("position", [63, 95])
def test_one_bad_element(native: Backend, dtype: torch.dtype, position: int) -> None:
    """A NaN in the last column and row of a block changes no bit of rows and keys that don't see it."""
    inputs = [*Case(1, 2, 1, 96, 96, 21, 19).inputs(dtype), torch.randn(1, 2, 96, 19).to(dtype)]
    clean = run(native.attention, tuple(inputs[:3]), inputs[3])
    for which in range(4):
        *qkv, dout = (x.clone() for x in inputs)
        (*qkv, dout)[which][:, :, position, -1] = math.nan
        results = run(native.attention, tuple(qkv), dout)
        if which in (1, 2):
            native.assert_same(tuple(x[:, :, :position] for x in results[:3]), tuple(x[:, :, :position] for x in clean))
        else:
            assert_equal(*(tuple(x[:, :, position + 1 :] for x in r[3:]) for r in (results, clean)))


@each_dtype
def test_a_key_that_no_query_sees(backend: Backend, dtype: torch.dtype) -> None:
    """A masked key has zero gradient, even if it is NaN, and even in a tile that later queries would fill."""
    case = Case(1, 1, 1, 10, 40, 32, 32, q_offset=0)
    q, k, v = case.inputs(dtype)
    k[:, :, 12], v[:, :, 13] = math.nan, math.nan
    _, _, dq, dk, dv = run(backend.attention, (q, k, v), *case.gradients(dtype), **case.options)
    assert dq.isfinite().all()
    assert (dk[:, :, 10:] == 0).all()
    assert (dv[:, :, 10:] == 0).all()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES[2:], ids=str)
def test_every_16_bit_number_is_read_and_rounded_as_torch_does(dtype: torch.dtype) -> None:
    """The mean and the sum of each number and its successor lie halfway between two numbers, up to infinity."""
    a = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    b = a.roll(-1)
    largest, eps = torch.finfo(dtype).max, torch.finfo(dtype).eps
    b[a == largest] = largest / (2 - eps) * eps / 2  # half the distance to the next number, if there were one
    pairs = torch.stack([a, b])[None, None]
    mean = attention(torch.zeros(1, 1, 1, 8, dtype=dtype), torch.zeros(1, 1, 2, 8, dtype=dtype), pairs)
    q, k, v = Case(1, 1, 1, 2, 1, 8, 2**16).inputs(dtype)
    *_, total = run(attention, (q, k, v), pairs, causal=False)
    exact = a.float() + b.float()
    # VDPBF16PS and TDPBF16PS treat subnormal numbers as 0.
    subnormal = torch.stack([(x != 0) & (x.abs() < torch.finfo(dtype).tiny) for x in (a, b)]).any(0)
    compared = ~subnormal if pyattn.isa() in BFLOAT16_PRODUCTS and dtype == torch.bfloat16 else slice(None)
    for x, y in ((mean, exact / 2), (total, exact)):
        torch.testing.assert_close(x.flatten()[compared], y.to(dtype)[compared], rtol=0, atol=0, equal_nan=True)


@each_dtype
@pytest.mark.parametrize("causal", [True, False])
def test_nan_that_is_seen_arrives(repeatable: Backend, dtype: torch.dtype, causal: bool) -> None:
    """NaN in q, k or v reaches every row that sees it, at every length; on a CPU, NaN in v reaches its column only."""
    for seqlen in repeatable.lengths(dtype):
        inputs = Case(1, 2, 2, seqlen, seqlen, 24, 20).inputs(dtype)
        for which, t in itertools.product(range(3), {0, seqlen // 2, seqlen - 1}):
            soiled = [x.clone() for x in inputs]
            soiled[which][0, 0, t, 3] = math.nan
            out, lse = repeatable.attention(*soiled, causal=causal, return_lse=True)
            rows = torch.zeros(1, 2, seqlen, dtype=torch.bool)
            rows[0, 0, slice(t, t + 1) if which == 0 else slice(t, None) if causal else slice(None)] = True
            whole_rows = which < 2 or repeatable.cuda_kernels
            assert torch.equal(out.isnan().all(-1) if which < 2 else out[..., 3].isnan(), rows)
            assert torch.equal(out.isnan().any(-1), rows)
            assert whole_rows or not out[..., 4:].isnan().any()
            assert torch.equal(lse.isnan(), rows & (which < 2))


@each_dtype
def test_scores_that_are_all_minus_infinity(backend: Backend, dtype: torch.dtype) -> None:
    """The softmax of nothing but -inf is NaN, as in torch; beside a finite score, -inf has weight 0."""
    q, k, v = Case(1, 1, 1, 2, 200, 2, 3).inputs(dtype)
    q[:], k[:] = -math.inf, 1
    assert backend.attention(q, k, v).isnan().all()
    assert all(x.isnan().all() for x in run(backend.attention, (q, k, v), torch.ones(1, 1, 2, 3).to(dtype))[2:4])
    if backend.keeps_infinity(dtype):
        q[:], k[:], k[:, :, 150] = 1, -math.inf, 1
        out, lse = backend.attention(q, k, v, return_lse=True)
        assert torch.equal(out, v[:, :, 150:151].expand(1, 1, 2, 3))
        assert torch.allclose(lse, torch.full_like(lse, 2**0.5))


@each_dtype
@pytest.mark.parametrize("heads", [1, 3, 17])
@pytest.mark.parametrize("listed", [None, 1, 20, 40], ids=str)
@pytest.mark.usefixtures("isa")
def test_a_key_with_score_minus_infinity(dtype: torch.dtype, heads: int, listed: int | None) -> None:
    """It has weight 0 and gradients of 0, for any number of rows. Blocks of that many keys are listed, or none."""
    for seqlen_q in (1, 2, 65, 70):
        case = Case(1, heads, 1, seqlen_q, 40, 32, 32, causal=False)
        (q, k, v), *gradients = case.drawn(dtype)
        q[..., 3], k[:, :, 7, 3] = -1, math.inf
        options = {"causal": False}
        if listed:
            options |= {"selected": torch.arange(40 // listed).expand(1, 1, seqlen_q, -1), "selected_block": listed}
        out, _, _, dk, dv = run(attention, (q, k, v), *gradients, **options)
        assert all(x.isfinite().all() for x in (out, dk, dv))
        assert not dk[:, :, 7].any()
        assert not dv[:, :, 7].any()


@each_dtype
def test_inf_values_arrive(repeatable: Backend, dtype: torch.dtype) -> None:
    q, k, v = Case(1, 1, 1, 70, 70, 8, 8).inputs(dtype)
    v[0, 0, 30, 2] = math.inf
    out = repeatable.attention(q, k, v)
    if repeatable.cuda_kernels:
        assert not out[0, 0, 30:, 2].isfinite().any()
    else:
        assert (out[0, 0, 30:, 2] == math.inf).all()
        assert out[0, 0, :, 3:].isfinite().all()
    assert out[0, 0, :30].isfinite().all()


@each_dtype
@pytest.mark.parametrize(
    "case", [Case(1, 2, 1, 80, 50, 16, 16, q_offset=-70), Case(1, 2, 1, 200, 90, 16, 16, q_offset=-170)], ids=str
)
def test_rows_that_see_nothing(backend: Backend, case: Case, dtype: torch.dtype) -> None:
    """Their output and gradient are 0, their lse is -inf, and keys that no query sees have zero gradient."""
    out, lse, dq, dk, dv = run(backend.attention, *case.drawn(dtype), **case.options)
    blind = -case.q_offset
    assert (out[:, :, :blind] == 0).all()
    assert (lse[:, :, :blind] == -math.inf).all()
    assert (dq[:, :, :blind] == 0).all()
    assert lse[:, :, blind:].isfinite().all()
    assert (dk[:, :, case.seqlen_q - blind :] == 0).all()
    assert (dv[:, :, case.seqlen_q - blind :] == 0).all()


@pytest.mark.parametrize("offset", [2**63 - 1, -(2**63), 2**40, -(2**40)])
def test_extreme_offsets(repeatable: Backend, offset: int) -> None:
    q, k, v = Case(2, 4, 2, 5, 7, 8, 6).inputs(torch.float32)
    out = repeatable.attention(q, k, v, q_offset=offset)
    assert torch.equal(out, repeatable.attention(q, k, v, causal=False) if offset > 0 else torch.zeros_like(out))
    assert torch.equal(out, repeatable.attention(q, k, v, q_offset=torch.full((2,), offset)))


@pytest.mark.parametrize(("value", "gradient"), [(1e36, 1), (1, 1e36)])
@pytest.mark.usefixtures("isa")
def test_weights_below_the_smallest_normal_number_are_zero(value: float, gradient: float) -> None:
    """A weight of e^-95 would be subnormal in float32, and its products far slower; large factors make it visible."""
    q, k, v = Case(1, 1, 1, 256, 256, 64, 64).inputs(torch.float32)
    q[:], k[:], v[:] = 0, 0, value
    q[..., 0], k[:, :, 1:, 0], v[:, :, 0] = 8, -95, 0
    out, _, _, dk, dv = run(attention, (q, k, v), torch.full_like(v, gradient))
    for x in (out, dk[:, :, 1:], dv[:, :, 1:]):
        assert (x == 0).all()


@each_dtype
def test_decoding_equals_the_whole(native: Backend, dtype: torch.dtype) -> None:
    """One query at a time, against the keys so far as in a KV cache, gives the rows of the full forward."""
    q, k, v = Case(1, 4, 2, 110, 110, 24, 20).inputs(dtype)
    steps = [native.attention(q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1]) for t in range(110)]
    plain, exact = (reference.attention(*(x.to(t) for x in (q, k, v))) for t in (dtype, torch.float64))
    assert_accurate("out", torch.cat(steps, 2), plain, exact)


@each_dtype
@pytest.mark.parametrize("case", [Case(1, 6, 2, 9, 30, 24, 24), Case(2, 6, 2, 45, 110, 24, 24)], ids=str)
def test_grouped_heads_equal_repeated_heads(backend: Backend, case: Case, dtype: torch.dtype) -> None:
    (q, k, v), dout, dlse = case.drawn(dtype)
    grouped = run(backend.attention, (q, k, v), dout, dlse)
    repeated = run(backend.attention, (q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1)), dout, dlse)
    backend.assert_same(grouped[:3], repeated[:3])
    for x, y in zip(grouped[3:], repeated[3:], strict=True):
        exact = y.double().unflatten(1, (2, 3)).sum(2)
        assert_accurate("dk, dv", x, exact.to(dtype), exact)


@pytest.mark.parametrize(
    "case",
    [Case(1, 2, 1, 4, 5, 3, 2, softmax_scale=-0.7), Case(1, 2, 1, 5, 4, 2, 3, q_offset=-2, dropout_p=0.3)],
    ids=str,
)
def test_gradients_are_differences(repeatable: Backend, case: Case) -> None:
    def out_and_lse(*qkv: Tensor) -> tuple[Tensor, Tensor]:
        return finite(*repeatable.attention(*qkv, return_lse=True, **case.options))

    assert gradcheck(out_and_lse, tuple(t.requires_grad_() for t in case.inputs(torch.float64)))
