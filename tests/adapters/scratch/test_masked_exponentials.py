"""Masks between the exponentials of a written softmax and their sums, or between the maximum and the exponentials."""

import pytest
import torch
from support.adapters.softmaxes import (
    BIAS,
    BLIND,
    FUTURE,
    INF,
    T,
    exponentials,
    left,
    over_sums,
    taken,
)

from pyattn.adapters import scratch

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


def a_mask_after_the_maximum(q, k, v, size=1000.0):
    """The largest score of all is hidden: exponentials of the others may all be 0."""
    x = q @ k.mT * size
    return over_sums((x - x.amax(-1, keepdim=True)).masked_fill(FUTURE, -INF).exp()) @ v


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


def test_a_hidden_maximum_is_left() -> None:
    left(a_mask_after_the_maximum)
