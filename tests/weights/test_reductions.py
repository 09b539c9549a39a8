"""Promise: attention_weights reduces weights over queries, heads or keys by its formulas, in linear memory."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support.assertions import assert_close, graph_of, refused
from support.cases import Case, allocated, each_dtype
from support.weights import CASES, CHOSEN, each_case, inputs, lse_of
from support.yardstick import in_double, learned
from torch import Tensor
from torch.autograd import gradcheck

from pyattn import attention_weights, reference


def reduced(weights: Tensor, sinks: Tensor | None, lse: Tensor, kind: str) -> Tensor:
    """The formulas, from weights before and after dropout."""
    if kind != "entropy":
        return weights.sum(2 if kind == "queries" else 1)
    if sinks is not None:
        share = torch.exp(sinks.double()[:, None] - lse).masked_fill(sinks[:, None] == -math.inf, 0.0)
        weights = torch.cat([weights, share.unsqueeze(-1)], -1)
    return torch.special.entr(weights).sum(-1)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows a block: 2 sequences of 4 heads with 12 keys each."""
    monkeypatch.setattr("pyattn.weights.rows.PAIRS_AT_ONCE", 200)


each_reduction = pytest.mark.parametrize("kind", ["queries", "heads", "entropy"])
each_linear = pytest.mark.parametrize("kind", ["queries", "entropy"])
"""Reductions whose results are linear in the lengths."""


@each_case
@each_dtype
@each_reduction
@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.usefixtures("small_blocks")
def test_reductions(case: Case, dtype: torch.dtype, kind: Any, with_lse: bool) -> None:
    q, k, options = inputs(case, dtype)
    lse = lse_of(q, k, options) if with_lse else None
    found = attention_weights(q, k, lse=lse, reduce=kind, **options)
    kept = {"dropout_p": 0.0} if kind == "entropy" else {}
    doubles = q.double(), k.double(), k.double()
    _, sums, weights = reference.attention(*doubles, return_lse=True, return_weights=True, **in_double(options) | kept)
    exact = reduced(weights, options.get("sinks"), sums, kind)
    compute = torch.promote_types(dtype, torch.float32)
    assert (found.dtype, found.shape) == (compute, exact.shape)
    assert ((found.double() - exact).abs() <= 256 * torch.finfo(compute).eps * (1 + exact.abs())).all()

    chosen = attention_weights(q, k, lse=lse, reduce=kind, **CHOSEN, **options)
    weights, sums = (t[:, CHOSEN["heads"]][:, :, CHOSEN["rows"]] for t in (weights, sums))
    sinks = options["sinks"][CHOSEN["heads"]] if case.sinks else None
    exact = reduced(weights, sinks, sums, kind)
    assert ((chosen.double() - exact).abs() <= 256 * torch.finfo(compute).eps * (1 + exact.abs())).all()


@each_case
@each_reduction
@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.usefixtures("small_blocks")
def test_gradients_of_reductions(case: Case, kind: Any, with_lse: bool) -> None:
    q, k, options = inputs(replace(case, head_dim=2), torch.float64)
    names = learned(options)
    leaves = [t.double().detach().requires_grad_() for t in (q, k, *(options[name] for name in names))]

    def call(q: Tensor, k: Tensor, *tensors: Tensor) -> Tensor:
        known = options | dict(zip(names, tensors, strict=True))
        lse = reference.attention(q, k, k, return_lse=True, **known)[1] if with_lse else None
        return attention_weights(q, k, lse=lse, reduce=kind, **known)

    assert gradcheck(call, leaves, fast_mode=True)
    if case in CASES[4:6]:
        assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


@each_linear
@pytest.mark.parametrize("sink", [None, -math.inf, 0.0])
def test_reductions_of_certain_and_uniform_rows(kind: Any, sink: float | None) -> None:
    """A row that sees no key, one that sees one, four keys that score alike, and weights that underflow."""
    q = torch.tensor([0.0, 0.0, 0.0, 1.0]).view(1, 1, 4, 1).requires_grad_()
    k = torch.tensor([2000.0, -2000.0, 0.0, 0.0]).view(1, 1, 4, 1)
    ranges = torch.tensor([[[1, 1], [2, 3], [0, 4], [0, 4]]])
    sinks = None if sink is None else torch.tensor([sink], requires_grad=True)
    found = attention_weights(q, k, causal=False, key_ranges=ranges, sinks=sinks, softmax_scale=1.0, reduce=kind)
    if sink == 0.0:
        expected = [1.2, 0.2, 0.7, 0.2] if kind == "queries" else [0.0, math.log(2), math.log(5), 0.0]
    else:
        expected = [1.25, 0.25, 1.25, 0.25] if kind == "queries" else [0.0, 0.0, math.log(4), 0.0]
    torch.testing.assert_close(found, torch.tensor([[expected]]))
    leaves = [q] if sinks is None else [q, sinks]
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(found.sum(), leaves))


@each_linear
def test_reductions_of_nan(kind: Any) -> None:
    q, k, _ = Case(1, 2, 1, 6, 6, 4, 4).inputs(torch.float64)
    k[:, :, 4] = math.nan
    found = attention_weights(q, k, reduce=kind)
    assert found[0, 0].isnan().tolist() == ([True] * 6 if kind == "queries" else [False] * 4 + [True] * 2)
    rows = attention_weights(q, k, rows=[0, 1, 2, 3], reduce=kind)
    assert not rows.isnan().any()


@each_linear
@pytest.mark.parametrize("grad", [False, True])
def test_memory_of_reductions_is_linear(kind: Any, grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All weights take 4 MB in each of about ten temporaries; a block of 16 rows takes 64 kB."""
    monkeypatch.setattr("pyattn.weights.rows.PAIRS_AT_ONCE", 2**14)
    q, k = torch.randn(2, 1, 1, 1024, 8)
    q.requires_grad_(grad)

    def call() -> None:
        found = attention_weights(q, k, sinks=torch.zeros(1), reduce=kind)
        if grad:
            found.sin().sum().backward()

    assert 2**16 <= allocated(call) <= 2**21


@each_reduction
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.usefixtures("small_blocks")
def test_reductions_compiled_and_transformed(kind: Any) -> None:
    q, k, options = inputs(CASES[5], torch.float64)
    call = partial(attention_weights, reduce=kind, **options)
    leaf = q.clone().requires_grad_()
    expected = torch.autograd.grad(call(leaf, k).sin().sum(), leaf)[0]
    compiled = graph_of(call)(leaf, k)
    assert_close(compiled, call(q, k))
    assert_close(torch.autograd.grad(compiled.sin().sum(), leaf)[0], expected)
    assert_close(torch.func.grad(lambda q: call(q, k).sin().sum())(q), expected)
    assert_close(torch.vmap(call, (0, None))(torch.stack([q, q.sin()]), k)[1], call(q.sin(), k))
    traced = torch.jit.trace(lambda q: call(q, k), q)
    assert_close(traced(q.sin()), call(q.sin(), k))


@each_linear
def test_reductions_of_nothing(kind: Any) -> None:
    q = torch.randn(2, 4, 3, 8)
    empty = (2, 4, 3) if kind == "queries" else (2, 4, 0)
    assert attention_weights(q, q, rows=[], reduce=kind).shape == empty
    assert attention_weights(q, q[:, :, :0], reduce=kind).shape == ((2, 4, 0) if kind == "queries" else (2, 4, 3))
    assert attention_weights(q.bfloat16(), q.bfloat16(), reduce=kind).dtype == torch.float32


def test_unknown_reduction() -> None:
    q = torch.randn(1, 1, 2, 2)
    with refused(ValueError, 'reduce must be "queries", "heads", "entropy" or None, got \'rows\''):
        attention_weights(q, q, reduce="rows")
    with refused(ValueError, 'reduce must be "queries", "heads", "entropy" or None, got [1]'):
        attention_weights(q, q, reduce=[1])


def test_a_change_in_place_before_backward_raises() -> None:
    """A backward reads q and k again."""
    for changed in range(2):
        q, k = (t.requires_grad_() for t in torch.randn(2, 1, 2, 4, 8))
        found = attention_weights(q, k, reduce="entropy")
        with torch.no_grad():
            (q, k)[changed].add_(1)
        with pytest.raises(RuntimeError, match=r"^pyattn: .* modified by an inplace operation: .*, got version 1"):
            found.sum().backward()
