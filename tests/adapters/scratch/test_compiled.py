"""The same recognition in graphs of torch.compile, where no value is known and sizes may be symbols."""

import copy
import math
from importlib.metadata import entry_points

import pytest
import torch
from support.adapters.compiled_graphs import attention_calls, replacing
from support.adapters.written import Attention, Block, Clamping, Model
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pyattn.adapters import scratch
from pyattn.adapters.scratch import graphs

INF = math.inf


pytestmark = pytest.mark.usefixtures("fresh")


@pytest.fixture
def found(monkeypatch):
    """How many calls of attention each compiled graph has, those of checkpoints by themselves, too."""
    counts = []
    replaced = graphs.replaced

    def counting(graph):
        made = replaced(graph)
        counts.append(attention_calls(made))
        return made

    monkeypatch.setattr(graphs, "replaced", counting)
    return counts


def eager(graph, inputs):
    return graphs.replaced(graph).forward


aot = replacing()


def step(function, x):
    out = function(x)
    return out, *torch.autograd.grad(out.square().sum(), x)


@pytest.fixture
def x():
    return torch.randn(2, 8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
def test_a_converted_model(x, found, compiler):
    model = Model()
    plain = step(model, x)
    compiled = torch.compile(scratch.convert(model), backend=compiler, fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(step(compiled, x), plain, rtol=1e-11, atol=1e-12)
    assert found == [2]
    scratch.revert(model)
    torch.testing.assert_close(step(compiled, x), plain, rtol=1e-11, atol=1e-12)
    assert found == [2]


class Broken(Attention):
    """Dynamo can't trace its print, so it compiles what comes before and after it by themselves."""

    def read(self, weights, v):
        print(end="")
        return (v @ v.mT).softmax(-1) @ super().read(weights, v)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo's own, where a graph breaks
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("way", ["function", "method", "part", "printing", "printing part"])
def test_a_module_by_itself(x, found, compiler, way):
    """Its hooks run before and after its graph, as those of a part of a model in which the graph breaks."""
    torch.manual_seed(0)
    module = (Broken if "printing" in way else Attention)(16, 8, 4).double()
    model = scratch.convert(Block(module).double() if "part" in way else module)
    if "part" in way:
        model(x)
    plain = step(scratch.revert(copy.deepcopy(model)), x)
    compiled = torch.compile(model, backend=compiler)
    if way == "method":
        model.compile(backend=compiler)
        compiled = model
    for _ in range(3):
        torch.testing.assert_close(step(compiled, x), plain, rtol=1e-11, atol=1e-12)
        assert torch.overrides._get_current_function_mode_stack() == []
    assert sum(found) == 1
    scratch.revert(model)
    torch.testing.assert_close(step(compiled, x), plain, rtol=1e-11, atol=1e-12)
    assert sum(found) == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_errors_leave_no_mode_behind(x, found):
    model = scratch.convert(Attention(16, 8, 4).double())
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        with pytest.raises(RuntimeError):
            compiled(x[..., :7])
        assert torch.overrides._get_current_function_mode_stack() == []
        torch.testing.assert_close(compiled(x), model(x))
    assert sum(found) == 1


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_checkpoints(x, found, compiler, reentrant):
    plain, model = step(Model(), x), Model(reentrant=reentrant)
    compiled = torch.compile(scratch.convert(model), backend=compiler, fullgraph=True)
    torch.testing.assert_close(step(compiled, x), plain, rtol=1e-11, atol=1e-12)
    assert found == [1, 1, 2]


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_checkpoints_repeat_dropout(found, compiler):
    """The result is linear in the values, so their gradient times them is its sum, if both have the same dropout."""
    q, k, v = torch.randn(3, 2, 4, 8, 4, dtype=torch.float64).unbind()
    function = lambda q, k, v: functional.dropout((q @ k.mT).softmax(-1), 0.5) @ v  # noqa: E731
    code = lambda *x: checkpoint(function, *x, use_reentrant=False)  # noqa: E731
    out = torch.compile(code, backend=replacing(compiler), fullgraph=True)(q, k, v.requires_grad_())
    (gradient,) = torch.autograd.grad(out.sum(), v)
    torch.testing.assert_close((gradient * v).sum(), out.sum())
    assert found == [1, 1]


def test_sizes_that_are_symbols(found):
    plain = nn.Sequential(Attention(16, 8, 4)).double()
    model = scratch.convert(copy.deepcopy(plain))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for batch, seqlen in ((3, 5), (2, 7), (5, 6), (6, 7)):
        x = torch.randn(batch, seqlen, 16, dtype=torch.float64, requires_grad=True)
        torch.testing.assert_close(step(compiled, x), step(plain, x), rtol=1e-11, atol=1e-12)
    assert 1 <= len(found) < 4
    assert set(found) == {1}


def test_the_backend_is_registered():
    (entry,) = entry_points(group="torch_dynamo_backends", name="pyattn")
    assert entry.load() is graphs.backend


def test_the_backend(x, found):
    q = x.detach().view(2, 8, 4, 4).transpose(1, 2)
    code = lambda q: (q @ q.mT / 2).softmax(-1) @ q  # noqa: E731
    torch.testing.assert_close(torch.compile(code, backend=graphs.backend, fullgraph=True)(q), code(q))
    assert found == [1]


FUTURE = torch.ones(8, 8).triu(1).bool()
BLIND = torch.ones(8, 8).triu(0).bool()


def changed_afterwards(q):
    bias = q[..., :1].detach() * 1
    out = (q @ q.mT + bias).softmax(-1) @ q
    bias.mul_(3)
    return out + bias


def changed_between(q):
    bias = q[..., :1].detach() * 1
    scores = q @ q.mT + bias
    bias.mul_(3)
    return scores.softmax(-1) @ q + bias


CODES = {
    "einsum": lambda q: torch.einsum("bhqk,bkhd->bqhd", (torch.einsum("bqhd,bkhd->bhqk", q, q) / 2).softmax(-1), q),
    "einsum of lists": lambda q: torch.einsum(
        "bhqk,bkhd->bqhd", [torch.einsum("bqhd,bkhd->bhqk", [q, q]).softmax(-1), q]
    ),
    "divided by a tensor": lambda q: (q @ q.mT / torch.sqrt(torch.tensor(4.0))).softmax(-1) @ q,
    "divided by a learned temperature": lambda q: (q @ q.mT / q[0, 0, 0, 0].exp()).softmax(-1) @ q,
    "a bias": lambda q: (q @ q.mT + q[..., :1]).softmax(-1) @ q,
    "a mask of -inf": lambda q: (q @ q.mT + torch.zeros(4, 4).masked_fill(FUTURE[:4, :4], -INF)).softmax(-1) @ q,
    "a row of -inf": lambda q: (q @ q.mT).masked_fill(BLIND[:4, :4], -INF).softmax(-1) @ q,
    "a float mask with a row of -inf": lambda q: (
        (q @ q.mT + torch.zeros(4, 4).masked_fill(BLIND[:4, :4], -INF)).softmax(-1) @ q
    ),
    "where": lambda q: torch.where(~FUTURE[:4, :4], q @ q.mT, -INF).softmax(-1) @ q,
    "where with a number first": lambda q: torch.where(FUTURE[:4, :4], -1e9, q @ q.mT).softmax(-1) @ q,
    "where by a method": lambda q: (q @ q.mT).where(~FUTURE[:4, :4], -INF).softmax(-1) @ q,
    "where with a tensor": lambda q: torch.where(~FUTURE[:4, :4], q @ q.mT, torch.tensor(-1e9)).softmax(-1) @ q,
    "a fill with a tensor": lambda q: (q @ q.mT).masked_fill(FUTURE[:4, :4], torch.tensor(-1e9)).softmax(-1) @ q,
    "values from the left": lambda q: q.mT @ (q @ q.mT).softmax(-1).mT,
    "times -2": lambda q: (-(q @ q.mT) * 2 + q[..., :1]).softmax(-1) @ q,
    "a bias that changes afterwards": changed_afterwards,
    "softcap": lambda q: (torch.tanh(q @ q.mT / 5) * 5).softmax(-1) @ q,
    "folded heads": lambda q: torch.bmm(torch.bmm(q.flatten(0, 1), q.flatten(0, 1).mT).softmax(-1), q.flatten(0, 1)),
    "baddbmm by names": lambda q: torch.bmm(
        q.flatten(0, 1)[..., :1]
        .baddbmm(batch1=q.flatten(0, 1), batch2=q.flatten(0, 1).mT, beta=0.5, alpha=0.25)
        .softmax(-1),
        q.flatten(0, 1),
    ),
    "matmul by names": lambda q: torch.matmul(other=q, input=torch.matmul(input=q, other=q.mT).softmax(-1)),
    "a finite fill": lambda q: (q @ q.mT).masked_fill(FUTURE[:4, :4], -1e9).softmax(-1) @ q,
    "in place": lambda q: (q @ q.mT).masked_fill_(FUTURE[:4, :4], -INF).softmax(-1) @ q,
    "a fill and a sum": lambda q: (q @ q.mT + q[..., :1]).masked_fill(FUTURE[:4, :4], -1e9).softmax(-1) @ q,
    "nan_to_num": lambda q: (q @ q.mT).masked_fill(FUTURE[:4, :4], -INF).softmax(-1).nan_to_num() @ q,
}


def hooked(x):
    x.register_hook(lambda g: 2 * g)
    return x


LEFT = {
    "a hook on scores": lambda q: hooked(q @ q.mT).softmax(-1) @ q,
    "a hook on weights": lambda q: hooked((q @ q.mT).softmax(-1)) @ q,
    "a bias that changes between": changed_between,
    "clamp": lambda q: (q @ q.mT).clamp(-1, 1).softmax(-1) @ q,
    "weights returned by themselves": lambda q: (lambda w: (w @ q, w))((q @ q.mT).softmax(-1)),
    "weights returned": lambda q: (lambda w: (w @ q).sum() + w)((q @ q.mT).softmax(-1)),
}


@pytest.mark.parametrize("compiler", [eager, aot])
@pytest.mark.parametrize("name", [*CODES, *LEFT])
def test_code(x, found, name, compiler):
    q = x.detach().view(2, 8, 4, 4).float().requires_grad_()
    code = (CODES | LEFT)[name]
    plain = code(q)
    out = torch.compile(code, backend=compiler, fullgraph=True)(q)
    torch.testing.assert_close(out, plain, equal_nan=True)
    sums = (sum(x.square().sum() for x in (y if isinstance(y, tuple) else (y,))) for y in (out, plain))
    ours, theirs = (torch.autograd.grad(y, q)[0] for y in sums)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, equal_nan=True)
    assert found == [int(name in CODES)]
    assert scratch.counts().taken == found[0]


def test_dropout_draws_anew(found):
    q = torch.randn(2, 4, 16, 8)
    code = lambda q: functional.dropout((q @ q.mT).softmax(-1), 0.5) @ q  # noqa: E731
    compiled = torch.compile(code, backend=aot, fullgraph=True)
    first, second = compiled(q), compiled(q)
    assert found == [1]
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    first = compiled(q)
    torch.manual_seed(1)
    torch.testing.assert_close(compiled(q), first, rtol=0, atol=0)


def test_what_is_left_compiles(x, found):
    model = scratch.convert(Model(Clamping))
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), model(x))
    assert found == [0]


def test_a_part_that_is_compiled(x):
    """A compiled module in a model that is not."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            inner = scratch.convert(nn.Sequential(Attention(16, 8, 4)).double())
            self.inner = torch.compile(inner, backend="aot_eager")

        def forward(self, x):
            return self.inner(x) + 1

    model = Outer()
    plain = model(x)
    scratch.convert(model)
    for _ in range(3):
        torch.testing.assert_close(model(x), plain, rtol=1e-11, atol=1e-12)
