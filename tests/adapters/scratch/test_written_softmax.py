"""Softmax written out: exponentials, less the row maximum or not, over their sums; logarithms of weights, then exp."""

import math

import pytest
import torch
from support.adapters.compiled_graphs import replacing
from support.adapters.softmaxes import (
    BIAS,
    BLIND,
    INF,
    SOFTMAXES,
    UNSTABLE,
    B,
    Code,
    D,
    H,
    T,
    by_logarithms,
    codes,
    left,
    over_sums,
    results,
    stable,
    stable_by_a_detached_maximum,
    stable_in_place,
    taken,
    unstable_once,
)
from torch.nn import functional

from pyattn.adapters import scratch


@pytest.mark.parametrize("name", codes(stable))
@pytest.mark.parametrize("softmax", SOFTMAXES)
def test_taken(softmax, name):
    taken(codes(softmax)[name])


@pytest.mark.parametrize("softmax", [stable, by_logarithms])
def test_large_scores(softmax):
    taken(codes(softmax)["a mask of -inf"], 100.0)


@pytest.mark.parametrize("softmax", UNSTABLE)
@pytest.mark.parametrize(
    ("name", "code"),
    {
        "overflow": lambda q, k: 1000 * (q @ k.mT),
        "underflow": lambda q, k: q @ k.mT - 2000 * torch.ones(T, 1, dtype=torch.float64),
        "a bias that is large": lambda q, k: q @ k.mT + 1000 * BIAS,
        "a row without keys": lambda q, k: (q @ k.mT).masked_fill(BLIND, -INF),
        "a row of -1e9": lambda q, k: (q @ k.mT).masked_fill(BLIND, -1e9),
        "a row of -1e9 by a sum": lambda q, k: q @ k.mT - 1e9 * BLIND.double(),
        "not a number": lambda q, k: q @ (k * torch.tensor([1.0, 1.0, 1.0, math.nan])).mT,
    }.items(),
)
def test_exponentials_that_may_overflow_are_left(softmax, name, code):
    left(lambda q, k, v: softmax(code(q, k)) @ v)


def test_exponentials_in_narrow_dtypes():
    """float16 overflows at exp(11.1): scores of 9 among 6 keys do not, those of 12 do."""
    for largest, outcome in ((2.5, 1), (3.5, 0)):
        scratch.reset_counts()
        q = torch.full((B, H, T, 1), largest).half()
        plain = unstable_once(q @ q.mT) @ q
        with scratch.enabled():
            torch.testing.assert_close(unstable_once(q @ q.mT) @ q, plain, equal_nan=True)
        assert scratch.counts().taken == outcome


def other_scores(q, k, v):
    x = q @ k.mT
    sums = x.exp().sum(-1, keepdim=True)
    x.mul_(2)
    return x.exp() / sums @ v


CHANGES = {
    "other exponentials": lambda e, sums: e.mul_(2),
    "changed through a view": lambda e, sums: e.view(-1).__setitem__(0, 1.0),
    "changed sums": lambda e, sums: sums.add_(1),
}
"""In place, between the sums and the division by them."""


def changed(name: str) -> Code:
    def code(q, k, v):
        e = (q @ k.mT).exp()
        sums = e.sum(-1, keepdim=True)
        CHANGES[name](e, sums)
        return e / sums @ v

    return code


def a_hook(q, k, v):
    e = stable(q @ k.mT)
    e.register_hook(lambda g: 2 * g)
    return e @ v


LEFT: dict[str, Code] = {
    "an epsilon": lambda q, k, v: (lambda e: e / (e.sum(-1, keepdim=True) + 1e-9))((q @ k.mT).exp()) @ v,
    "sums over queries": lambda q, k, v: (lambda e: e / e.sum(-2, keepdim=True))((q @ k.mT).exp()) @ v,
    "sums over all": lambda q, k, v: (lambda e: e / e.sum())((q @ k.mT).exp()) @ v,
    "a mean": lambda q, k, v: (lambda e: e / e.mean(-1, keepdim=True))((q @ k.mT).exp()) @ v,
    "no sum": lambda q, k, v: (q @ k.mT).exp() @ v,
    "divided afterwards": lambda q, k, v: (lambda e: e @ v / e.sum(-1, keepdim=True))((q @ k.mT).exp()),
    "exponentials of weights": lambda q, k, v: (q @ k.mT).softmax(-1).exp() @ v,
    "exponentials twice": lambda q, k, v: (q @ k.mT).exp().exp() @ v,
    "softmax of exponentials": lambda q, k, v: (q @ k.mT).exp().softmax(-1) @ v,
    "exponentials scaled": lambda q, k, v: over_sums((q @ k.mT).exp() * 2) @ v,
    "logarithms": lambda q, k, v: (q @ k.mT).log_softmax(-1) @ v,
    "logarithms scaled": lambda q, k, v: ((q @ k.mT).log_softmax(-1) / 2).exp() @ v,
    "logarithms over queries": lambda q, k, v: (q @ k.mT).log_softmax(-2).exp() @ v,
    "powers of 2": lambda q, k, v: over_sums(torch.exp2(q @ k.mT)) @ v,
    "sums of other exponentials": lambda q, k, v: (
        (lambda x: x.exp() / (x / 2).exp().sum(-1, keepdim=True))(q @ k.mT) @ v
    ),
    "a cast of exponentials": lambda q, k, v: over_sums((q @ k.mT).exp().float()).double() @ v,
}


FUNCTIONS = (other_scores, a_hook)
LEFT |= {function.__name__.replace("_", " "): function for function in FUNCTIONS}
LEFT["changed sums"] = changed("changed sums")


@pytest.mark.parametrize("name", LEFT)
def test_left(name):
    left(LEFT[name])


@pytest.mark.parametrize("name", CHANGES)
def test_changes_in_place_without_gradients(name):
    code = changed(name)
    q, k, v = torch.randn(3, B, H, T, D, dtype=torch.float64).unbind()
    with torch.no_grad():
        plain = code(q, k, v)
        with scratch.enabled():
            assert torch.equal(code(q, k, v), plain)
    assert scratch.counts().taken == 0


@pytest.mark.parametrize("softmax", [stable, stable_by_a_detached_maximum, by_logarithms])
def test_rows_without_keys(softmax):
    """NaN, or an average, as a softmax's."""
    for value in (-INF, -1e9):
        scratch.reset_counts()
        with torch.no_grad():
            q, k, v = torch.randn(3, B, H, T, D, dtype=torch.float64).unbind()
            code = lambda q, k, v, c=value: softmax((q @ k.mT).masked_fill(BLIND, c)) @ v  # noqa: E731
            with scratch.enabled():
                ours = code(q, k, v)
            torch.testing.assert_close(ours, code(q, k, v), equal_nan=True)
        results(lambda q, k, v, c=value: softmax((q @ k.mT).masked_fill(BLIND, c)) @ v)


def test_in_place():
    q, k, v = torch.randn(3, B, H, T, D, dtype=torch.float64).unbind()
    with torch.no_grad(), scratch.enabled():
        out = stable_in_place(q @ k.mT) @ v
    torch.testing.assert_close(out, stable_in_place(q @ k.mT) @ v)
    assert scratch.counts() == (1, {})


def test_dropout():
    q, k, v = torch.randn(3, B, H, T, T, dtype=torch.float64, requires_grad=True).unbind()
    with scratch.enabled():
        weights = functional.dropout(stable(q @ k.mT), 0.5)
        out = weights @ v
        dropped = weights * 1
    torch.testing.assert_close(out, dropped @ v, rtol=1e-12, atol=1e-12)
    assert scratch.counts().taken == 1


def test_second_derivatives():
    inputs = [torch.randn(1, 2, 3, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    with scratch.enabled():
        assert torch.autograd.gradgradcheck(lambda q, k, v: stable(q @ k.mT / 2) @ v, inputs)
    assert scratch.counts().taken > 0


def test_autocast():
    q, k, v = torch.randn(3, B, H, T, D).unbind()
    with torch.autocast("cpu", torch.bfloat16):
        plain = stable(q @ k.mT) @ v
        with scratch.enabled():
            ours = stable(q @ k.mT) @ v
    assert ours.dtype == plain.dtype
    torch.testing.assert_close(ours, plain, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("softmax", SOFTMAXES)
def test_compiled(softmax):
    """No value is known there, so exponentials that might overflow stay plain code."""
    counts = []
    torch.compiler.reset()
    code = codes(softmax)["a mask of -inf"]
    ours = results(torch.compile(code, backend=replacing(counts=counts), fullgraph=True))
    torch.testing.assert_close(ours, results(code), rtol=1e-11, atol=1e-12)
    assert counts == [0 if softmax in UNSTABLE else 1]
