"""Checkpoints, which compute attention again in backward: both times pyattn's, with the same dropout."""

import contextlib
import gc
import math
import weakref

import pytest
import torch
from support.adapters.written import Attention, Clamping, Keeping, Model
from torch import nn
from torch.nn import functional
from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import checkpoint

from pyattn.adapters import scratch

B, H, T, D = 2, 2, 6, 4
FUTURE = torch.ones(T, T).triu(1).bool()


def attend(q, k, v, dropout=0.0):
    return functional.dropout((q @ k.mT / 2).masked_fill(FUTURE, -math.inf).softmax(-1), dropout) @ v


def first_of_both(x):
    return x[:, :1].repeat_interleave(2, 1)


class Own(torch.autograd.Function):
    """A checkpoint that a user has written."""

    @staticmethod
    def forward(ctx, function, *tensors):
        ctx.function, ctx.state = function, torch.get_rng_state()
        ctx.save_for_backward(*tensors)
        return function(*tensors)

    @staticmethod
    def backward(ctx, gradient):
        tensors = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad(), torch.random.fork_rng():
            torch.set_rng_state(ctx.state)
            out = ctx.function(*tensors)
        return None, *torch.autograd.grad(out, tensors, gradient)


def called(function, *args):
    return function(*args)


def reentrant(function, *args):
    return checkpoint(function, *args, use_reentrant=True)


def saving_inputs(function, *args):
    return checkpoint(function, *args, use_reentrant=False)


def to_the_end(function, *args):
    with checkpoints.set_checkpoint_early_stop(False):
        return checkpoint(function, *args, use_reentrant=False)


KINDS = {"reentrant": reentrant, "not reentrant": saving_inputs, "to the end": to_the_end}


def nested(run, q, k, v):
    def outer(q, k, v):
        return run(lambda *x: attend(*x, 0.3).tanh(), q, k, v) + attend(v, q, k, 0.2)

    return run(outer, q, k, v)


def groups_within(run, q, k, v):
    return run(lambda q, k, v: attend(q, first_of_both(k), first_of_both(v)).tanh(), q, k, v)


def weights_too(run, q, k, v):
    def function(q, k, v):
        weights = (q @ k.mT).softmax(-1)
        return weights, weights @ v

    weights, out = run(function, q, k, v)
    return out + weights.mean()


def saved_elsewhere(run, q, k, v):
    def function(q, k, v):
        with torch.autograd.graph.save_on_cpu():
            out = attend(q, k, v)
        return out.tanh()

    return run(function, q, k, v)


TAKEN = {
    "attention": lambda run, q, k, v: run(attend, q, k, v),
    "dropout": lambda run, q, k, v: run(attend, q, k, v, 0.4),
    "code after it": lambda run, q, k, v: run(lambda *x: attend(*x, 0.4).tanh(), q, k, v),
    "one after another": lambda run, q, k, v: run(attend, run(attend, q, k, v, 0.1), k, v, 0.2),
    "two in one": lambda run, q, k, v: run(lambda *x: attend(attend(*x, 0.1), *x[1:], 0.2), q, k, v),
    "nested": nested,
    "groups of heads repeated within": groups_within,
    "groups of heads repeated before": lambda run, q, k, v: run(attend, q, first_of_both(k), first_of_both(v)),
    "weights too": weights_too,
    "saved elsewhere": saved_elsewhere,
}

LEFT = {
    "clamp": lambda run, q, k, v: run(lambda q, k, v: (q @ k.mT).clamp(-1, 1).softmax(-1) @ v, q, k, v),
    "scores of before": lambda run, q, k, v: run(lambda s, v: (s.softmax(-1) @ v).tanh(), q @ k.mT, v),
    "weights of before": lambda run, q, k, v: run(lambda w, v: (w @ v).tanh(), (q @ k.mT).softmax(-1), v),
    "weights of within": lambda run, q, k, v: run(lambda q, k: (q @ k.mT).softmax(-1), q, k) @ v,
}


class Module(nn.Module):
    def __init__(self, code, run) -> None:
        super().__init__()
        self.code, self.run = code, run

    def forward(self, q, k, v):
        return self.code(self.run, q, k, v)


def drawn():
    numbers = torch.randn(3, B, H, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return [x.clone().requires_grad_() for x in numbers]


def results(code, run, way, steps=1):
    """The result and the gradients of the last of some steps, with recognition in one of two ways."""
    module = Module(code, run)
    if way == "convert":
        scratch.convert(module)
    for _ in range(steps):
        inputs = drawn()
        torch.manual_seed(7)
        with scratch.enabled() if way.startswith("enabled") else contextlib.nullcontext():
            out = module(*inputs)
            if way == "enabled, backward too":
                out.square().sum().backward()
        if way != "enabled, backward too":
            out.square().sum().backward()
    return [out.detach() + 0, *(x.grad for x in inputs)]


WAYS = ["enabled", "enabled, backward too", "convert"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TAKEN)
def test_taken(name, kind, way):
    truth = results(TAKEN[name], called, way)
    once = scratch.counts().taken
    scratch.reset_counts()
    for steps in (1, 2):
        torch.testing.assert_close(results(TAKEN[name], KINDS[kind], way, steps), truth, rtol=1e-11, atol=1e-12)
    again = once * 2 if name != "nested" else once * 2 + 1  # the inner one is computed three times
    assert scratch.counts() == (3 * again, {})
    assert torch.overrides._get_current_function_mode_stack() == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LEFT)
def test_left(name, kind, way):
    truth = results(LEFT[name], called, "plain")
    scratch.reset_counts()
    ours = results(LEFT[name], KINDS[kind], way, 2)
    torch.testing.assert_close(ours, truth, rtol=1e-11, atol=1e-12)
    assert scratch.counts().taken == 0


@pytest.mark.parametrize("way", WAYS)
def test_functions_that_compute_it_again(way):
    """The same dropout both times, which is torch's."""
    own = lambda function, *args: Own.apply(function, *args)  # noqa: E731
    code = lambda run, q, k, v: run(lambda *x: attend(*x, 0.4), q, k, v)  # noqa: E731
    ours = results(code, own, way, 2)
    torch.testing.assert_close(ours, results(code, called, "plain"), rtol=1e-11, atol=1e-12)
    assert scratch.counts().taken == 0


class Outer(nn.Module):
    """A module in such a checkpoint."""

    def __init__(self, dropout) -> None:
        super().__init__()
        self.inner = Module(lambda run, *x: attend(*x, dropout), called)

    def forward(self, q, k, v):
        return Own.apply(self.inner, q, k, v)


def test_converted_modules_in_functions_that_compute_them_again():
    model = scratch.convert(Outer(0.4))
    truth = results(lambda run, *x: attend(*x, 0.4), called, "convert")
    scratch.reset_counts()
    for n in range(1, 4):
        inputs = drawn()
        torch.manual_seed(7)
        out = model(*inputs)
        out.square().sum().backward()
        torch.testing.assert_close([out.detach(), *(x.grad for x in inputs)], truth, rtol=1e-11, atol=1e-12)
        assert scratch.counts() == (2 * n, {})


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_within_checkpoints(kind):
    """Operators before the block are plain code both times."""

    def function(q, k, v):
        x = attend(q, k, v)
        with scratch.enabled():
            return attend(x, k, v, 0.4).tanh()

    code = lambda run, *x: run(function, *x)  # noqa: E731
    truth = results(code, called, "plain")
    assert scratch.counts() == (1, {})
    torch.testing.assert_close(results(code, KINDS[kind], "plain"), truth, rtol=1e-11, atol=1e-12)
    assert scratch.counts() == (3, {})


@pytest.mark.parametrize("where", ["around the model", "around its blocks", "around the product with the values"])
@pytest.mark.parametrize("kind", [Attention, Keeping, Clamping])
@pytest.mark.parametrize("again", [True, False])
def test_models_while_recognition_learns_what_to_watch(again, kind, where):
    """Steps draw dropout as recognized or as plain code, but backward as forward, also the first."""

    def step(model, run=called):
        torch.manual_seed(3)
        model.zero_grad()
        x = torch.randn(2, 8, 16, dtype=torch.float64).requires_grad_()
        out = run(model, x)
        out.square().sum().backward()
        return [out.detach() + 0, x.grad, *(p.grad for p in model.parameters())]

    run = (lambda f, *x: checkpoint(f, *x, use_reentrant=again)) if where == "around the model" else called
    known = [step(scratch.convert(Model(kind, dropout=0.3))), step(Model(kind, dropout=0.3))]
    model = Model(kind, again if where == "around its blocks" else None, 0.3)
    if where == "around the product with the values":
        for block in model.blocks:
            block.attention.read = lambda *x, read=block.attention.read: checkpoint(read, *x, use_reentrant=again)
    scratch.convert(model)
    for _ in range(3):
        ours = step(model, run)
        truth = next(x for x in known if torch.allclose(x[0], ours[0], rtol=1e-9))
        torch.testing.assert_close(ours, truth, rtol=1e-9, atol=1e-10)


class Packer:
    __slots__ = ()

    def __call__(self, x):
        return x


def test_hooks_that_have_no_weak_references():
    with torch.autograd.graph.saved_tensors_hooks(Packer(), Packer()):
        ours = results(TAKEN["attention"], called, "enabled")
    torch.testing.assert_close(ours, results(TAKEN["attention"], called, "plain"), rtol=1e-11, atol=1e-12)
    assert scratch.counts() == (1, {})


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_a_checkpoint_is_kept(kind):
    numbers = torch.randn(3, B, H, T, D, requires_grad=True)
    scratch.enable()
    q, k, v = (numbers * 1).unbind()
    out = groups_within(KINDS[kind], q, k, v)
    out.sum().backward()
    kept = [weakref.ref(x) for x in (q, k, v, out)]
    del q, k, v, out
    gc.collect()
    try:
        assert [ref() for ref in kept] == [None] * 4
    finally:
        scratch.disable()


def test_an_unknown_checkpoint_of_torch_is_left(monkeypatch):
    """Another version of torch may keep what it computes again somewhere else."""
    from pyattn.adapters.scratch import checkpoints as ours

    monkeypatch.setattr(ours, "_local", lambda frame, name: None)
    for kind in KINDS.values():
        results(TAKEN["dropout"], kind, "enabled")
    assert scratch.counts().taken == 0
    assert sum(scratch.counts().left.values()) == 3
