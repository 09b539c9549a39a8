"""Promise: what a mod reads may change at any time and in any way; each call, and its derivatives, read it once."""

from random import Random

import numpy
import pytest
import torch
from support.adapters.any_scores import by_formula
from support.adapters.changes import COUNTED, HEADS, LENGTH, UNCOUNTED, State
from support.assertions import refused
from support.cases import newer_compiler

from pyattn.adapters.flex import and_masks, causal, create_block_mask, document, flex_attention, or_masks, prefix_lm
from pyattn.adapters.flex.masks.block_mask import EVALUATED
from pyattn.adapters.flex.scores.score_masks import EVALUATED as OF_SCORES
from pyattn.adapters.flex.trace import trace

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute:UserWarning")


def blocks(mask_mod, block_size=128):
    return create_block_mask(mask_mod, None, None, LENGTH, LENGTH, "cpu", block_size, separate_full_blocks=False)


def drawn():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, HEADS, LENGTH, 4, dtype=torch.float64, generator=generator).requires_grad_() for _ in "qkv"]


MODS = {
    "block_mask": lambda state: (None, state.documents),
    "a mask in the score": lambda state: (state.masked(state.documents, lambda score, *_: score), None),
    "blocks": lambda state: (state.masked(state.documents, state.gated), None),
    "block_mask and blocks": lambda state: (state.gated, state.documents),
}


@pytest.mark.parametrize("kind", MODS)
@pytest.mark.parametrize("when", ["between calls", "before backward"])
@pytest.mark.parametrize("way", COUNTED | UNCOUNTED)
def test_every_way(way, when, kind):
    """A call sees new ids and weights, the backward of the call before sees the old ones."""
    state = State(Random(0))
    state.ids = torch.arange(LENGTH) % 3
    state.weights = torch.nn.Parameter(torch.rand(LENGTH, dtype=torch.float64), requires_grad=False)
    score_mod, mask_mod = MODS[kind](state)
    block_mask = None if mask_mod is None else blocks(mask_mod)

    def ours(*x):
        return flex_attention(*x, score_mod, block_mask)

    def formula(*x):
        return by_formula(*x, score_mod or (lambda score, *_: score), mask_mod)[0]

    tensors = drawn()
    old = formula(*tensors)
    gradients = torch.autograd.grad(old.square().sum(), tensors)
    out = ours(*tensors)
    if when == "between calls":
        out = None
    for name, new in (("ids", torch.arange(LENGTH) % 2), ("weights", torch.rand(LENGTH, dtype=torch.float64))):
        (COUNTED | UNCOUNTED)[way](state, name, new)
    if when == "between calls":
        out, changed = ours(*tensors), formula(*tensors)
        assert not torch.allclose(old, changed)
        gradients = torch.autograd.grad(changed.square().sum(), tensors)
        torch.testing.assert_close(out, changed, rtol=1e-10, atol=1e-10)
    found = torch.autograd.grad(out.square().sum(), tensors)
    torch.testing.assert_close(found, gradients, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("most", [0, LENGTH * 8 - 1, LENGTH * 8])
def test_what_is_remembered(monkeypatch, most):
    """A mod whose tensors are small, also of NaN, and new ones in each run; a large one is evaluated in each call."""
    monkeypatch.setattr(trace, "MOST_BYTES", most)
    numbers = torch.tensor([torch.nan, 1.0] * (LENGTH // 2), dtype=torch.float64)
    array = numbers.numpy()

    def mask_mod(b, h, q_idx, kv_idx):
        numbers = torch.as_tensor(array)
        return (numbers[q_idx] == numbers[kv_idx]) | (q_idx >= kv_idx)

    def score_mod(score, *places):
        return torch.where(mask_mod(*places), score, -torch.inf)

    block_mask, tensors = blocks(mask_mod), drawn()
    for memory, key, call in (
        (EVALUATED, block_mask, lambda: flex_attention(*tensors, None, block_mask)),
        (OF_SCORES, score_mod, lambda: flex_attention(*tensors, score_mod)),
    ):
        call()
        before = memory[key]
        call()
        assert (memory[key] is before) == (most == LENGTH * 8)


@pytest.mark.parametrize("wrong", ["score_mod", "mask_mod"])
def test_a_mod_that_backward_calls_again(wrong):
    """One that is no expression of functions of torch: a change is refused."""
    numbers, tensors = [3], drawn()

    def mask_mod(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx).abs().clone().sub_(numbers[0] if wrong == "mask_mod" else 1) % 2 == 0

    def score_mod(score, *_):
        return score.square().mul_(numbers[0] if wrong == "score_mod" else 1)

    out = flex_attention(*tensors, score_mod, blocks(mask_mod))
    torch.autograd.grad(out.sum(), tensors, retain_graph=True)
    first = torch.autograd.grad(out.sum(), tensors, create_graph=True)
    numbers[0] = 4
    with refused(RuntimeError, f"a {wrong} must read the same in backward as in forward, unless it is an express"):
        torch.autograd.grad(out.sum(), tensors)
    with refused(RuntimeError, f"a {wrong} must read the same in backward as in forward, unless it is an express"):
        torch.autograd.grad(sum(x.sum() for x in first), tensors)


def test_tensors_that_are_large_together(monkeypatch):
    monkeypatch.setattr(trace, "MOST_BYTES", 2 * LENGTH * 8 - 1)
    first, second = torch.arange(LENGTH) % 2, torch.arange(LENGTH) % 3
    block_mask = blocks(lambda b, h, q_idx, kv_idx: (first[q_idx] == second[kv_idx]) | (q_idx == kv_idx))
    before = EVALUATED[block_mask]
    flex_attention(*drawn(), None, block_mask)
    assert EVALUATED[block_mask] is not before


def test_arrays_as_indices():
    """repr leaves out most of a long one."""
    ids, order, tensors = torch.arange(LENGTH) // 5 % 3, numpy.arange(2000) % LENGTH, drawn()

    def mask_mod(b, h, q_idx, kv_idx):
        mixed = ids[order]
        return (mixed[q_idx] == mixed[kv_idx]) | (q_idx == kv_idx)

    block_mask = blocks(mask_mod)
    for _ in range(2):
        expected = by_formula(*tensors, lambda score, *_: score, mask_mod)[0]
        torch.testing.assert_close(flex_attention(*tensors, None, block_mask), expected)
        order[5:20] = 0


def test_tensors_as_ends_of_slices():
    weights, end, tensors = torch.rand(LENGTH, dtype=torch.float64), torch.tensor(3), drawn()
    factor = weights[:3].sum()
    gradients = torch.autograd.grad(by_formula(*tensors, lambda score, *_: score.square() * factor)[0].sum(), tensors)
    out = flex_attention(*tensors, lambda score, *_: score.square() * weights[:end].sum())
    end.data += 4
    torch.testing.assert_close(torch.autograd.grad(out.sum(), tensors), gradients, rtol=1e-9, atol=1e-9)


@newer_compiler
@pytest.mark.parametrize("score", ["an array", "blocks"])
def test_graphs(score):
    """Positions that change in the graph before its backward, and an array between calls."""
    at, array = torch.tensor([2]), numpy.linspace(0, 1, LENGTH)

    def score_mod(score_, b, h, q_idx, kv_idx):
        return score_ * torch.as_tensor(array)[kv_idx] if score == "an array" else score_.square()

    block_mask = blocks(causal(at))

    def call(*x):
        out = flex_attention(*x, score_mod, block_mask)
        at.add_(1)
        return out

    torch.compiler.reset()
    compiled, tensors = torch.compile(call, backend="aot_eager", fullgraph=True), drawn()
    for _ in range(2):
        results = []
        for function in (call, compiled):
            at.fill_(2)
            out = function(*tensors)
            results.append((out, *torch.autograd.grad(out.square().sum(), tensors)))
        torch.testing.assert_close(*results)
        array *= 2
    torch.compiler.reset()


POSITIONS = {
    "causal": causal,
    "prefix": prefix_lm,
    "or": lambda at: or_masks(causal(-9), causal(at), prefix_lm(at)),
    "and": lambda at: and_masks(causal(at), document(torch.arange(LENGTH) // 20)),
}


@pytest.mark.parametrize("make", POSITIONS.values(), ids=POSITIONS)
def test_blocks_that_positions_leave(make):
    """The positions of a native mask may change as long as its blocks cover it."""
    at, tensors = torch.tensor(0), drawn()
    block_mask = create_block_mask(make(at), None, None, LENGTH, LENGTH, "cpu", 8)
    everything = blocks(make(at))
    compiled = torch.compile(lambda *x: flex_attention(*x, block_mask=block_mask), backend="eager", fullgraph=True)
    flex_attention(*tensors, block_mask=block_mask), compiled(*tensors)
    for change in (lambda: at.add_(12), lambda: at.data.add_(2)):
        change()
        for function in (lambda *x: flex_attention(*x, block_mask=block_mask), compiled):
            with pytest.raises((ValueError, RuntimeError), match=r"^pyattn: block_mask must list every block"):
                function(*tensors)
        expected = by_formula(*tensors, lambda score, *_: score, make(at))[0]
        torch.testing.assert_close(flex_attention(*tensors, block_mask=everything), expected)
    torch.compiler.reset()


@pytest.mark.parametrize("compiler", [None, pytest.param("aot_eager", marks=newer_compiler)])
def test_no_grad_within_a_score_mod(compiler):
    weights, tensors = torch.rand(LENGTH, dtype=torch.float64, requires_grad=True), drawn()

    def score_mod(score, b, h, q_idx, kv_idx):
        with torch.no_grad():
            half = weights / 2
        return score + half[kv_idx] * weights[kv_idx]

    def call(*x):
        return flex_attention(*x, score_mod)

    function = call if compiler is None else torch.compile(call, backend=compiler)
    expected = by_formula(*tensors, score_mod)[0]
    for x, y in zip(
        *(torch.autograd.grad(f.square().sum(), weights) for f in (function(*tensors), expected)), strict=True
    ):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)
    torch.compiler.reset()
