"""Promise: return_max_score gives each head's largest visible score, with every option, and changes nothing else."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from support.assertions import assert_close, graph_of, refused
from support.backends import Backend
from support.cases import Case, assert_equal, each_dtype, run
from support.packed import Packed, starts
from support.yardstick import in_double
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from pyattn import KVCache, attention, attention_varlen, attention_with_cache, reference

CASES = [
    Case(2, 4, 2, 33, 40, 24, 20),
    Case(1, 2, 1, 1, 130, 16, 16, causal=False, softmax_scale=-0.7),
    Case(1, 2, 2, 20, 30, 16, 16, q_offset=-12, softmax_scale=1e-30),
    Case(2, 4, 1, 33, 40, 24, 20, window=(3, 1), causal=False, key_ranges="random", dropout_p=0.3),
    Case(2, 4, 2, 33, 40, 24, 20, softcap=1.5, alibi="bh", sinks=True),
    Case(1, 4, 2, 33, 40, 24, 20, mask="random bhqk", sinks=True, wide=True),
    Case(2, 2, 1, 33, 40, 24, 20, bias="bands hqk strided", alibi="h", key_ranges="empty"),
    Case(1, 2, 1, 33, 40, 24, 20, bias="float bk", softcap=2.0, alibi="h", sinks=True, window=(4, -1), dropout_p=0.2),
]
each_case = pytest.mark.parametrize("case", CASES, ids=str)


def bound(q: Tensor, k: Tensor, largest: Tensor, options: dict[str, Any]) -> Tensor:
    """The rounding of a product of D terms, of the terms added to it, and of lse, in the dtype of row statistics."""
    products = q.double().abs() @ k.double().abs().repeat_interleave(q.shape[1] // k.shape[1], 1).mT
    scale = options.get("softmax_scale")
    terms = products.amax() * abs(reference.default_scale(q.shape[3]) if scale is None else scale)
    for name in ("bias", "alibi_slopes"):
        t = options.get(name, torch.zeros(1)).double()
        terms = terms + t[t.isfinite()].abs().amax() * (1 if name == "bias" else q.shape[2] + k.shape[2])
    eps = torch.finfo(largest.dtype).eps
    return (q.shape[3] + 8) * eps * (terms + math.log(k.shape[2]))


@each_case
@each_dtype
def test_equals_formula(backend: Backend, case: Case, dtype: torch.dtype) -> None:
    (q, k, v), options = case.inputs(dtype), case.given(dtype)
    out, lse, found = backend.attention(q, k, v, return_lse=True, return_max_score=True, **options)
    doubles = (t.double() for t in (q, k, v))
    exact = reference.attention(*doubles, return_max_score=True, **in_double(options))[1]
    assert (found.dtype, found.shape) == (lse.dtype, exact.shape)
    assert torch.equal(found == -math.inf, exact == -math.inf)
    difference = (found.double() - exact).masked_fill(exact == -math.inf, 0.0)
    assert (difference.abs() <= bound(q, k, found, options)).all()

    without_lse = backend.attention(q, k, v, return_max_score=True, **options)
    assert_equal(without_lse, (out, found))
    if not case.sinks:
        assert_equal((out, lse), backend.attention(q, k, v, return_lse=True, **options))


def test_formula() -> None:
    """The reference by hand: the largest of four visible scores of one head; the other head sees no key."""
    q, k = torch.tensor([[1.0], [2.0]]).expand(1, 2, 2, 1), torch.tensor([[3.0], [-4.0]]).expand(1, 1, 2, 1)
    mask = torch.tensor([True, False])[None, :, None, None]
    bias = torch.tensor([[0.5, 0.0], [0.0, 20.0]])
    options = {"causal": False, "mask": mask, "bias": bias, "softmax_scale": 1.0}
    found = reference.attention(q, k, k, sinks=torch.full((2,), 50.0), return_max_score=True, **options)[1]
    assert found.tolist() == [[12.0, -math.inf]]


@each_case
def test_gradients_are_those_of_the_plain_call(case: Case) -> None:
    (q, k, v), (dout, dlse), options = (
        case.inputs(torch.float64),
        case.gradients(torch.float64),
        case.given(torch.float64),
    )

    def attend(*qkv: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        out, lse, most = attention(*qkv, return_max_score=True, **options)
        assert not most.requires_grad
        return out, lse

    assert_close(run(attend, (q, k, v), dout, dlse, **options), run(attention, (q, k, v), dout, dlse, **options))


@pytest.mark.parametrize("sink", [-math.inf, 0.0, 1e4])
def test_sinks_are_apart(sink: float) -> None:
    """A sink above every score hides the largest one in the row statistics of the operators."""
    q, k, v = CASES[0].inputs(torch.float64)
    expected = reference.attention(q, k, v, return_max_score=True)[1]
    sinks = torch.full((4,), sink, dtype=torch.float64)
    out, lse, found = attention(q, k, v, sinks=sinks, return_lse=True, return_max_score=True)
    assert_close(found, expected)
    assert_close((out, lse), attention(q, k, v, sinks=sinks, return_lse=True))
    mask = torch.zeros(1, dtype=torch.bool)
    out, lse, found = attention(q, k, v, sinks=sinks, mask=mask, return_lse=True, return_max_score=True)
    assert (out == 0).all()
    assert (lse == sink).all()
    assert (found == -math.inf).all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_visible_nan_arrives_and_masked_nan_does_not(native: Backend, value: float) -> None:
    q, k, v = Case(1, 2, 1, 40, 40, 16, 16).inputs(torch.float32)
    q[:, 1, 3] = value
    clean = native.attention(q, k, v, return_max_score=True, key_ranges=torch.tensor([0, 0]).expand(1, 40, 2))[1]
    assert (clean == -math.inf).all()
    found = native.attention(q, k, v, return_max_score=True)[1]
    assert found.isnan().tolist() == [[False, True]]
    k[:, :, 30] = math.nan
    hidden = torch.ones(40, dtype=torch.bool).index_fill(0, torch.tensor([30]), False)
    assert_equal(native.attention(q, k, v, return_max_score=True, mask=hidden)[1][:, :1], found[:, :1])


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4)])
def test_nothing_to_score(shape: tuple[int, ...]) -> None:
    q = torch.randn(shape)
    for keys in (q, torch.randn(shape)[:, :, :0]):
        out, found = attention(q, keys, keys, return_max_score=True)
        assert (out.shape, found.shape) == (shape, shape[:2])
        if not (q.numel() and keys.numel()):
            assert (found == -math.inf).all()
    assert reference.attention(q, q, q, return_max_score=True)[1].shape == shape[:2]


def test_derivatives_and_transforms() -> None:
    case = Case(1, 2, 1, 4, 5, 3, 3, sinks=True)
    (q, k, v), options = case.inputs(torch.float64), case.given(torch.float64)
    call = partial(attention, return_lse=True, return_max_score=True)
    leaves = [t.requires_grad_() for t in (q, k, v, options["sinks"])]

    def differentiable(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        return call(*inputs[:3], sinks=inputs[3])[:2]  # type: ignore[return-value]

    assert gradcheck(differentiable, leaves, fast_mode=True)
    assert gradgradcheck(differentiable, leaves, fast_mode=True)
    q, k, v, sinks = (t.detach() for t in leaves)
    grad = torch.func.grad(lambda q: sum(x.sin().sum() for x in call(q, k, v, sinks=sinks)))(q)  # type: ignore[arg-type,return-value]
    leaf = q.clone().requires_grad_()
    out, lse = attention(leaf, k, v, sinks=sinks, return_lse=True)
    assert_close(grad, torch.autograd.grad(out.sin().sum() + lse.sin().sum(), leaf)[0])
    with forward_ad.dual_level():
        dual = call(forward_ad.make_dual(q, torch.ones_like(q)), k, v)
        assert [forward_ad.unpack_dual(x).tangent is None for x in dual] == [False, False, True]
    many = torch.stack([q, 2 * q, q.sin()])
    for i, found in enumerate(zip(*torch.vmap(partial(call, sinks=sinks), (0, None, None))(many, k, v), strict=True)):
        assert_close(found, call(many[i], k, v, sinks=sinks))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compile() -> None:
    case = CASES[-1]
    (q, k, v), options = case.inputs(torch.float64), case.given(torch.float64)
    call = partial(attention, return_lse=True, return_max_score=True, **options)
    q.requires_grad_()
    ours, found = call(q, k, v), graph_of(call)(q, k, v)
    assert_close(found, ours)
    assert_close(*(torch.autograd.grad(results[0].sin().sum(), q) for results in (found, ours)))


def test_autocast_meta_and_no_grad() -> None:
    q, k, v = CASES[0].inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out, found = attention(q, k, v, sinks=torch.zeros(4), return_max_score=True)
    half = attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), sinks=torch.zeros(4), return_max_score=True)
    assert_equal((out, found), half)
    assert found.dtype == torch.float32
    with torch.no_grad():
        again = attention(q.requires_grad_(), k, v, return_max_score=True)
    assert_equal(again, attention(q, k, v, return_max_score=True))
    on_meta = attention(q.detach().to("meta"), k.to("meta"), v.to("meta"), return_max_score=True)
    assert [t.shape for t in on_meta] == [t.shape for t in again]


def test_operator_still_checks_sinks() -> None:
    q, k, v = CASES[0].inputs(torch.float32)
    with refused(ValueError, "sinks must have shape (4), got [3]"):
        attention(q, k, v, sinks=torch.zeros(3), return_max_score=True)


PACKED = Packed([5, 0, 17, 1], [5, 3, 30, 0], (4, 2), rest=3)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False, "window": (2, 4), "softcap": 1.0, "alibi_slopes": torch.rand(4)},
        {"sinks": torch.full((4,), 9.0), "dropout_p": 0.3, "dropout_seed": 7, "seqused_k": torch.tensor([2, 3, 30, 0])},
    ],
    ids=["plain", "scores", "sinks"],
)
@each_dtype
def test_packed(backend: Backend, options: dict[str, Any], dtype: torch.dtype) -> None:
    qkv = PACKED.inputs(dtype)
    options = {name: x.to(qkv[0].device) if isinstance(x, Tensor) else x for name, x in options.items()}
    call = {"return_lse": True, "return_max_score": True} | options
    slopes = {name: options[name].to(dtype) for name in ("alibi_slopes", "sinks") if name in options}
    out, lse, found = backend.attention_varlen(*qkv, *PACKED.packing, **call | slopes)
    exact = reference.attention_varlen(*(t.double() for t in qkv), *PACKED.packing, **call | in_double(slopes))
    assert (found.dtype, found.shape) == (lse.dtype, (4, 4))
    q, k = (t.transpose(0, 1)[None] for t in qkv[:2])
    assert torch.equal(found == -math.inf, exact[2] == -math.inf)
    assert found.isneginf().all(1).tolist() == [False, True, False, True]
    difference = (found.double() - exact[2]).masked_fill(exact[2] == -math.inf, 0.0)
    assert (difference.abs() <= bound(q, k, found, slopes)).all()
    assert_equal(backend.attention_varlen(*qkv, *PACKED.packing, **call | slopes | {"return_lse": False}), (out, found))
    alone = backend.attention_varlen(*qkv, *PACKED.packing, **call | slopes | {"return_max_score": False})
    assert torch.equal(lse == -math.inf, alone[1] == -math.inf)  # tokens of no sequence, with sinks too


def test_packed_nan_stays_in_its_sequence() -> None:
    q, k, v = PACKED.inputs(torch.float32)
    q[7], q[23:] = math.nan, math.nan  # a query of sequence 2, and tokens of none
    found = attention_varlen(q, k, v, *PACKED.packing, return_max_score=True)[1]
    assert found.isnan().all(1).tolist() == found.isnan().any(1).tolist() == [False, False, True, False]


def test_packed_without_tokens() -> None:
    q, cu_seqlens = torch.randn(0, 4, 8), torch.zeros(3, dtype=torch.int32)
    found = attention_varlen(q, q, q, cu_seqlens, cu_seqlens, 0, 0, return_max_score=True)[1]
    assert found.tolist() == [[-math.inf] * 4] * 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_packed_compiled_and_mapped() -> None:
    q, k, v = PACKED.inputs(torch.float64)
    call = partial(attention_varlen, return_max_score=True)
    expected = call(q, k, v, *PACKED.packing)
    assert_close(graph_of(call)(q, k, v, *PACKED.packing), expected)
    many = torch.stack([q, 2 * q])
    found = torch.vmap(lambda q: call(q, k, v, *PACKED.packing))(many)
    for i in range(2):
        assert_close(tuple(x[i] for x in found), call(many[i], k, v, *PACKED.packing))


def test_pages() -> None:
    """Keys in pages, with and without the copy that gradients need."""
    q, k, v = torch.randn(6, 4, 8), *torch.randn(2, 3, 16, 2, 8)
    table, cu_q, cu_k = torch.tensor([[2, 0], [1, 1]]), starts([2, 4]), starts([20, 9])
    call = partial(attention_varlen, return_max_score=True, block_table=table, sinks=torch.full((4,), 30.0))
    expected = reference.attention_varlen(q, k, v, cu_q, cu_k, 4, 20, return_max_score=True, block_table=table)[1]
    assert_close(call(q, k, v, cu_q, cu_k, 4, 20)[1], expected, 1e-5)
    assert_close(call(q.requires_grad_(), k, v, cu_q, cu_k, 4, 20)[1], expected, 1e-5)


@pytest.mark.parametrize("kind", [{}, {"window": (6, 0)}, {"page_size": 16}], ids=["slots", "ring", "pages"])
@pytest.mark.parametrize("sinks", [None, torch.full((4,), 30.0, dtype=torch.float64)], ids=["", "sinks"])
def test_cache(kind: dict[str, Any], sinks: Tensor | None) -> None:
    q, k, v = Case(2, 4, 2, 12, 12, 8, 8).inputs(torch.float64)
    cache = KVCache(2, 2, 16, 8, dtype=torch.float64, **kind)
    cache.append(k, v)
    options = {"sinks": sinks, "return_lse": True, "return_max_score": True}
    found = attention_with_cache(q[:, :, -3:], cache, **options)
    window = kind.get("window", (-1, -1))
    assert_close(found, reference.attention(q[:, :, -3:], k, v, window=window, **options))
    assert_equal(attention_with_cache(q[:, :, -3:], cache, **options | {"return_lse": False}), (found[0], found[2]))
