"""Queries that see no key: weights that are NaN, or 0 instead of NaN, and gradients that are NaN."""

import math
from collections.abc import Callable

import pytest
import torch
from support.adapters.compiled_graphs import replacing
from support.adapters.gradients import of_weighted_sum
from support.assertions import assert_as_exact
from torch import Tensor
from torch.nn import functional

from pyattn.adapters import scratch

B, H, T, D = 2, 3, 6, 4
INF = math.inf
FUTURE = torch.ones(T, T).triu(1).bool()
BLIND = torch.ones(T, T).triu(0).bool()
"""Row 0 sees no key."""

DIAGONAL = torch.eye(T).bool()
ROW = torch.arange(T)[:, None] < 1
BIAS = torch.randn(H, T, T, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()

Code = Callable[[Tensor, Tensor, Tensor], Tensor]


def added(hidden: Tensor, value: float = -INF) -> Tensor:
    return torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, value)


def clean(scores: Tensor) -> Tensor:
    return scores.softmax(-1).nan_to_num(0.0)


def less(scores: Tensor) -> Tensor:
    return scores - scores.amax(-1, keepdim=True)


def times(x: Tensor, *row: float) -> Tensor:
    return x * torch.tensor(row, dtype=x.dtype)[:, None]


def in_place(q, k, v):
    weights = (q @ k.mT).masked_fill(BLIND, -INF).softmax(-1)
    weights.nan_to_num_()
    return weights @ v


TAKEN: dict[str, Code] = {
    "nan_to_num": lambda q, k, v: clean((q @ k.mT / 2).masked_fill(BLIND, -INF)) @ v,
    "by default": lambda q, k, v: torch.nan_to_num((q @ k.mT).masked_fill(BLIND, -INF).softmax(-1)) @ v,
    "by name": lambda q, k, v: (
        torch.nan_to_num(input=(q @ k.mT).masked_fill(BLIND, -INF).softmax(-1), nan=0, posinf=1.0, neginf=2.0) @ v
    ),
    "two masks": lambda q, k, v: clean((q @ k.mT).masked_fill(FUTURE, -INF).masked_fill(DIAGONAL, -INF)) @ v,
    "a bias before the mask": lambda q, k, v: clean((q @ k.mT + BIAS).masked_fill(BLIND, -INF)) @ v,
    "softcap": lambda q, k, v: clean((torch.tanh(q @ k.mT / 5) * 5).masked_fill(BLIND, -INF)) @ v,
    "no mask": lambda q, k, v: clean(q @ k.mT) @ v,
    "a sum, every query sees a key": lambda q, k, v: clean(q @ k.mT + added(FUTURE)) @ v,
    "-1e9": lambda q, k, v: clean((q @ k.mT).masked_fill(FUTURE, -1e9)) @ v,
    "the maximum taken off": lambda q, k, v: clean(less((q @ k.mT).masked_fill(FUTURE, -INF))) @ v,
    "after dropout in evaluation": lambda q, k, v: (
        functional.dropout((q @ k.mT).masked_fill(BLIND, -INF).softmax(-1), 0.5, training=False).nan_to_num() @ v
    ),
    "weights filled with 0": lambda q, k, v: (q @ k.mT).masked_fill(BLIND, -INF).softmax(-1).masked_fill(BLIND, 0) @ v,
    "weights filled with 0 after a finite sum": lambda q, k, v: (
        (q @ k.mT + added(BLIND, -1e300)).softmax(-1).masked_fill(BLIND, 0) @ v
    ),
    "weights filled with 0 and cleaned": lambda q, k, v: (
        clean((q @ k.mT).masked_fill(BLIND, -INF)).masked_fill(BLIND, 0) @ v
    ),
}

INFERENCE: dict[str, Code] = {
    "in place": in_place,
    "a sum": lambda q, k, v: clean(q @ k.mT + added(BLIND)) @ v,
    "a bias after the mask": lambda q, k, v: clean((q @ k.mT).masked_fill(BLIND, -INF) + BIAS) @ v,
    "a mask after the maximum": lambda q, k, v: (
        clean(less((q @ k.mT).masked_fill(FUTURE, -INF)).masked_fill(DIAGONAL, -INF)) @ v
    ),
    "a sum, weights filled with 0": lambda q, k, v: (q @ k.mT + added(BLIND)).softmax(-1).masked_fill(BLIND, 0) @ v,
    "sums to -inf, weights filled with 0": lambda q, k, v: (
        (q @ k.mT + added(BLIND, -1e308) + added(BLIND, -1e308)).softmax(-1).masked_fill(BLIND, 0) @ v
    ),
}
"""Gradients of the plain code are NaN, or errors: taken in inference, left in training."""

LEFT: dict[str, Code] = {
    "NaN rows of a fill": lambda q, k, v: (q @ k.mT).masked_fill(BLIND, -INF).softmax(-1) @ v,
    "NaN rows of a sum": lambda q, k, v: (q @ k.mT + added(BLIND)).softmax(-1) @ v,
    "another number": lambda q, k, v: (q @ k.mT).masked_fill(BLIND, -INF).softmax(-1).nan_to_num(7.0) @ v,
    "scores": lambda q, k, v: (q @ k.mT).nan_to_num().softmax(-1) @ v,
    "NaN in queries": lambda q, k, v: clean((times(q, 1, 1, math.nan, 1, 1, 1) @ k.mT).masked_fill(BLIND, -INF)) @ v,
    "NaN in hidden keys": lambda q, k, v: (
        clean((q @ times(k, 1, 1, 1, 1, 1, math.nan).mT).masked_fill(BLIND, -INF)) @ v
    ),
    "infinite queries": lambda q, k, v: clean((times(q, 1, INF, 1, 1, 1, 1) @ k.mT).masked_fill(BLIND, -INF)) @ v,
    "NaN under a softcap": lambda q, k, v: (
        clean((torch.tanh(times(q, 1, 1, math.nan, 1, 1, 1) @ k.mT / 5) * 5).masked_fill(FUTURE, -INF)) @ v
    ),
    "NaN in a bias": lambda q, k, v: clean(q @ k.mT + times(BIAS.detach(), 1, 1, 1, 1, math.nan, 1)) @ v,
    "an infinite bias": lambda q, k, v: clean(q @ k.mT + added(DIAGONAL, INF)) @ v,
    "products that overflow": lambda q, k, v: clean((q * 1e160) @ (k * 1e160).mT) @ v,
    "multiples that overflow on the way": lambda q, k, v: clean((q @ k.mT) * 1e308 * 1e308 / 1e308 / 1e308) @ v,
    "sums that overflow on the way": lambda q, k, v: (
        clean(q @ k.mT + added(DIAGONAL, -1e308) + added(DIAGONAL, -1e308) + added(DIAGONAL, 1e308)) @ v
    ),
    "averages beside NaN": lambda q, k, v: (
        clean((q @ k.mT).masked_fill(DIAGONAL, -INF).masked_fill(ROW, -1e9).masked_fill(ROW.flip(0), -INF)) @ v
    ),
    "-inf times 0": lambda q, k, v: (
        ((q @ k.mT).masked_fill(FUTURE, -INF) * (~FUTURE).double() + added(FUTURE)).softmax(-1) @ v
    ),
}


def results(code: Code, grad: bool = True) -> list[Tensor]:
    """The result and, with ``grad``, the gradients of a weighted sum of it."""
    numbers = torch.randn(3, B, H, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    inputs = [x.clone().requires_grad_(grad) for x in numbers]
    if grad:
        return of_weighted_sum(code, inputs, BIAS)
    with torch.no_grad():
        return [code(*inputs)]


@pytest.mark.parametrize("name", TAKEN)
def test_taken(name):
    plain = results(TAKEN[name])
    with scratch.enabled():
        ours = results(TAKEN[name])
    torch.testing.assert_close(ours, plain, rtol=1e-11, atol=1e-12)
    assert not any(x.isnan().any() for x in ours)
    assert scratch.counts() == (1, {})


@pytest.mark.parametrize("name", INFERENCE)
def test_inference(name):
    plain = results(INFERENCE[name], grad=False)
    with scratch.enabled():
        ours = results(INFERENCE[name], grad=False)
    torch.testing.assert_close(ours, plain, rtol=1e-11, atol=1e-12)
    assert scratch.counts() == (1, {})


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", [*LEFT, *(name for name in INFERENCE if name != "in place")])
def test_left(name, grad):
    if name in INFERENCE and not grad:
        return
    code = (LEFT | INFERENCE)[name]
    plain = results(code, grad)
    with scratch.enabled():
        ours = results(code, grad)
    torch.testing.assert_close(ours, plain, rtol=0, atol=0, equal_nan=True)
    assert scratch.counts().taken == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    """The largest product of float16, 65504, is more than all bounds."""
    q, k, v = (x.to(dtype) for x in torch.randn(3, B, H, T, D, generator=torch.Generator().manual_seed(1)))
    code = lambda *x: clean((x[0] @ x[1].mT / 2).masked_fill(BLIND, -INF)) @ x[2]  # noqa: E731
    exact = code(q.double(), k.double(), v.double())
    with scratch.enabled():
        out = code(q, k, v)
    assert out.dtype == dtype
    assert_as_exact(out, code(q, k, v), exact)
    assert torch.equal(out[:, :, 0], torch.zeros(B, H, D, dtype=dtype))
    assert scratch.counts() == (1, {})


def test_float16_that_may_overflow_is_left():
    q, k, v = (200 * torch.randn(3, B, H, T, D, generator=torch.Generator().manual_seed(1))).half().unbind()
    code = lambda: clean(q @ k.mT) @ v  # noqa: E731
    with scratch.enabled():
        out = code()
    assert torch.equal(out, code())
    assert (out == 0).all(-1).any()  # rows of products beyond 65504
    assert scratch.counts().taken == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["fill", "sum", "sum everywhere", "bound", "overflow"])
def test_sixteen_bits_average_as_plain_code(dtype, name):
    """Where the numbers of 16 bits hide all digits of scores, the kernels' float32 may not."""
    low = torch.finfo(dtype).min if dtype == torch.float16 else -1e4
    mask = added(BLIND, low).to(dtype)
    codes = {
        "fill": lambda s: s.masked_fill(BLIND, low),
        "sum": lambda s: s + mask,
        "sum everywhere": lambda s: s + torch.full((T, T), low, dtype=dtype),
        "bound": lambda s: torch.max(s.masked_fill(BLIND, torch.finfo(dtype).min), torch.tensor(low, dtype=dtype)),
        "overflow": lambda s: s.masked_fill(FUTURE, torch.finfo(dtype).min) * 3 * (~FUTURE).to(dtype) + mask,
    }
    q, k, v = torch.randn(3, B, H, T, D, generator=torch.Generator().manual_seed(1)).to(dtype).unbind()
    code = lambda: codes[name](q / 4 @ k.mT).softmax(-1) @ v  # noqa: E731
    with torch.no_grad(), scratch.enabled():
        ours = code()
    torch.testing.assert_close(ours, code(), rtol=0.02, atol=0.02, equal_nan=True)


def test_dropout_after_it():
    q, k, v = torch.randn(3, B, H, T, T, dtype=torch.float64, requires_grad=True).unbind()
    with scratch.enabled():
        weights = functional.dropout(clean((q @ k.mT).masked_fill(BLIND, -INF)), 0.4)
        out = weights @ v
        read = weights * 1
    torch.testing.assert_close(out, read @ v, rtol=1e-12, atol=1e-12)
    ours, plain = (torch.autograd.grad(x.square().sum(), (q, k, v), retain_graph=True) for x in (out, read @ v))
    torch.testing.assert_close(ours, plain, rtol=1e-11, atol=1e-12)
    assert scratch.counts() == (1, {})


def test_second_derivatives_are_those_of_the_other_rows():
    inputs = [x.requires_grad_() for x in torch.randn(3, 1, 2, 4, 3, dtype=torch.float64).unbind()]
    hidden = torch.ones(4, 4).triu(0).bool()

    def second(rows):
        q, k, v = inputs
        out = clean((q[:, :, rows] @ k.mT).masked_fill(hidden[rows], -INF)) @ v
        first = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), inputs)

    assert second(slice(0, 4))[2].isnan().all()
    with scratch.enabled():
        ours = second(slice(0, 4))
    torch.testing.assert_close(ours, second(slice(1, 4)), rtol=1e-11, atol=1e-12)


SOME = torch.stack([BLIND, FUTURE, FUTURE])
"""Row 0 of the first head sees no key."""

COMPILED: dict[str, Code] = {
    "a fill": lambda q, k, v: (q @ k.mT).masked_fill(BLIND, -INF).softmax(-1) @ v,
    "a fill of some heads": lambda q, k, v: (q @ k.mT).masked_fill(SOME, -INF).softmax(-1) @ v,
    "one head of keys": lambda q, k, v: (q @ k[:, :1].mT).masked_fill(SOME, -INF).softmax(-1) @ v[:, :1],
    "every query sees a key": lambda q, k, v: (q @ k.mT + BIAS).masked_fill(FUTURE, -INF).softmax(-1) @ v,
    "a bias after the fill": lambda q, k, v: ((q @ k.mT).masked_fill(SOME, -INF) + BIAS).softmax(-1) @ v,
    "a bias before the fill": lambda q, k, v: (q @ k.mT + BIAS).masked_fill(SOME, -INF).softmax(-1) @ v,
    "a sum": lambda q, k, v: (q @ k.mT + added(SOME)).softmax(-1) @ v,
    "a sum and a fill": lambda q, k, v: (
        (q @ k.mT + added(DIAGONAL) + BIAS[..., :1]).masked_fill(FUTURE, -INF).softmax(-1) @ v
    ),
    "folded heads": lambda q, k, v: torch.bmm(
        (torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).view(B, H, T, T) + added(SOME)).flatten(0, 1).softmax(-1),
        v.flatten(0, 1),
    ).view(B, H, T, D),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_gradients_are_nan_where_plain_ones_are(name):
    counts = []
    compiler = replacing(counts=counts)
    torch.compiler.reset()
    ours, plain = results(torch.compile(COMPILED[name], backend=compiler, fullgraph=True)), results(COMPILED[name])
    torch.testing.assert_close(ours, plain, rtol=1e-11, atol=1e-12, equal_nan=True)
    assert plain[3].isnan().any() == (name != "every query sees a key")
    assert counts == [1]
