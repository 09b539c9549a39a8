"""Models that are converted: results, gradients, checkpoints, copies, errors, and which modules are watched."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pyattn.adapters import scratch


class Attention(nn.Module):
    """The book's, chapter 3."""

    def __init__(self, d: int, context: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.W_query, self.W_key, self.W_value = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.out_proj = nn.Linear(d, d)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mask", torch.triu(torch.ones(context, context), diagonal=1))

    def forward(self, x):
        b, t, d = x.shape
        linears = (self.W_query, self.W_key, self.W_value)
        q, k, v = (linear(x).view(b, t, self.num_heads, -1).transpose(1, 2) for linear in linears)
        scores = q @ k.transpose(2, 3)
        scores.masked_fill_(self.mask.bool()[:t, :t], -torch.inf)
        weights = self.dropout(torch.softmax(scores / k.shape[-1] ** 0.5, dim=-1))
        return self.out_proj(self.read(weights, v).transpose(1, 2).reshape(b, t, d))

    def read(self, weights, v):
        return weights @ v


class Keeping(Attention):
    """As the Annotated Transformer does."""

    def read(self, weights, v):
        self.weights = weights
        return weights @ v


class Clamping(Attention):
    def read(self, weights, v):
        return weights.clamp(0, 0.5) @ v


class Scores(nn.Module):
    def forward(self, q, k):
        return q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])


class InParts(nn.Module):
    """Scores in a module of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = Scores()

    def forward(self, x):
        return self.scores(x, x).softmax(-1) @ x


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.norm = nn.LayerNorm(16)
        self.ff = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.ff(x)


class Model(nn.Module):
    def __init__(self, kind=Attention, reentrant: bool | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(kind(16, 8, 4, dropout)) for _ in range(2))
        self.reentrant = reentrant
        self.double()

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


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


def test_compilers_and_exporters_see_the_plain_code(x):
    model = Model()
    plain = model(x)
    scratch.convert(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), plain)
    exported = torch.export.export(model, (x,))
    assert not any("pyattn" in str(node.target) for node in exported.graph.nodes)
    traced = torch.jit.trace(model, x, check_trace=False)
    assert "pyattn" not in str(traced.inlined_graph)
    assert torch.func.grad(lambda x: model(x).sum())(x).shape == x.shape
    assert scratch.counts() == (0, {})


def test_explain(x, capsys):
    scratch.explain(Model(Clamping), x)
    assert capsys.readouterr().out == "(2, 4, 8, 4) x (2, 4, 8, 4), float64: left (clamp)\n" * 2
