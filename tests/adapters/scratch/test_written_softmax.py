"""Softmax written out: exponentials, less the row maximum or not, over their sums; logarithms of weights, then exp."""

import math
from collections.abc import Callable

import pytest
import torch
from support.adapters.compiled_graphs import replacing
from torch import Tensor
from torch.nn import functional

from pyattn.adapters import scratch

B, H, T, D = 2, 3, 6, 4
INF = math.inf
FUTURE = torch.ones(T, T).triu(1).bool()
BLIND = torch.ones(T, T).triu(0).bool()
"""Row 0 sees no key."""

BIAS = torch.randn(H, T, T, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()


def stable(x: Tensor) -> Tensor:
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def stable_in_place(x: Tensor) -> Tensor:
    """Without gradients alone, as torch has it."""
    e = (x - x.max(dim=-1, keepdim=True)[0]).exp_()
    e /= torch.sum(e, dim=3, keepdim=True)
    return e


def stable_by_a_detached_maximum(x: Tensor) -> Tensor:
    e = torch.exp(x - torch.max(x, dim=-1, keepdim=True).values.detach())
    return torch.div(e, e.sum((-1,), True))


def unstable(x: Tensor) -> Tensor:
    return torch.exp(x) / torch.exp(x).sum(dim=-1, keepdim=True)


def unstable_once(x: Tensor) -> Tensor:
    e = x.exp()
    return e / e.sum(-1, keepdim=True)


def by_logarithms(x: Tensor) -> Tensor:
    return functional.log_softmax(x, dim=-1).exp()


SOFTMAXES = [stable, stable_by_a_detached_maximum, unstable, unstable_once, by_logarithms]
UNSTABLE = [unstable, unstable_once]
Code = Callable[[Tensor, Tensor, Tensor], Tensor]


def codes(softmax) -> dict[str, Code]:
    return {
        "plain": lambda q, k, v: softmax(q @ k.mT / 2) @ v,
        "a mask of -inf": lambda q, k, v: softmax((q @ k.mT / 2).masked_fill(FUTURE, -INF)) @ v,
        "a mask of -1e9": lambda q, k, v: softmax((q @ k.mT / 2).masked_fill(FUTURE, -1e9)) @ v,
        "a bias and a mask": lambda q, k, v: softmax((q @ k.mT + BIAS).masked_fill(FUTURE, -INF)) @ v,
        "read twice": lambda q, k, v: (lambda w: w @ v + w.mean() * 3)(softmax(q @ k.mT)),
        "read before": lambda q, k, v: (lambda w: w.pow(2).sum() + w @ v)(softmax(q @ k.mT)),
        "printed": lambda q, k, v: (lambda w: (str(w), w @ v)[1])(softmax(q @ k.mT)),
        "dropout in evaluation": lambda q, k, v: functional.dropout(softmax(q @ k.mT), 0.5, training=False) @ v,
        "folded": lambda q, k, v: torch.bmm(
            softmax(torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).view(B, H, T, T) + BIAS).view(-1, T, T),
            v.flatten(0, 1),
        ),
    }


def results(code: Code, size: float = 1.0) -> list[Tensor]:
    drawn = torch.randn(3, B, H, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    inputs = [(x * size).requires_grad_() for x in drawn]
    out = code(*inputs)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    grads = torch.autograd.grad((out * weights).sum(), [*inputs, BIAS], allow_unused=True)
    return [out.detach() + 0, *(torch.zeros(()) if g is None else g for g in grads)]


def taken(code: Code, size: float = 1.0) -> None:
    plain = results(code, size)
    with scratch.enabled():
        ours = results(code, size)
    torch.testing.assert_close(ours, plain, rtol=1e-11, atol=1e-12, equal_nan=True)
    assert scratch.counts() == (1, {})


def left(code: Code, size: float = 1.0) -> None:
    plain = results(code, size)
    with scratch.enabled():
        ours = results(code, size)
    torch.testing.assert_close(ours, plain, rtol=0, atol=0, equal_nan=True)
    assert scratch.counts().taken == 0
    assert sum(scratch.counts().left.values()) == 1


@pytest.mark.parametrize("name", codes(stable))
@pytest.mark.parametrize("softmax", SOFTMAXES)
def test_taken(softmax, name):
    taken(codes(softmax)[name])


def over_sums(e: Tensor) -> Tensor:
    return e / e.sum(-1, keepdim=True)


def exponentials(x: Tensor) -> Tensor:
    return (x - x.amax(-1, keepdim=True)).exp()


MASKED = {
    "times ones and zeros": lambda s: over_sums(exponentials(s) * (~FUTURE).double()),
    "times bool, exponentials of scores": lambda s: over_sums(~FUTURE * s.exp()),
    "filled": lambda s: over_sums(exponentials(s + BIAS).masked_fill(FUTURE, 0.0)),
    "where": lambda s: over_sums(torch.where(FUTURE, 0.0, exponentials(s))),
    "filled twice": lambda s: over_sums(exponentials(s.masked_fill(FAR, -INF)).masked_fill(FUTURE, 0)),
}
"""Masks of exponentials."""

FAR = torch.ones(T, T).tril(-2).bool()


@pytest.mark.parametrize("name", MASKED)
def test_masks_of_exponentials(name):
    """Where a hidden score is so large that visible exponentials may vanish beside it, they stay."""
    code = lambda q, k, v: MASKED[name](q @ k.mT) @ v  # noqa: E731
    taken(code)
    scratch.reset_counts()
    left(code, 10.0)


LEFT_MASKED = {
    "a row without keys": lambda s: over_sums(exponentials(s) * (~BLIND).double()),
    "sums of all": lambda s: exponentials(s) * (~FUTURE).double() / exponentials(s).sum(-1, keepdim=True),
    "another number": lambda s: over_sums(exponentials(s).masked_fill(FUTURE, 1e-9)),
    "other factors": lambda s: over_sums(exponentials(s) * torch.full((T, T), 0.5).double().tril()),
    "a small number in the sum": lambda s: (lambda e: e / (e.sum(-1, keepdim=True) + 1e-9))(
        exponentials(s) * (~FUTURE).double()
    ),
    "logarithms": lambda s: s.log_softmax(-1).masked_fill(FUTURE, 0.0).exp(),
}


@pytest.mark.parametrize("name", LEFT_MASKED)
def test_other_masks_of_exponentials(name):
    left(lambda q, k, v: LEFT_MASKED[name](q @ k.mT) @ v)


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


def test_masks_after_the_maximum():
    """Scores of at most 400, in size, may be 800 below a hidden maximum, where exp is 0, those of at most 250 not."""
    for size, outcome in ((250.0, 1), (400.0, 0)):
        scratch.reset_counts()
        q = torch.ones(1, 1, T, 1, dtype=torch.float64)
        k = torch.tensor([-1.0, *[1.0] * (T - 1)], dtype=torch.float64).view(1, 1, T, 1)
        plain = a_mask_after_the_maximum(q, k, k, size)
        with scratch.enabled():
            torch.testing.assert_close(a_mask_after_the_maximum(q, k, k, size), plain, equal_nan=True)
        assert plain[0, 0, 0].isnan() == (not outcome)
        assert scratch.counts().taken == outcome


def test_exponentials_in_narrow_dtypes():
    """float16 overflows at exp(11.1): scores of 9 among 6 keys do not, those of 12 do."""
    for largest, outcome in ((2.5, 1), (3.5, 0)):
        scratch.reset_counts()
        q = torch.full((B, H, T, 1), largest).half()
        plain = unstable_once(q @ q.mT) @ q
        with scratch.enabled():
            torch.testing.assert_close(unstable_once(q @ q.mT) @ q, plain, equal_nan=True)
        assert scratch.counts().taken == outcome


def a_mask_after_the_maximum(q, k, v, size=1000.0):
    """The largest score of all is hidden: exponentials of the others may all be 0."""
    x = q @ k.mT * size
    e = (x - x.amax(-1, keepdim=True)).masked_fill(FUTURE, -INF).exp()
    return e / e.sum(-1, keepdim=True) @ v


def other_scores(q, k, v):
    x = q @ k.mT
    sums = x.exp().sum(-1, keepdim=True)
    x.mul_(2)
    return x.exp() / sums @ v


def other_exponentials(q, k, v):
    e = (q @ k.mT).exp()
    sums = e.sum(-1, keepdim=True)
    e.mul_(2)
    return e / sums @ v


def changed_through_a_view(q, k, v):
    e = (q @ k.mT).exp()
    sums = e.sum(-1, keepdim=True)
    e.view(-1)[0] = 1.0
    return e / sums @ v


def changed_sums(q, k, v):
    e = (q @ k.mT).exp()
    sums = e.sum(-1, keepdim=True)
    sums.add_(1)
    return e / sums @ v


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
    "exponentials scaled": lambda q, k, v: unstable_of(lambda s: s.exp() * 2)(q @ k.mT) @ v,
    "logarithms": lambda q, k, v: (q @ k.mT).log_softmax(-1) @ v,
    "logarithms scaled": lambda q, k, v: ((q @ k.mT).log_softmax(-1) / 2).exp() @ v,
    "logarithms over queries": lambda q, k, v: (q @ k.mT).log_softmax(-2).exp() @ v,
    "powers of 2": lambda q, k, v: unstable_of(torch.exp2)(q @ k.mT) @ v,
    "sums of other exponentials": lambda q, k, v: (
        (lambda x: x.exp() / (x / 2).exp().sum(-1, keepdim=True))(q @ k.mT) @ v
    ),
    "a cast of exponentials": lambda q, k, v: unstable_of(lambda s: s.exp().float())(q @ k.mT).double() @ v,
}


def unstable_of(function) -> Callable[[Tensor], Tensor]:
    def softmax(x: Tensor) -> Tensor:
        e = function(x)
        return e / e.sum(-1, keepdim=True)

    return softmax


FUNCTIONS = (a_mask_after_the_maximum, other_scores, changed_sums, a_hook)
LEFT |= {function.__name__.replace("_", " "): function for function in FUNCTIONS}


@pytest.mark.parametrize("name", LEFT)
def test_left(name):
    left(LEFT[name])


@pytest.mark.parametrize("code", [other_exponentials, changed_through_a_view, changed_sums])
def test_changes_in_place_without_gradients(code):
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
