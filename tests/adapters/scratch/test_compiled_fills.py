"""Finite fills in graphs of torch.compile: which keys they hide is found out when the compiled code runs."""

import math

import pytest
import torch
from support.adapters.compiled_graphs import check_rounding, replacing
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pyattn.adapters import scratch
from pyattn.adapters.scratch import graphs, native

B, H, T, D = 2, 3, 6, 4
INF = math.inf
FUTURE = torch.ones(T, T).triu(1).bool()
BLIND = torch.ones(T, T).triu(0).bool()
"""Row 0 sees no key."""

FAR = FUTURE | torch.ones(T, T).tril(-3).bool()
PADDED = torch.tensor([[0] * T, [1] * T]).bool()[:, None, None]
"""The second sequence sees no key."""

EDGE = torch.ones(T, T).bool() ^ torch.eye(T).bool()
LEAST = torch.finfo(torch.float32).min


pytestmark = pytest.mark.usefixtures("fresh")


@pytest.fixture
def seconds(monkeypatch):
    """Whether each attention of filled keys had any, where graphs run eagerly."""
    had, merged = [], native.merged

    def noting(filled, *args):
        if not isinstance(filled.keys, FakeTensor):
            had.append(bool(filled.keys.any()))
        return merged(filled, *args)

    monkeypatch.setattr(native, "merged", noting)
    return had


def inputs(size=1.0, dtype=torch.float64):
    """Queries and keys of this ``size``, and values."""
    drawn = torch.randn(3, B, H, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return [(x * c).to(dtype).requires_grad_() for x, c in zip(drawn, (size, size, 1), strict=True)]


def results(code, size=1.0):
    tensors = inputs(size)
    out = code(*tensors)
    return [out.detach(), *torch.autograd.grad(out.sin().sum(), tensors)]


def same(code, counts, size=1.0, compiler="aot_eager"):
    ours = results(torch.compile(code, backend=replacing(compiler, counts), fullgraph=True), size)
    torch.testing.assert_close(ours, results(code, size), rtol=1e-9, atol=1e-11, equal_nan=True)


def assigned(q, k, v, c):
    scores = q @ k.mT
    scores[:, :, BLIND] = c
    return scores.softmax(-1) @ v


CODES = {
    "masked_fill": lambda q, k, v, c: (q @ k.mT / 2).masked_fill(FUTURE, c).softmax(-1) @ v,
    "a window": lambda q, k, v, c: (q @ k.mT).masked_fill(FAR, c).softmax(-1) @ v,
    "a row without keys": lambda q, k, v, c: (q @ k.mT).masked_fill(BLIND, c).softmax(-1) @ v,
    "a sequence without keys": lambda q, k, v, c: (
        (q @ k.mT).masked_fill(FUTURE, c).masked_fill(PADDED, c).softmax(-1) @ v
    ),
    "beside -inf": lambda q, k, v, c: (q @ k.mT).masked_fill(FUTURE, -INF).masked_fill(PADDED, c).softmax(-1) @ v,
    "before -inf": lambda q, k, v, c: (q @ k.mT).masked_fill(PADDED, c).masked_fill(BLIND, -INF).softmax(-1) @ v,
    "one key": lambda q, k, v, c: (q @ k.mT).masked_fill(EDGE, c).softmax(-1) @ v,
    "where": lambda q, k, v, c: torch.where(~FUTURE, q @ k.mT, c).softmax(-1) @ v,
    "scaled afterwards": lambda q, k, v, c: ((q @ k.mT).masked_fill(FUTURE, c) / 8).softmax(-1) @ v,
    "softcap": lambda q, k, v, c: (torch.tanh(q @ k.mT / 50) * 50).masked_fill(FUTURE, c).softmax(-1) @ v,
    "in place": lambda q, k, v, c: (q @ k.mT).masked_fill_(BLIND, c).softmax(-1) @ v,
    "a temperature": lambda q, k, v, c: (q @ k.mT * v[0, 0, 0, 0].exp()).masked_fill(BLIND, c).softmax(-1) @ v,
    "folded heads": lambda q, k, v, c: torch.bmm(
        (torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).view(B, H, T, T).masked_fill(PADDED | FUTURE, c))
        .view(-1, T, T)
        .softmax(-1),
        v.flatten(0, 1),
    ),
    "one head of keys": lambda q, k, v, c: (q @ k[:, :1].mT).masked_fill(PADDED | FUTURE, c).softmax(-1) @ v[:, :1],
    "a triangle of zeros": lambda q, k, v, c: (q @ k.mT).tril().softmax(-1) @ v,
    "an index": assigned,
}


@pytest.mark.parametrize("value", [-200.0, -1e4, -1e9, LEAST])
@pytest.mark.parametrize("name", CODES)
def test_fills(found, name, value):
    """With large queries and keys -200 and -1e4 hide no key; the same code finds out."""
    code = lambda q, k, v: CODES[name](q, k, v, value)  # noqa: E731
    for size in (1.0, 10.0, 60.0):
        same(code, found, size)
    assert set(found) == {1}


@pytest.mark.parametrize("name", ["masked_fill", "beside -inf"])
def test_inductor(found, name):
    same(lambda q, k, v: CODES[name](q, k, v, -1e4), found, 10.0, "inductor")
    assert found == [1]


def test_one_graph_decides_anew(found, seconds):
    code = lambda q, k, v: CODES["masked_fill"](q, k, v, -1e4)  # noqa: E731

    def eager(graph, inputs):
        found.append(graphs.replaced(graph))
        return found[-1].forward

    compiled = torch.compile(code, backend=eager, fullgraph=True)
    for size in (1.0, 60.0, 1.0):
        torch.testing.assert_close(results(compiled, size), results(code, size), rtol=1e-9, atol=1e-11)
    assert len(found) == 1
    assert seconds[-3:] == [False, True, False]


def test_rows_without_keys_are_all_that_is_computed_twice(seconds):
    eager = lambda graph, inputs: graphs.replaced(graph).forward  # noqa: E731
    for mask, had in ((FUTURE, False), (BLIND, True)):
        torch.compiler.reset()
        torch.compile(lambda q, k, v, m=mask: (q @ k.mT).masked_fill(m, -1e9).softmax(-1) @ v, backend=eager)(*inputs())
        assert seconds[-1] == had


def test_not_finite_numbers(found):
    """NaN in a query whose bound is then unknown: the other rows are as they were."""
    code = lambda q, k, v: (q @ k.mT).masked_fill(FUTURE, -1e4).softmax(-1) @ v  # noqa: E731
    q, k, v = (x.detach() for x in inputs())
    q[0, 0, 2, 1] = math.nan
    compiled = torch.compile(code, backend=replacing(counts=found), fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), code(q, k, v), equal_nan=True)
    k[1, 0, 5] = INF  # hidden but for the last row
    torch.testing.assert_close(compiled(q, k, v), code(q, k, v), equal_nan=True)
    assert found == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [-1e4, -200.0])
def test_dtypes(found, dtype, value):
    code = lambda q, k, v: (q @ k.mT / 2).masked_fill(BLIND, value).softmax(-1) @ v  # noqa: E731
    for size in (1.0, 8.0):
        check_rounding(code, inputs(size, dtype), found)
    assert set(found) == {1}


def test_a_number_that_the_dtype_can_not_hold_is_left(found):
    """As plain code, where it becomes -inf in a cast."""
    code = lambda q, k, v: (q @ k.mT).masked_fill(BLIND, -1e9).half().float().softmax(-1).double() @ v  # noqa: E731
    same(code, found)
    assert found == [0]


@pytest.mark.parametrize("size", [1.0, 60.0])
@pytest.mark.parametrize("wrapped", [False, True])
def test_dropout_is_one_for_all_keys(found, wrapped, size):
    """The result is linear in the values, so their gradient times them is its sum, if both have the same dropout."""
    q, k, v = inputs(size)

    def code(q, k, v):
        weights = functional.dropout((q @ k.mT).masked_fill(BLIND, -1e4).softmax(-1), 0.5)
        return weights @ v

    run = (lambda *x: checkpoint(code, *x, use_reentrant=False)) if wrapped else code
    compiled = torch.compile(run, backend=replacing(counts=found), fullgraph=True)
    out = compiled(q, k, v)
    (gradient,) = torch.autograd.grad(out.sum(), v)
    torch.testing.assert_close((gradient * v).sum(), out.sum())
    assert found == [1]


def test_dropout_keeps_its_mean():
    q, k, v = (x.detach() for x in inputs())
    code = lambda q, k, v: functional.dropout((q @ k.mT).masked_fill(BLIND, -10.0).softmax(-1), 0.5) @ v  # noqa: E731
    compiled = torch.compile(code, backend=replacing(), fullgraph=True)
    mean = torch.stack([compiled(q, k, v) for _ in range(2000)]).mean(0)
    plain = (q @ k.mT).masked_fill(BLIND, -10.0).softmax(-1) @ v
    torch.testing.assert_close(mean, plain, rtol=0, atol=0.2)


def test_sizes_that_are_symbols(found):
    def code(q, k, v):
        hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
        return (q @ k.mT).masked_fill(hidden, -1e9).softmax(-1) @ v

    compiled = torch.compile(code, backend=replacing(counts=found), fullgraph=True, dynamic=True)
    for batch, seqlen in ((3, 5), (2, 7), (5, 6), (6, 7)):
        q, k, v = (torch.randn(batch, H, seqlen, D, dtype=torch.float64, requires_grad=True) for _ in range(3))
        out, plain = compiled(q, k, v), code(q, k, v)
        torch.testing.assert_close(out, plain)
        ours, theirs = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, plain))
        torch.testing.assert_close(ours, theirs)
    assert len(found) < 4
    assert set(found) == {1}


LEFT = {
    "a lower bound": (
        lambda q, k, v: torch.max(q @ k.mT, torch.tensor(-1e9).double()).softmax(-1) @ v,
        "scores of at least -1000000000.0",
    ),
    "weights filled elsewhere": (
        lambda q, k, v: (q @ k.mT).masked_fill(BLIND, -1e9).softmax(-1).masked_fill(FUTURE, 0) @ v,
        "a fill of weights",
    ),
    "weights filled more often": (
        lambda q, k, v: (
            (q @ k.mT).masked_fill(FUTURE, -1e9).softmax(-1).masked_fill(FUTURE, 0).masked_fill(PADDED, 0) @ v
        ),
        "a fill of weights",
    ),
    "masked exponentials": (
        lambda q, k, v: (lambda e: e / e.sum(-1, keepdim=True))((q @ k.mT).exp().masked_fill(FUTURE, 0)) @ v,
        "exponentials that may overflow",
    ),
    "a fill and a sum that are scaled": (
        lambda q, k, v: ((q @ k.mT + q[..., :1]).masked_fill(FUTURE, -1e9) / 3).softmax(-1) @ v,
        "a fill beside a sum that is scaled",
    ),
    "a cast after a sum": (
        lambda q, k, v: (q @ k.mT + q[..., :1]).float().softmax(-1).double() @ v,
        "a sum that a cast may make infinite",
    ),
    "an index of sequences": (
        lambda q, k, v: (q @ k.mT).index_put((PADDED.flatten(1)[:, 0],), torch.tensor(-INF).double()).softmax(-1) @ v,
        "masks made within another function, or views of sizes that are symbols",
    ),
    "nan_to_num without the maximum": (
        lambda q, k, v: (lambda s: s - s.amax(-1, keepdim=True))(q @ k.mT).softmax(-1).nan_to_num() @ v,
        "nan_to_num of weights without their maximum",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_left(found, name):
    code, reason = LEFT[name]
    same(code, found)
    assert found == [0]
    assert scratch.counts() == (0, {f"{reason}, in compiled code": 1})
