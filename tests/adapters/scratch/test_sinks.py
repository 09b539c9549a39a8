"""Sinks as one more column of scores, and maxima of rows taken off before the softmax."""

import math
from collections.abc import Callable

import pytest
import torch
from support.adapters.compiled_graphs import replacing
from support.assertions import assert_as_exact
from torch import Tensor
from torch.nn import functional

from pyattn.adapters import scratch

B, H, T, D = 2, 4, 6, 4
FUTURE = torch.ones(T, T).triu(1).bool()
BLIND = torch.ones(T, T).triu(0).bool()
LEAST = torch.finfo(torch.float64).min

Code = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def column(sinks: Tensor) -> Tensor:
    return sinks.reshape(1, -1, 1, 1).expand(B, -1, T, -1)


def joined(scores: Tensor, sinks: Tensor) -> Tensor:
    return torch.cat([scores, column(sinks)], dim=-1)


def less(scores: Tensor) -> Tensor:
    return scores - scores.max(dim=-1, keepdim=True).values


def masked(q: Tensor, k: Tensor, value: float, hidden: Tensor = FUTURE) -> Tensor:
    return q @ k.mT / 2 + torch.zeros(T, T, dtype=q.dtype).masked_fill(hidden, value)


def gpt_oss(q, k, v, s):
    """transformers' function; two heads of keys."""
    k, v = (x[:, :2, None].expand(B, 2, 2, T, D).reshape(B, H, T, D) for x in (k, v))
    combined = less(joined(masked(q, k, LEAST), s))
    probabilities = functional.softmax(combined, dim=-1, dtype=combined.dtype)
    weights = functional.dropout(probabilities[..., :-1], p=0.5, training=False).to(v.dtype)
    return torch.matmul(weights, v).transpose(1, 2).contiguous()


def a_maximum_read(q, k, v, s):
    scores = q @ k.mT
    largest = scores.amax(-1, keepdim=True)
    return (scores - largest).softmax(-1) @ v + largest


TAKEN: dict[str, Code] = {
    "gpt-oss": gpt_oss,
    "no maximum": lambda q, k, v, s: joined(masked(q, k, -math.inf), s).softmax(-1)[..., :-1] @ v,
    "one more than a softmax": lambda q, k, v, s: joined(q @ k.mT, s * 0).softmax(3)[:, :, :, :T] @ v + s.sum(),
    "sinks of each query": lambda q, k, v, s: (
        torch.cat((masked(q, k, -1e9), q[..., :1] * 3), -1).softmax(-1).narrow(-1, 0, T) @ v + s.sum()
    ),
    "rows without keys": lambda q, k, v, s: joined(masked(q, k, -math.inf, BLIND), s).softmax(-1)[..., :-1] @ v,
    "rows of least numbers": lambda q, k, v, s: less(joined(masked(q, k, LEAST, BLIND), s)).softmax(-1)[..., :-1] @ v,
    "a bias": lambda q, k, v, s: joined(q @ k.mT + s[:, None, None] * q[..., :1], s).softmax(-1)[..., :-1] @ v,
    "weights used twice": lambda q, k, v, s: (lambda w: w @ v + w.sum(-1, keepdim=True))(
        less(joined(q @ k.mT, s)).softmax(-1)[..., :-1]
    ),
    "a maximum without sinks": lambda q, k, v, s: less(masked(q, k, -1e9)).softmax(-1) @ v + s.sum(),
    "lucidrains": lambda q, k, v, s: (
        (lambda x: x - x.amax(dim=-1, keepdim=True).detach())(q @ k.mT).masked_fill(FUTURE, -math.inf).softmax(-1) @ v
        + s.sum()
    ),
    "a maximum that is read": lambda q, k, v, s: a_maximum_read(q, k, v, s) + s.sum(),
}

LEFT: dict[str, Code] = {
    "sinks first": lambda q, k, v, s: torch.cat([column(s), q @ k.mT], -1).softmax(-1)[..., 1:] @ v,
    "two columns": lambda q, k, v, s: torch.cat([q @ k.mT, column(s), column(s)], -1).softmax(-1)[..., :-2] @ v,
    "values of sinks": lambda q, k, v, s: joined(q @ k.mT, s).softmax(-1) @ torch.cat([v, v[:, :, :1]], 2),
    "another column dropped": lambda q, k, v, s: joined(q @ k.mT, s).softmax(-1)[..., 1:] @ v,
    "scores cut": lambda q, k, v, s: joined(q @ k.mT, s)[..., :-1].softmax(-1) @ v + s.sum(),
    "a mask of sinks": lambda q, k, v, s: (
        joined(q @ k.mT, s).masked_fill(torch.arange(T + 1) == T, -math.inf).softmax(-1)[..., :-1] @ v
    ),
    "a multiple of sinks": lambda q, k, v, s: (joined(q @ k.mT, s) * 2).softmax(-1)[..., :-1] @ v,
    "tanh without a maximum": lambda q, k, v, s: less(q @ k.mT).tanh().softmax(-1) @ v + s.sum(),
    "a fill without a maximum": lambda q, k, v, s: less(q @ k.mT).masked_fill(FUTURE, -2.0).softmax(-1) @ v + s.sum(),
    "another maximum": lambda q, k, v, s: (
        (q @ k.mT - (q @ k.mT * 2).amax(-1, keepdim=True)).tanh().softmax(-1) @ v + s.sum()
    ),
    "infinite sinks": lambda q, k, v, s: joined(q @ k.mT, s.masked_fill(s < 0, -math.inf)).softmax(-1)[..., :-1] @ v,
    "masks that may not hide": lambda q, k, v, s: (
        joined((q @ k.mT).masked_fill(FUTURE, -1e4), s - 1e4).softmax(-1)[..., :-1] @ v
    ),
    "filled weights": lambda q, k, v, s: (
        joined(masked(q, k, -math.inf), s).softmax(-1)[..., :-1].masked_fill(FUTURE, 0) @ v
    ),
}


def results(code: Code, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """The result, and the gradients of a weighted sum of it."""
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(B, H, T, D, dtype=torch.float64, generator=generator) for _ in range(3)]
    inputs.append(torch.randn(H, dtype=torch.float64, generator=generator))
    inputs = [x.to(dtype).requires_grad_() for x in inputs]
    out = code(*inputs)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [out.detach() + 0, *torch.autograd.grad((out * weights).sum(), inputs)]


@pytest.mark.parametrize("name", TAKEN)
def test_taken(name):
    plain = results(TAKEN[name])
    with scratch.enabled():
        ours = results(TAKEN[name])
    torch.testing.assert_close(ours, plain, rtol=1e-11, atol=1e-12)
    assert scratch.counts() == (1, {})


@pytest.mark.parametrize("name", LEFT)
def test_left(name):
    plain = results(LEFT[name])
    with scratch.enabled():
        ours = results(LEFT[name])
    torch.testing.assert_close(ours, plain, rtol=0, atol=0)
    assert scratch.counts().taken == 0


def narrow(q, k, v, s):
    return joined(masked(q, k, -math.inf), s).softmax(-1)[..., :-1] @ v


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes(dtype):
    exact = results(lambda *inputs: narrow(*(x.double() for x in inputs)), dtype)[0]
    with scratch.enabled():
        ours = results(narrow, dtype)[0]
    assert ours.dtype == dtype
    assert_as_exact(ours, results(narrow, dtype)[0], exact)
    assert scratch.counts() == (1, {})


def test_dropout_leaves_sinks_out():
    """Weights that are read later are those of the result."""
    q, k, v = torch.randn(3, B, H, T, T, dtype=torch.float64, requires_grad=True).unbind()
    sinks = torch.randn(H, dtype=torch.float64, requires_grad=True)
    with scratch.enabled():
        weights = functional.dropout(less(joined(q @ k.mT, sinks)).softmax(-1)[..., :-1], 0.4)
        out = weights @ v
        read = weights * 1
    inputs = q, k, v, sinks
    torch.testing.assert_close(out, read @ v, rtol=1e-12, atol=1e-12)
    ours, plain = (torch.autograd.grad(x.square().sum(), inputs, retain_graph=True) for x in (out, read @ v))
    torch.testing.assert_close(ours, plain, rtol=1e-11, atol=1e-12)
    assert 0.2 < (read == 0).double().mean() < 0.6
    assert scratch.counts() == (1, {})


def test_second_derivatives():
    inputs = [x.requires_grad_() for x in torch.randn(3, 1, 2, 3, 2, dtype=torch.float64).unbind()]
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def code(q, k, v, s):
        return torch.cat([q @ k.mT, s.view(1, 2, 1, 1).expand(1, 2, 3, 1)], -1).softmax(-1)[..., :-1] @ v

    with scratch.enabled():
        assert torch.autograd.gradgradcheck(code, (*inputs, sinks))
    assert scratch.counts().taken > 0


def test_sinks_that_change_are_noticed():
    def code():
        q, k, v = torch.randn(3, B, H, T, D, generator=torch.Generator().manual_seed(1)).unbind()
        sinks = torch.ones(B, H, T, 1)
        weights = torch.cat([q @ k.mT, sinks], -1).softmax(-1)[..., :-1]
        sinks.zero_()
        return weights @ v

    plain = code()
    with scratch.enabled():
        assert torch.equal(code(), plain)


def test_scores_that_change_after_their_maximum():
    def code():
        q, k, v = torch.randn(3, B, H, T, D, generator=torch.Generator().manual_seed(1)).unbind()
        scores = q @ k.mT
        largest = scores.amax(-1, keepdim=True)
        scores.mul_(2)
        return (scores - largest).softmax(-1) @ v + largest

    plain = code()
    with scratch.enabled():
        torch.testing.assert_close(code(), plain)


@pytest.mark.parametrize("name", ["no maximum", "sinks of each query", "rows without keys", "with a maximum"])
def test_compiled(name):
    code = (TAKEN | {"with a maximum": lambda q, k, v, s: less(joined(q @ k.mT, s)).softmax(-1)[..., :-1] @ v})[name]
    counts = []
    compiler = replacing(counts=counts)
    torch.compiler.reset()
    ours, plain = results(torch.compile(code, backend=compiler, fullgraph=True)), results(code)
    torch.testing.assert_close(ours, plain, rtol=1e-11, atol=1e-12)
    assert counts == [1]
