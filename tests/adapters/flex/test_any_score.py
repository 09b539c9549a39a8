"""Promise: on a CPU, any score_mod is computed block by block, with the derivatives of plain PyTorch."""

import itertools

import pytest
import torch
from support.adapters.any_masks import LENGTH
from support.adapters.any_scores import HEADS, SCORES, by_formula, derivatives, drawn, functions, relative
from support.adapters.gradients import assert_accurate
from torch.autograd import gradcheck, gradgradcheck

from pyattn.adapters.flex import AuxRequest, causal, create_block_mask, flex_attention
from pyattn.adapters.flex.scores import attend, score_blocks
from pyattn.cli.timing import peak_memory

DTYPES = torch.bfloat16, torch.float32, torch.float16
every_score = pytest.mark.parametrize("name", SCORES)


@pytest.fixture
def _small_blocks(monkeypatch):
    monkeypatch.setattr(score_blocks, "ROWS", 30)
    monkeypatch.setattr(score_blocks, "PAIRS", 30 * LENGTH * 2)
    monkeypatch.setattr(attend, "score_of_terms", lambda *_: None)  # also those that have a native meaning


@every_score
@pytest.mark.usefixtures("_small_blocks")
def test_derivatives(name):
    tensors = drawn(name)
    ours, expected = (derivatives(function, tensors) for function in functions(name))
    for number, (x, y) in enumerate(zip(ours, expected, strict=True)):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9, msg=lambda text, n=number: f"result {n}: {text}")


@pytest.mark.parametrize(("name", "dtype"), list(zip(SCORES, itertools.cycle(DTYPES), strict=False)), ids=str)
def test_accuracy(name, dtype):
    """By the rule of yardstick.py."""
    assert_accurate(*functions(name), *drawn(name, dtype))


def test_gradcheck():
    shapes = (1, 2, 3, 2), (1, 1, 4, 2), (1, 1, 4, 1), (2, 3)
    tensors = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    block_mask = create_block_mask(lambda b, h, i, j: (i * j) % 2 == 0, None, None, 3, 4, "cpu")

    def attend(q, k, v, table):
        def score_mod(score, b, h, q_idx, kv_idx):
            return torch.tanh(score) * table[h, 0] + table[h, (q_idx - kv_idx).clamp(0, 2)]

        return clean(flex_attention(q, k, v, score_mod, block_mask, 0.3, True, True))

    assert gradcheck(attend, tensors)
    assert gradgradcheck(attend, tensors)


def clean(results):
    out, lse = results
    return out, lse.masked_fill(lse == -torch.inf, 0.0)


def test_third_derivatives_are_refused():
    q = torch.randn(1, 1, 5, 3, requires_grad=True)
    once = flex_attention(q, q, q, lambda score, b, h, i, j: score * score).sum()
    twice = torch.autograd.grad(once, q, create_graph=True)[0].sum()
    thrice = torch.autograd.grad(twice, q, create_graph=True)[0].sum()
    with pytest.raises(NotImplementedError, match=r"^pyattn: third derivatives of attention are not implemented$"):
        thrice.backward()


def test_memory():
    """Forward and backward stay far below the 134 MB of the scores of two heads."""
    q, k, v = torch.randn(3, 1, 2, 4096, 16, requires_grad=True).unbind()
    table = torch.randn(2, 19, requires_grad=True)
    block_mask = create_block_mask(causal(), None, None, 4096, 4096, "cpu")

    def step():
        flex_attention(q, k, v, relative(table), block_mask).sum().backward()

    assert peak_memory(step) < 40e6


def test_hidden_values_never_leak():
    """Masked keys and what is read for them may be NaN, also in rows' own block; NaN that a query sees arrives."""
    q, k, v = torch.randn(3, 1, 1, 64, 8).unbind()
    block_mask = create_block_mask(causal(), None, None, 64, 64, "cpu")

    def step(k, v, gains):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = flex_attention(*inputs, lambda score, b, h, i, j: score * gains[j], block_mask)
        return out, torch.autograd.grad(out[:, :, :40].sum(), inputs)[0]

    gains = torch.ones(64)
    broken = k.clone(), v.clone(), gains.clone()
    broken[0][:, :, 40:], broken[1][:, :, 40:], broken[2][40:] = torch.nan, torch.inf, torch.nan
    for mine, other in zip(step(*broken), step(k, v, gains), strict=True):
        torch.testing.assert_close(mine[:, :, :40], other[:, :, :40])
    assert not step(*broken)[0][:, :, 40:].isfinite().any()


def test_values_hidden_by_the_score_never_leak():
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 1, 64, 8).unbind())
    broken = v.detach().clone()
    broken[:, :, 40:] = torch.nan
    results = []
    for values in (v, broken.requires_grad_()):
        out = flex_attention(q, k, values, lambda score, b, h, i, j: torch.where(j < 40, score, -torch.inf))
        results.append((out, *torch.autograd.grad(out.sum(), [q, k, values])))
    torch.testing.assert_close(*results)


def test_captured_tensors_of_every_kind():
    """Global variables and attributes are captured, too; one that needs no gradient gets none."""
    tensors = drawn("nothing")

    class Scales:
        weights = torch.rand(HEADS, dtype=torch.float64, requires_grad=True)
        fixed = torch.rand(HEADS, dtype=torch.float64)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score * Scales.weights[h] * GLOBAL[b] + Scales.fixed[h]

    results = []
    for function in (
        lambda *x: flex_attention(*x, score_mod, enable_gqa=True),
        lambda *x: by_formula(*x, score_mod)[0],
    ):
        results.append(torch.autograd.grad(function(*tensors).square().sum(), [*tensors, Scales.weights, GLOBAL]))
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)
    assert not flex_attention(*(x.detach() for x in tensors), lambda s, *_: s * 2, enable_gqa=True).requires_grad
    with torch.no_grad():
        assert not flex_attention(*tensors, score_mod, enable_gqa=True).requires_grad


GLOBAL = torch.rand(2, dtype=torch.float64, requires_grad=True)


def test_a_table_in_bfloat16_is_summed_in_float32():
    """Each of its gradients adds up thousands of pairs; a sum in bfloat16 would stop at 256."""
    q, k, v = torch.randn(3, 1, 1, 512, 8).unbind()
    table = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    ours = flex_attention(
        q, k, v, lambda score, b, h, i, j: score * 0 + table[h, (i + j) * 0] * (j + 1), return_lse=True
    )[1]
    (gradient,) = torch.autograd.grad(ours.sum(), table)
    torch.testing.assert_close(gradient.item(), 512 * 256.5, rtol=2**-8, atol=0)


def test_ways_to_call():
    q, k, v = (x.detach() for x in drawn("nothing"))
    score_mod = SCORES["a square"].make()
    block_mask = create_block_mask(causal(), None, None, LENGTH, LENGTH, "cpu")
    out, lse = by_formula(q * 0.5, k, v, score_mod, causal())
    scale = 0.5 / 8**0.5
    for options in ({"return_lse": True}, {"return_aux": AuxRequest(lse=True)}):
        ours, aux = flex_attention(
            q, k, v, score_mod, block_mask, scale, True, kernel_options={"BLOCK_M": 64}, **options
        )
        torch.testing.assert_close((ours, getattr(aux, "lse", aux)), (out, lse), rtol=1e-12, atol=1e-12)
    one = flex_attention(
        q, k[:1], v[:1], score_mod, create_block_mask(causal(), 2, None, LENGTH, LENGTH, "cpu"), enable_gqa=True
    )
    expected, _ = by_formula(q, k[:1].expand(2, -1, -1, -1), v[:1].expand(2, -1, -1, -1), score_mod, causal())
    torch.testing.assert_close(one, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("lengths", [(0, 3), (3, 0), (0, 0)], ids=str)
def test_empty(lengths):
    q, k, v = (torch.randn(2, 2, n, 8, requires_grad=True) for n in (*lengths, lengths[1]))
    out, lse = flex_attention(q, k, v, lambda score, b, h, i, j: score * 2, return_lse=True)
    assert out.shape == q.shape
    assert not out.any()
    assert (lse == -torch.inf).all()
    assert not any(x.any() for x in torch.autograd.grad(out.sum(), [q, k, v]))


def test_autocast():
    q, k, v = (x.detach().float().requires_grad_() for x in drawn("nothing"))
    score_mod = SCORES["a square"].make()
    with torch.autocast("cpu", torch.bfloat16):
        out = flex_attention(q, k, v, score_mod, enable_gqa=True)
        gradients = torch.autograd.grad(out.float().sum(), [q, k, v])
    assert out.dtype == torch.bfloat16
    low = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
    expected = flex_attention(*low, score_mod, enable_gqa=True)
    assert torch.equal(out, expected)
    torch.testing.assert_close(gradients, tuple(x.float() for x in torch.autograd.grad(expected.float().sum(), low)))
