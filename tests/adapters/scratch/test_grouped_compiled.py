"""Grouped heads in graphs of torch.compile: read once a group, if the graph proves it and nobody reads the copies."""

import pytest
import torch
from support.adapters.compiled_graphs import replacing
from support.adapters.groups import SIZE, B, D, G, H, T, attention, inputs, repeated
from torch import Tensor, nn

from pyattn.adapters import scratch
from pyattn.adapters.scratch import native
from tests.adapters.scratch.test_grouped import OTHERS, REPEATED

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.fixture
def sizes(monkeypatch):
    """How many heads share keys and values in each call of attention of a compiled graph."""
    found, attend = [], native.attend

    def noting(chain, v, dtype, masks, size=0):
        found.extend([size] if size else [])
        return attend(chain, v, dtype, masks, size or 1)

    monkeypatch.setattr(native, "attend", noting)
    return found


aot = replacing()


def results(code, grad=True):
    tensors = inputs()
    with torch.set_grad_enabled(grad):
        out = code(*tensors)
        out = out if isinstance(out, tuple) else (out,)
        if not grad:
            return [*out]
        return [*(x.detach() for x in out), *torch.autograd.grad(sum(x.sin().sum() for x in out), tensors)]


def same(code, grad=True):
    ours = results(torch.compile(code, backend=aot, fullgraph=True), grad)
    torch.testing.assert_close(ours, results(code, grad), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", REPEATED)
def test_taken_back(name, grad, sizes):
    same(lambda q, k, v: attention(q, REPEATED[name](k), REPEATED[name](v)), grad)
    assert set(sizes) == {SIZE}


@pytest.mark.parametrize(
    "name", [name for name in OTHERS if name not in ("counts", "changed unseen", "changed by name")]
)
def test_not_taken_back(name, sizes):
    same(lambda q, k, v: attention(q, OTHERS[name](k), OTHERS[name](v)))
    assert set(sizes) == {1}


def read_again(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    k = repeated(k)
    return attention(q, k, repeated(v)), k


def hooked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k = repeated(k)
    k.register_hook(lambda g: g * torch.arange(H)[:, None, None])
    return attention(q, k, repeated(v))


def test_copies_that_are_read_again(sizes):
    """Their gradient may be read, too."""
    same(read_again)
    assert set(sizes) == {1}


def test_two_products_of_one_copy(sizes):
    def code(q, k, v):
        k, v = repeated(k), repeated(v)
        return attention(q, k, v), attention(q.sin(), k, v)

    same(code)
    assert set(sizes) == {SIZE}


def test_hooks_on_copies(sizes):
    same(hooked)
    assert set(sizes) == {1}


class Grouped(nn.Module):
    def forward(self, q, k, v):
        return attention(q, repeated(k), repeated(v))


@pytest.mark.parametrize("dynamic", [False, True])
def test_converted_models(sizes, dynamic):
    model = nn.Module()
    model.inner = Grouped()
    model.forward = lambda *x: model.inner(*x) + 1
    compiled = torch.compile(scratch.convert(model), backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for batch in (B, B + 1):
        tensors = [torch.randn(batch, n, T, D, dtype=torch.float64) for n in (H, G, G)]
        torch.testing.assert_close(compiled(*tensors), model(*tensors))
    assert set(sizes) == {SIZE}
