"""Softmax written out whose sums are kept from being 0, by a small number or a lower bound that changes no bit."""

import pytest
import torch
from support.adapters.compiled_graphs import replacing
from support.adapters.softmaxes import BIAS, FUTURE, INF, B, D, H, T, exponentials

from pyattn.adapters import scratch

BOUNDED = {
    "plus 1e-9": lambda e: e / (e.sum(-1, keepdim=True) + 1e-9),
    "1e-8 plus sums": lambda e: e / (1e-8 + torch.sum(e, dim=-1, keepdim=True)),
    "of at least 1e-6": lambda e: e / e.sum(-1, keepdim=True).clamp(min=1e-6),
    "of at least 1e-12": lambda e: e.div(e.sum(-1, keepdim=True).clamp_min(1e-12)),
    "of at least 1e-12, plus 0.0": lambda e: e / (e.sum(-1, keepdim=True).clamp_min(1e-12) + 0.0),
}
"""Exponentials, less the row maximum, over sums that are kept from being 0."""

CHANGING = {
    "plus 1e-6": lambda e: e / (e.sum(-1, keepdim=True) + 1e-6),
    "plus 6e-8": lambda e: e / (e.sum(-1, keepdim=True) + 6e-8),
    "less 1e-9": lambda e: e / (e.sum(-1, keepdim=True) - 1e-9),
    "plus -1e-9": lambda e: e / (e.sum(-1, keepdim=True) + -1e-9),
    "of at least 2": lambda e: e / e.sum(-1, keepdim=True).clamp(min=2.0),
    "between two numbers": lambda e: e / e.sum(-1, keepdim=True).clamp(1e-9, 3.0),
    "changed afterwards": lambda e: e / (e.sum(-1, keepdim=True) + 1e-9).mul_(2),
    "plus a learned number": lambda e: e / (e.sum(-1, keepdim=True) + BIAS[0, 0, 0].float().square() * 1e-9),
}


def single(divided, run=lambda code: code):
    """The result and the gradients in float32."""
    q, k, v = (torch.randn(B, H, T, D, generator=torch.Generator().manual_seed(n)).requires_grad_() for n in range(3))

    def code(q, k, v):
        x = (q @ k.mT / 2).masked_fill(FUTURE, -INF)
        return divided((x - x.amax(-1, keepdim=True)).exp()) @ v

    out = run(code)(q, k, v)
    return [out.detach() + 0, *torch.autograd.grad(out.sin().sum(), (q, k, v))]


@pytest.mark.parametrize("name", BOUNDED)
def test_sums_of_at_least_1_that_rounding_keeps(name):
    """In float64 1e-9 changes them: test_written_softmax.py has it among those that are left."""
    plain = single(BOUNDED[name])
    with scratch.enabled():
        ours = single(BOUNDED[name])
    torch.testing.assert_close(ours, plain)
    assert scratch.counts() == (1, {})


@pytest.mark.parametrize("name", CHANGING)
def test_sums_that_change(name):
    plain = single(CHANGING[name])
    with scratch.enabled():
        ours = single(CHANGING[name])
    torch.testing.assert_close(ours, plain, rtol=0, atol=0)
    assert scratch.counts().taken == 0


def test_a_small_number_beside_sums_of_exponentials_that_are_not_shifted():
    q, k, v = torch.randn(3, B, H, T, D, generator=torch.Generator().manual_seed(1)).unbind()
    code = lambda: BOUNDED["plus 1e-9"]((q @ k.mT - 20).exp()) @ v  # noqa: E731
    plain = code()
    with scratch.enabled():
        assert torch.equal(code(), plain)
    assert scratch.counts().taken == 0


def test_sums_and_their_bounds_have_separate_memory():
    q, k, v = torch.randn(3, B, H, T, D, generator=torch.Generator().manual_seed(1)).unbind()

    def code():
        e = exponentials(q @ k.mT)
        sums = e.sum(-1, keepdim=True)
        bounded = sums + 1e-9
        out = e / bounded @ v
        bounded.zero_()
        return out, sums, bounded

    plain = code()
    with scratch.enabled():
        ours = [x + 0 for x in code()]
    torch.testing.assert_close(ours, list(plain))
    assert scratch.counts().taken == 1


@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.usefixtures("fresh")
def test_compiled(name, found):
    ours = single(BOUNDED[name], lambda code: torch.compile(code, backend=replacing(counts=found), fullgraph=True))
    torch.testing.assert_close(ours, single(BOUNDED[name]))
    assert found == [1]
