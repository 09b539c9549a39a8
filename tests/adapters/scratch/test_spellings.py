"""Attention in many spellings: what is taken equals the plain code, what is left is the plain code, bit for bit."""

import pytest
import torch
from support.adapters.gradients import of_weighted_sum
from support.adapters.spellings import ALL_FUTURE, BIAS, FUTURE, INF, B, Code, D, H, T, float_mask
from support.adapters.spellings_left import LEFT
from support.adapters.spellings_taken import TAKEN, WITHOUT_GRADIENTS, a_mask_made_from_the_scores
from support.assertions import assert_as_exact
from torch import Tensor, nn
from torch.nn import functional

from pyattn.adapters import scratch
from pyattn.adapters.scratch import native


def results(code: Code) -> list[Tensor]:
    """The result, and the gradients of a weighted sum of it."""
    q, k, v = torch.randn(3, B, H, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).unbind()
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    return of_weighted_sum(code, inputs, BIAS)


@pytest.mark.parametrize("name", TAKEN)
def test_taken(name):
    plain = results(TAKEN[name])
    with scratch.enabled():
        ours = results(TAKEN[name])
    torch.testing.assert_close(ours, plain, rtol=1e-11, atol=1e-12)
    assert scratch.counts() == (1, {})


@pytest.mark.parametrize("name", [*LEFT, *WITHOUT_GRADIENTS])
def test_left(name):
    code = (LEFT | WITHOUT_GRADIENTS)[name]
    plain = results(code)
    with scratch.enabled():
        ours = results(code)
    torch.testing.assert_close(ours, plain, rtol=0, atol=0, equal_nan=True)
    assert scratch.counts().taken == 0
    assert sum(scratch.counts().left.values()) >= 1


@pytest.mark.parametrize("name", [*TAKEN, *WITHOUT_GRADIENTS])
def test_inference(name):
    code = (TAKEN | WITHOUT_GRADIENTS)[name]
    inputs = torch.randn(3, B, H, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).unbind()
    with torch.inference_mode():
        plain = code(*inputs)
        with scratch.enabled():
            ours = code(*inputs)
    torch.testing.assert_close(ours, plain, rtol=1e-11, atol=1e-12)
    assert scratch.counts() == (1, {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    q, k, v = torch.randn(3, B, H, T, D).to(dtype).unbind()

    def code():
        weights = functional.softmax(q @ k.mT / 2 + float_mask(-1e4).to(dtype), dim=-1, dtype=torch.float32).to(dtype)
        return weights @ v

    exact = functional.softmax((q.double() @ k.double().mT / 2).masked_fill(FUTURE, -INF), dim=-1) @ v.double()
    with scratch.enabled():
        out = code()
    assert out.dtype == dtype
    assert_as_exact(out, code(), exact)
    assert scratch.counts() == (1, {})


def test_weights_outlive_their_inputs():
    q, k, v = torch.randn(3, B, H, T, D).unbind()
    with scratch.enabled():
        weights = (q @ k.mT).softmax(-1)
        out = weights @ v
    plain = (q @ k.mT).softmax(-1)
    q.zero_()
    assert torch.equal(weights, plain)
    torch.testing.assert_close(out, plain @ v)
    assert weights.tolist() == plain.tolist()
    assert weights.numpy().shape == plain.shape
    assert repr(weights).startswith("tensor(")


def test_gradient_of_weights_after_the_product_is_refused():
    q, k, v = torch.randn(3, B, H, T, D, requires_grad=True).unbind()
    with scratch.enabled():
        weights = (q @ k.mT).softmax(-1)
        out = weights @ v
        with pytest.raises(RuntimeError, match="before the product with the values"):
            torch.autograd.grad(out.sum(), weights)


def test_dropout_of_both_uses_is_one():
    q, k, v = torch.randn(3, B, H, T, T, dtype=torch.float64, requires_grad=True).unbind()
    with scratch.enabled():
        weights = functional.dropout((q @ k.mT).softmax(-1), 0.5)
        out = weights @ v
        dropped = weights * 1
    torch.testing.assert_close(out, dropped @ v, rtol=1e-12, atol=1e-12)
    ours, plain = (torch.autograd.grad(x.square().sum(), (q, k, v), retain_graph=True) for x in (out, dropped @ v))
    torch.testing.assert_close(ours, plain, rtol=1e-11, atol=1e-12)
    share = (dropped == 0).double().mean()
    assert 0.3 < share < 0.7
    assert scratch.counts().taken == 1


def test_second_derivatives():
    inputs = torch.randn(3, 1, 2, 3, 2, dtype=torch.float64).unbind()
    inputs = [x.clone().requires_grad_() for x in inputs]
    with scratch.enabled():
        assert torch.autograd.gradgradcheck(lambda q, k, v: (q @ k.mT / 2).softmax(-1) @ v, inputs)
    assert scratch.counts().taken > 0


def test_second_derivatives_of_rows_without_keys():
    inputs = [x.clone().requires_grad_() for x in torch.randn(3, 1, 2, 3, 2, dtype=torch.float64)]
    hidden = torch.ones(3, 3).triu(0).bool()
    with scratch.enabled():
        assert torch.autograd.gradgradcheck(
            lambda q, k, v: (q @ k.mT).masked_fill(hidden, -1e9).softmax(-1) @ v, inputs
        )
    assert scratch.counts().left == {}


def test_autocast():
    q, k, v = torch.randn(3, B, H, T, D).unbind()
    with torch.autocast("cpu", torch.bfloat16):
        plain = (q @ k.mT).softmax(-1) @ v
        with scratch.enabled():
            ours = (q @ k.mT).softmax(-1) @ v
    assert ours.dtype == plain.dtype == torch.bfloat16
    torch.testing.assert_close(ours, plain, rtol=0.05, atol=0.05)
    assert scratch.counts() == (1, {})


def test_enable_and_disable():
    q = torch.randn(B, H, T, D)
    scratch.enable()
    scratch.enable()
    (q @ q.mT).softmax(-1) @ q
    scratch.disable()
    (q @ q.mT).softmax(-1) @ q
    assert scratch.counts() == (1, {})


def test_few_scores_are_left(monkeypatch):
    monkeypatch.undo()
    q = torch.randn(B, H, T, D)
    with scratch.enabled():
        (q @ q.mT).softmax(-1) @ q
    assert scratch.counts() == (0, {"fewer than 524288 scores": 1})


def test_few_scores_that_were_read_are_left(monkeypatch):
    """In training native code gains anyway; tests/tools/scratch_speed.py."""
    monkeypatch.setattr(native, "MIN_SCORES_READ", B * H * T * T + 1)
    q, k, v = torch.randn(3, B, H, T, D, generator=torch.Generator().manual_seed(1)).unbind()
    with torch.no_grad():
        plain = a_mask_made_from_the_scores(q, k, v)
        with scratch.enabled():
            assert torch.equal(a_mask_made_from_the_scores(q, k, v), plain)
            assert scratch.counts().taken == 0
            monkeypatch.setattr(native, "MIN_SCORES_READ", B * H * T * T)
            a_mask_made_from_the_scores(q, k, v)
    assert scratch.counts().taken == 1
    with scratch.enabled():
        a_mask_made_from_the_scores(q.requires_grad_(), k, v)
    assert scratch.counts().taken == 2


@pytest.mark.parametrize("value", [-103.0, -1.0, 1.0])
def test_a_module_whose_fills_hide_no_key_is_not_watched(value):
    class Filled(nn.Module):
        def forward(self, q, k, v):
            return (q @ k.mT).masked_fill(FUTURE, value).softmax(-1) @ v

    model = scratch.convert(Filled())
    inputs = torch.randn(3, B, H, T, D).unbind()
    assert torch.equal(model(*inputs), Filled()(*inputs))
    assert scratch.counts() == (0, {f"a fill with {value}, which hides no key": 1})
    assert not model._forward_pre_hooks


def test_rows_without_keys_that_round_their_scores_are_left():
    """-1e9 in float32 rounds scores to multiples of 64: what is left of them is the plain code's own."""
    q, k, v = (40 * torch.randn(3, B, H, T, D)).unbind()

    def code():
        return (q @ k.mT + float_mask(-1e9, ALL_FUTURE).float()).softmax(-1) @ v

    with scratch.enabled():
        out = code()
    assert torch.equal(out, code())
    assert scratch.counts() == (0, {"a query that sees no key": 1})
