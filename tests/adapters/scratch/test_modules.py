"""Models that are converted: results, gradients, checkpoints, copies, errors, and which modules are watched."""

import copy
import pickle

import pytest
import torch
from support.adapters.written import Clamping, InParts, Keeping, Model
from torch import nn
from torch.utils.checkpoint import checkpoint

from pyattn.adapters import scratch
from pyattn.adapters.scratch import native


@pytest.fixture
def x():
    return torch.randn(2, 8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()


def step(model, x):
    model.zero_grad()
    out = model(x)
    out.square().sum().backward()
    return [out.detach() + 0, *(p.grad for p in model.parameters())]


def watched(model):
    return [name for name, module in model.named_modules() if module._forward_pre_hooks]


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_steps(x, reentrant):
    model = Model(reentrant=reentrant)
    plain = step(model, x)
    assert scratch.convert(model) is model
    for n in range(1, 4):
        torch.testing.assert_close(step(model, x), plain, rtol=1e-11, atol=1e-12)
        assert scratch.counts() == (2 * n if reentrant is None else 4 * n, {})
        assert watched(model) == ["blocks.0.attention", "blocks.1.attention"]
    scratch.revert(model)
    assert watched(model) == []
    torch.testing.assert_close(step(model, x), plain, rtol=0, atol=0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_repeat_dropout(x, reentrant):
    steps = []
    for again in (None, reentrant):
        model = scratch.convert(Model(reentrant=again, dropout=0.3))
        torch.manual_seed(3)
        steps.append(step(model, x))
    torch.testing.assert_close(steps[1], steps[0], rtol=0, atol=0)
    assert scratch.counts().left == {}


@pytest.mark.parametrize("after", ["conversion", "a forward"])
def test_copies_and_pickles(x, after):
    model = Model()
    plain = step(model, x)
    scratch.convert(model)
    if after == "a forward":
        model(x)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        scratch.reset_counts()
        torch.testing.assert_close(step(made, x), plain, rtol=1e-11, atol=1e-12)
        assert scratch.counts() == (2, {})
        with torch.no_grad():
            for p in made.parameters():
                p.zero_()
        torch.testing.assert_close(step(model, x), plain, rtol=1e-11, atol=1e-12)
        assert watched(scratch.revert(made)) == []


def test_errors_leave_no_mode_behind(x):
    model = scratch.convert(Model())
    for _ in range(2):
        with pytest.raises(RuntimeError):
            model(torch.zeros(2, 9, 16, dtype=torch.float64))
        assert torch.overrides._get_current_function_mode_stack() == []
        model(x)


@pytest.mark.parametrize("kind", [Keeping, Clamping])
def test_modules_without_a_gain_are_left_alone(x, kind):
    model = Model(kind)
    plain = step(model, x)
    scratch.convert(model)
    torch.testing.assert_close(step(model, x), plain, rtol=1e-11, atol=1e-12)
    assert watched(model) == []
    torch.testing.assert_close(step(model, x), plain, rtol=0, atol=0)


def test_kept_weights_are_exact(x):
    model = Model(Keeping)
    model(x)
    kept = model.blocks[1].attention.weights
    scratch.convert(model)
    model(x)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    torch.testing.assert_close(model.blocks[1].attention.weights + 0, kept, rtol=1e-11, atol=1e-12)


def test_scores_in_a_module_of_their_own(x):
    model = InParts()
    plain = model(x)
    scratch.convert(model)
    for _ in range(2):
        torch.testing.assert_close(model(x), plain)
    assert scratch.counts() == (2, {})
    assert watched(model) == [""]


def test_tracers_and_transforms_see_the_plain_code(x):
    model = Model()
    scratch.convert(model)
    traced = torch.jit.trace(model, x, check_trace=False)
    assert "pyattn" not in str(traced.inlined_graph)
    assert torch.func.grad(lambda x: model(x).sum())(x).shape == x.shape
    assert scratch.counts() == (0, {})


def test_explain(x, capsys):
    scratch.explain(Model(Clamping), x)
    assert capsys.readouterr().out == "(2, 4, 8, 4) x (2, 4, 8, 4), float64: left (clamp)\n" * 2


class CrossAttention(nn.Module):
    """Takes its inputs by name, as most of transformers' modules do."""

    def forward(self, *, hidden_states, memory):
        return (hidden_states @ memory.mT).softmax(-1) @ memory


def test_inputs_by_name_and_longer_memories_are_looked_at_again(x, monkeypatch):
    monkeypatch.setattr(native, "MIN_SCORES", 100)
    model = scratch.convert(CrossAttention())
    for memory, taken in ((x[:, :6], 0), (x[:, :5], 0), (x, 1), (x[:, :6], 1), (x, 2)):  # 2 x 8 x 6 scores, x 8 scores
        model(hidden_states=x, memory=memory)
        assert scratch.counts().taken == taken


class Returning(nn.Module):
    def forward(self, x):
        weights = (x @ x.mT).softmax(-1)
        return weights @ x, weights.detach()


USES = {
    "Parameter": nn.Parameter,
    "requires_grad_": lambda w: w.requires_grad_(),
    "grad_fn": lambda w: w if w.grad_fn is None and w.grad is None else None,
}


@pytest.mark.parametrize("graded", [False, True])
@pytest.mark.parametrize("use", USES)
def test_weights_without_a_gradient_that_the_first_forward_returns(x, use, graded):
    model = scratch.convert(Returning())
    with torch.set_grad_enabled(graded):
        out, weights = model(x)
        used = USES[use](weights)
    assert scratch.counts() == (1, {})
    plain = (x @ x.mT).softmax(-1).detach()
    torch.testing.assert_close(used.detach() + 0, plain)
    torch.testing.assert_close(out, plain @ x)
    if used.requires_grad:
        (used * plain).sum().backward()
        torch.testing.assert_close(used.grad + 0, plain)


def test_inputs_that_were_too_small_are_left_alone(x, monkeypatch):
    monkeypatch.setattr(native, "MIN_SCORES", 300)
    model = scratch.convert(Model())
    for _ in range(4):
        model(x[:, :5])  # 2 x 4 x 5 x 5 scores
    assert scratch.counts() == (0, {"fewer than 300 scores": 2 * 2})
    for n in range(1, 3):
        model(x)
        assert scratch.counts().taken == 2 * n


class Penalized(nn.Module):
    """Attention plus a gradient of it, taken within the forward, which makes a checkpoint compute it again there."""

    def forward(self, q, k, v):
        out = (q @ k.mT).softmax(-1) @ v
        (gradient,) = torch.autograd.grad(out.sin().sum(), q, create_graph=True)
        return out + gradient


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Penalized()

    def forward(self, *tensors):
        return checkpoint(self.inner, *tensors, use_reentrant=False)


def test_a_module_that_autograd_runs_again_within_its_forward():
    """Torch turns all modes off within autograd.grad."""
    tensors = torch.randn(3, 2, 3, 6, 4, dtype=torch.float64).requires_grad_().unbind()

    def step(module):
        out = module(*tensors)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), tensors)]

    plain = step(Checkpointed())
    model = scratch.convert(Checkpointed())
    for _ in range(3):
        torch.testing.assert_close(step(model), plain)
    assert scratch.counts().taken == 9
