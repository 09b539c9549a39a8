"""Fills of graphs of torch.compile beside sums, other fills, sinks, and weights that are replaced by 0."""

import math

import pytest
import torch
from support.adapters.compiled_graphs import check_rounding, replacing
from torch.nn import functional

from pyattn.adapters import scratch
from pyattn.adapters.scratch import native

B, H, T, D = 2, 3, 6, 4
INF = math.inf
FUTURE = torch.ones(T, T).triu(1).bool()
BLIND = torch.ones(T, T).triu(0).bool()
"""Row 0 sees no key."""

PADDED = torch.tensor([[1, 1, 0, 0, 0, 0], [1] * T]).bool()[:, None, None]
"""The first sequence's rows 0 and 1 see no key that is not padding, nor do all of the second."""

LEAST = torch.finfo(torch.float32).min


pytestmark = pytest.mark.usefixtures("fresh")


def inputs(size=1.0, dtype=torch.float64):
    """Queries and keys of this ``size``, values, and a bias of all heads."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(3, B, H, T, D, dtype=torch.float64, generator=generator)
    tensors = [x * c for x, c in zip(drawn, (size, size, 1), strict=True)]
    tensors.append(torch.randn(1, H, T, T, dtype=torch.float64, generator=generator))
    return [x.to(dtype).requires_grad_() for x in tensors]


def results(code, tensors):
    """The result, which may be NaN, and gradients by a finite one."""
    out = code(*tensors)
    found = torch.autograd.grad(out, tensors, out.detach().nan_to_num().cos(), allow_unused=True)
    return [out.detach(), *(torch.zeros(()) if x is None else x for x in found)]


def same(code, counts, size=1.0, dtype=torch.float64, tolerance=1e-9, compiler="aot_eager"):
    tensors = inputs(size, dtype)
    ours = results(torch.compile(code, backend=replacing(compiler, counts), fullgraph=True), tensors)
    torch.testing.assert_close(ours, results(code, tensors), rtol=tolerance, atol=tolerance, equal_nan=True)


def added(mask, value, like):
    return torch.zeros(mask.shape, dtype=like.dtype).masked_fill(mask, value)


CODES = {
    "padding, then a fill": lambda q, k, v, b, c: (q @ k.mT + added(PADDED, c, q)).masked_fill(FUTURE, c),
    "a fill, then padding": lambda q, k, v, b, c: (q @ k.mT).masked_fill(FUTURE, c) + added(PADDED, c, q),
    "a bias": lambda q, k, v, b, c: (q @ k.mT + b).masked_fill(BLIND, c),
    "a bias afterwards": lambda q, k, v, b, c: (q @ k.mT).masked_fill(BLIND, c) + b,
    "a bias between": lambda q, k, v, b, c: ((q @ k.mT).masked_fill(FUTURE, c) + b).masked_fill(PADDED, c),
    "two numbers": lambda q, k, v, b, c: (q @ k.mT).masked_fill(FUTURE, c).masked_fill(PADDED, c * 0.75),
    "two numbers and a bias": lambda q, k, v, b, c: (q @ k.mT).masked_fill(PADDED, c).masked_fill(FUTURE, c * 0.75) + b,
    "-inf by a sum": lambda q, k, v, b, c: (q @ k.mT + added(BLIND, -INF, q)).masked_fill(PADDED, c),
    "-inf by a sum, first filled": lambda q, k, v, b, c: (q @ k.mT).masked_fill(FUTURE, c) + added(PADDED, -INF, q),
    "-inf by a fill": lambda q, k, v, b, c: (q @ k.mT + b).masked_fill(PADDED, c).masked_fill(BLIND, -INF),
    "scaled": lambda q, k, v, b, c: (q @ k.mT + b).masked_fill(FUTURE, c) / 4,
    "softcap": lambda q, k, v, b, c: (torch.tanh(q @ k.mT / 5) * 5 + b).masked_fill(PADDED, c),
    "where": lambda q, k, v, b, c: torch.where(~FUTURE, q @ k.mT, torch.full([], c, dtype=q.dtype)) + b,
    "full_like": lambda q, k, v, b, c: (lambda s: torch.where(FUTURE, torch.full_like(s, c), s))(q @ k.mT) + b,
    "new_full": lambda q, k, v, b, c: (lambda s: s.where(~FUTURE, s.new_full((), c)))(q @ k.mT),
    "folded heads": lambda q, k, v, b, c: (
        torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).view(B, H, T, T) + added(PADDED, c, q)
    ).masked_fill(FUTURE, c),
}


@pytest.mark.parametrize("value", [-200.0, -1e4, -1e9, LEAST])
@pytest.mark.parametrize("name", CODES)
def test_sums(found, name, value):
    """Rows without visible keys average over keys of a sum and of a fill; of large scores, -200 hides none."""
    code = lambda q, k, v, b: CODES[name](q, k, v, b, value).softmax(-1) @ v  # noqa: E731
    for size in (1.0, 10.0, 60.0):
        same(code, found, size, tolerance=1e-6 if value == -1e9 else 1e-9)
    assert set(found) == {1}


@pytest.mark.parametrize("value", [-1e9, LEAST])
@pytest.mark.parametrize("name", CODES)
def test_float32(found, name, value):
    """Beside -1e9, plain code rounds scores of up to 32 away, and so must attention."""
    same(lambda q, k, v, b: CODES[name](q, k, v, b, value).softmax(-1) @ v, found, dtype=torch.float32, tolerance=1e-5)
    assert found == [1]


def test_a_full_tensor_that_changed_is_no_number(found):
    def code(q, k, v, b):
        numbers = torch.full((B, H, T, T), -1e9, dtype=q.dtype)
        numbers[..., 0] = 1
        return torch.where(BLIND, numbers, q @ k.mT).softmax(-1) @ v

    same(code, found)
    assert found == [0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [-1e4, -200.0])
def test_16_bits(found, dtype, value):
    code = lambda q, k, v, b: (q @ k.mT / 2 + b).masked_fill(FUTURE, value).softmax(-1) @ v  # noqa: E731
    for size in (1.0, 4.0):
        check_rounding(code, inputs(size, dtype), found)
    assert set(found) == {1}


def test_numbers_are_those_of_16_bits(found):
    """-1e9 in bfloat16, in a sum and in a fill: rows without keys average over both."""

    def code(q, k, v, b):
        scores = (q * 0 @ k.mT + added(PADDED, -1e9, q)).masked_fill(FUTURE, -1e9)
        return scores.softmax(-1) @ v

    same(code, found, dtype=torch.bfloat16, tolerance=1e-2)
    assert found == [1]


@pytest.mark.parametrize("name", ["padding, then a fill", "a bias", "two numbers"])
def test_inductor(found, name):
    same(lambda q, k, v, b: CODES[name](q, k, v, b, -1e9).softmax(-1) @ v, found, tolerance=1e-6, compiler="inductor")
    assert found == [1]


def test_sizes_that_are_symbols(found):
    def code(q, k, v, b):
        hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
        return (q @ k.mT + b).masked_fill(hidden, -1e9).softmax(-1).nan_to_num() @ v

    compiled = torch.compile(code, backend=replacing(counts=found), fullgraph=True, dynamic=True)
    for batch, seqlen in ((3, 5), (2, 7), (5, 6), (6, 7)):
        tensors = [torch.randn(batch, H, seqlen, D, dtype=torch.float64, requires_grad=True) for _ in range(3)]
        tensors.append(torch.randn(H, 1, seqlen, dtype=torch.float64, requires_grad=True))
        torch.testing.assert_close(results(compiled, tensors), results(code, tensors))
    assert len(found) < 4
    assert set(found) == {1}


def test_few_queries_stay_plain(found, monkeypatch):
    monkeypatch.setattr(native, "MIN_QUERIES", T + 1)
    same(lambda q, k, v, b: (q @ k.mT + b).masked_fill(FUTURE, -1e9).softmax(-1) @ v, found)
    same(lambda q, k, v, b: (q @ k.mT).masked_fill(FUTURE, -1e9).softmax(-1) @ v, found)
    assert found == [0, 1]


def test_dropout_keeps_its_mean():
    def code(q, k, v, b, p=0.5):
        weights = functional.dropout((q @ k.mT + b).masked_fill(BLIND, -10.0).softmax(-1), p)
        return weights @ v

    tensors = [x.detach() for x in inputs()]
    compiled = torch.compile(code, backend=replacing(), fullgraph=True)
    mean = torch.stack([compiled(*tensors) for _ in range(2000)]).mean(0)
    torch.testing.assert_close(mean, code(*tensors, p=0.0), rtol=0, atol=0.2)


@pytest.mark.parametrize("value", [-200.0, -1e9])
@pytest.mark.parametrize("size", [1.0, 60.0])
def test_sinks(found, value, size):
    def code(q, k, v, b):
        scores = (q @ k.mT + b).masked_fill(BLIND, value)
        return torch.cat([scores, b[..., :1].expand(B, H, T, 1)], -1).softmax(-1)[..., :-1] @ v

    same(code, found, size)
    assert found == [1]


WEIGHTS = {
    "nan_to_num": lambda q, k, v, b: (q @ k.mT).masked_fill(BLIND, -INF).softmax(-1).nan_to_num(),
    "nan_to_num of sums": lambda q, k, v, b: (q @ k.mT + b + added(BLIND, -INF, q)).softmax(-1).nan_to_num(0.0),
    "nan_to_num beside a number": lambda q, k, v, b: (
        (q @ k.mT).masked_fill(BLIND, -INF).masked_fill(PADDED, -1e9).softmax(-1).nan_to_num()
    ),
    "filled with 0": lambda q, k, v, b: (q @ k.mT).masked_fill(BLIND, -INF).softmax(-1).masked_fill(BLIND, 0),
    "numbers filled with 0": lambda q, k, v, b: (q @ k.mT).masked_fill(BLIND, -1e4).softmax(-1).masked_fill(BLIND, 0),
    "a bias filled with 0": lambda q, k, v, b: (
        (q @ k.mT + b).masked_fill(BLIND, -1e4).softmax(-1).masked_fill(BLIND, 0)
    ),
    "-inf by a sum filled with 0": lambda q, k, v, b: (
        (q @ k.mT + added(PADDED, -INF, q)).masked_fill(BLIND, -INF).softmax(-1).masked_fill(BLIND, 0)
    ),
    "two fills": lambda q, k, v, b: (
        (q @ k.mT + b)
        .masked_fill(FUTURE, -1e9)
        .masked_fill(PADDED, LEAST)
        .softmax(-1)
        .masked_fill(PADDED, 0)
        .masked_fill(FUTURE, 0)
    ),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_that_become_0(found, name):
    code = lambda q, k, v, b: WEIGHTS[name](q, k, v, b) @ v  # noqa: E731
    for size in (1.0, 60.0):
        same(code, found, size)
    assert set(found) == {1}


NOT_FINITE = {
    "a fill": lambda q, k, v, b: (q @ k.mT).masked_fill(FUTURE, -INF),
    "a sum": lambda q, k, v, b: q @ k.mT + added(FUTURE, -INF, q),
    "a row without keys": lambda q, k, v, b: (q @ k.mT + added(BLIND, -INF, q)).masked_fill(FUTURE, -INF),
}


@pytest.mark.parametrize("name", NOT_FINITE)
def test_weights_of_not_finite_scores(found, name):
    """They become 0 if they are NaN, as they are beside NaN and a sum of -inf."""
    code = lambda q, k, v, b: NOT_FINITE[name](q, k, v, b).softmax(-1).nan_to_num() @ v  # noqa: E731
    q, k, v, b = (x.detach() for x in inputs())
    q[0, 0, 2, 1] = math.nan
    k[1, 0, 4] = INF  # NaN or hidden, by the sign of the queries
    k[1, 1, 3] = math.nan
    out = torch.compile(code, backend=replacing(counts=found), fullgraph=True)(q, k, v, b)
    torch.testing.assert_close(out, code(q, k, v, b))
    assert found == [1]


def test_float16_stays_plain(found):
    """An overflow of its products would be a weight of NaN, then of 0."""
    code = lambda q, k, v, b: (q @ k.mT).masked_fill(FUTURE, -INF).softmax(-1).nan_to_num() @ v  # noqa: E731
    same(code, found, 200.0, torch.float16)
    assert found == [0]
    assert scratch.counts().left == {
        "nan_to_num of weights that an overflow may have made NaN, in compiled code": 1,
    }


def test_rows_without_keys_may_have_nan_queries(found):
    """Filled scores are numbers whatever the query is."""
    code = lambda q, k, v, b: (q @ k.mT + b).masked_fill(BLIND, -1e9).softmax(-1) @ v  # noqa: E731
    tensors = [x.detach() for x in inputs()]
    tensors[0][:, :, 0] = math.nan
    tensors[3][:, :, 1, 1:] = math.nan
    out = torch.compile(code, backend=replacing(counts=found), fullgraph=True)(*tensors)
    torch.testing.assert_close(out, code(*tensors))
    assert found == [1]
