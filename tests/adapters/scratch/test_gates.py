"""Weights times masks and gates of heads or queries, or divided by them: results, and all gradients."""

import math

import pytest
import torch
from support.adapters.compiled_graphs import replacing
from support.adapters.gradients import of_weighted_sum
from support.adapters.spellings import ALL_FUTURE, BIAS, FUTURE, INF, B, Code, D, H, T, folded
from support.assertions import assert_as_exact
from torch import Tensor, nn
from torch.nn import functional

from pyattn.adapters import scratch

HEADS = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64).view(1, H, 1, 1)
QUERIES = torch.tensor([[1.0] * T, [1.0] * (T - 2) + [0.0] * 2], dtype=torch.float64)[:, None, :, None]


def softmax(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT / 2).masked_fill(FUTURE, -INF).softmax(-1)


def in_place(q, k, v):
    weights = softmax(q, k) * 2
    weights *= HEADS
    return weights @ v


GATED: dict[str, Code] = {
    "a mask of heads": lambda q, k, v: (softmax(q, k) * HEADS) @ v,
    "a mask of heads, bool": lambda q, k, v: (HEADS.bool() * softmax(q, k)) @ v,
    "a mask of heads after dropout": lambda q, k, v: (functional.dropout(softmax(q, k), 0.0) * HEADS) @ v,
    "dropout in evaluation after a mask of heads": lambda q, k, v: nn.Dropout(0.3).eval()(softmax(q, k) * HEADS) @ v,
    "a gate of each head": lambda q, k, v: (softmax(q, k) * BIAS[:, :1, :1].sigmoid()) @ v,
    "a gate of each query": lambda q, k, v: (softmax(q, k) * BIAS[..., :1].sigmoid()) @ v,
    "a gate from the queries": lambda q, k, v: (softmax(q, k) * q.mean(-1, keepdim=True)) @ v,
    "a mask of queries": lambda q, k, v: (softmax(q, k) * QUERIES) @ v,
    "a mask of queries, repeated for all keys": lambda q, k, v: (softmax(q, k) * QUERIES.repeat(1, 1, 1, T)) @ v,
    "a learned number": lambda q, k, v: (softmax(q, k) * BIAS[0, 0, 0].exp()) @ v,
    "a number": lambda q, k, v: (softmax(q, k) * 0.25) @ v,
    "0": lambda q, k, v: (softmax(q, k) * 0) @ v,
    "the opposite": lambda q, k, v: -softmax(q, k) @ v,
    "divided by a learned number": lambda q, k, v: (softmax(q, k) / BIAS[0, 0, 0].exp()) @ v,
    "divided by a number": lambda q, k, v: (softmax(q, k) / 3) @ v,
    "divided by numbers of queries": lambda q, k, v: (softmax(q, k) / BIAS[..., :1].exp()) @ v,
    "gates, numbers and quotients": lambda q, k, v: (softmax(q, k) * HEADS / 3 * BIAS[..., :1] / -2) @ v,
    "a cast between": lambda q, k, v: (softmax(q, k).to(torch.float64).mul(BIAS[0, 0, 0].exp()) * HEADS) @ v,
    "exponentials over their sums": lambda q, k, v: (
        ((lambda e: e / e.sum(-1, keepdim=True))((q @ k.mT).exp()) * BIAS[..., :1]) @ v
    ),
    "a gate beside a gate after a gate": lambda q, k, v: (
        lambda w: w * BIAS[:, :1, :1].sin() @ v + w * BIAS[..., :1].cos() @ v
    )(softmax(q, k) * HEADS),
    "heads folded": lambda q, k, v: torch.bmm(
        torch.bmm(folded(q), folded(k).mT).softmax(-1) * BIAS[:, :, :1].repeat(B, 1, 1), folded(v)
    ).view(B, H, T, D),
    "heads folded, then unfolded": lambda q, k, v: (
        (torch.bmm(folded(q), folded(k).mT).softmax(-1) * BIAS[:, :, :1].repeat(B, 1, 1)).view(B, H, T, T) * HEADS @ v
    ),
    "heads repeated": lambda q, k, v: (
        (q @ k[:, :1].repeat_interleave(3, 1).mT).softmax(-1) * BIAS[:, :1, :1] @ v[:, :1].repeat_interleave(3, 1)
    ),
    "beside sinks": lambda q, k, v: (
        (torch.cat([q @ k.mT, BIAS[:, :, :1].expand(B, H, T, 1)], -1).softmax(-1) * HEADS)[..., :-1] * QUERIES @ v
    ),
    "transposed weights": lambda q, k, v: v.mT @ ((q @ k.mT).softmax(-1).mT * BIAS[:, :1]),
    "rows of NaN that became 0": lambda q, k, v: (
        ((q @ k.mT).masked_fill(ALL_FUTURE, -INF).softmax(-1).nan_to_num() * BIAS[..., :1]) @ v
    ),
}
GATED["in place"] = in_place

LEFT: dict[str, Code] = {
    "infinity": lambda q, k, v: (softmax(q, k) * INF) @ v,
    "NaN": lambda q, k, v: (softmax(q, k) * math.nan) @ v,
    "divided by 0": lambda q, k, v: (softmax(q, k) / 0) @ v,
    "numbers of a large product": lambda q, k, v: (softmax(q, k) * 1e200 * 1e200 / 1e200) @ v,
    "numbers of a small product": lambda q, k, v: (softmax(q, k) / 1e200 / 1e150 * 1e200) @ v,
    "divided by a mask of heads": lambda q, k, v: (softmax(q, k) / HEADS) @ v,
    "divided by a mask of heads, repeated for all keys": lambda q, k, v: (softmax(q, k) / HEADS.expand(1, H, T, T)) @ v,
    "divided by tiny numbers": lambda q, k, v: (softmax(q, k) / (HEADS + 1e-310)) @ v,
    "infinite heads": lambda q, k, v: (softmax(q, k) * (1 / HEADS)) @ v,
    "infinite heads, transposed": lambda q, k, v: v.mT @ (softmax(q, k).mT * (1 / HEADS)),
}
"""Hidden keys, whose weights are 0, or all of them become NaN or infinite."""

NEEDS_VALUES = {
    "a mask of queries, repeated for all keys",
    "exponentials over their sums",
    "a gate beside a gate after a gate",  # weights of two uses
}
"""Left in compiled code."""


def results(code: Code) -> list[Tensor]:
    inputs = torch.randn(3, B, H, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return of_weighted_sum(code, [x.requires_grad_() for x in inputs.clone().unbind()], BIAS)


@pytest.mark.parametrize("name", GATED)
def test_taken(name):
    plain = results(GATED[name])
    with scratch.enabled():
        ours = results(GATED[name])
    torch.testing.assert_close(ours, plain, rtol=1e-11, atol=1e-12)
    assert scratch.counts().left == {}
    assert scratch.counts().taken >= 1


@pytest.mark.parametrize("name", GATED)
@pytest.mark.usefixtures("fresh")
def test_compiled(name, found):
    plain = results(GATED[name])
    ours = results(torch.compile(GATED[name], backend=replacing(counts=found), fullgraph=True))
    torch.testing.assert_close(ours, plain, rtol=1e-11, atol=1e-12)
    assert found == [0 if name in NEEDS_VALUES else 1]


@pytest.mark.parametrize("name", LEFT)
def test_left(name):
    plain = results(LEFT[name])
    with scratch.enabled():
        ours = results(LEFT[name])
    torch.testing.assert_close(ours, plain, rtol=0, atol=0, equal_nan=True)
    assert scratch.counts().taken == 0


@pytest.mark.parametrize("first", [1e5, 1e-8])
def test_numbers_that_float16_does_not_hold(first):
    q, k, v = torch.randn(3, B, H, T, D, generator=torch.Generator().manual_seed(3)).half().unbind()
    plain = (softmax(q, k) * first / first) @ v
    with scratch.enabled():
        ours = (softmax(q, k) * first / first) @ v
    torch.testing.assert_close(ours, plain, rtol=0, atol=0, equal_nan=True)
    assert scratch.counts() == (0, {f"weights times {first}": 1})


def test_rows_without_keys_are_nan_in_compiled_code(found):
    """The gate's gradient too: it is NaN times a number."""

    def code(q, k, v):
        return ((q @ k.mT).masked_fill(ALL_FUTURE, -INF).softmax(-1) * BIAS[..., :1]) @ v

    ours = results(torch.compile(code, backend=replacing(counts=found), fullgraph=True))
    torch.testing.assert_close(ours, results(code), rtol=1e-11, atol=1e-12, equal_nan=True)
    assert found == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding(dtype):
    q, k, v = torch.randn(3, B, H, T, D).to(dtype).unbind()
    gate = torch.rand(H, 1, 1, generator=torch.Generator().manual_seed(2)).to(dtype)
    exact = (softmax(q.double(), k.double()) * gate.double()) @ v.double()
    with scratch.enabled():
        out = (softmax(q, k) * gate) @ v
    assert_as_exact(out, (softmax(q, k) * gate) @ v, exact)
    assert scratch.counts() == (1, {})


def test_results_are_rounded_after_gates():
    """Averages of such values have few digits in float16."""
    q, k, v = torch.randn(3, B, H, T, D, generator=torch.Generator().manual_seed(3)).half().unbind()
    v = v * 1e-6

    def code(q, k, v):
        return (softmax(q, k) * 512.0 * BIAS[:, :1, :1].to(q.dtype).exp()) @ v

    with scratch.enabled():
        out = code(q, k, v)
    assert_as_exact(out, code(q, k, v), code(q.double(), k.double(), v.double()))
    assert scratch.counts() == (1, {})
