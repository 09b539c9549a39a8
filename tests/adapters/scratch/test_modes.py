"""Recognition beside other modes of torch and other kinds of tensors: it leaves both alone, and no mode stays on."""

import math

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from pyattn.adapters import scratch

T = 6
FUTURE = torch.ones(T, T).triu(1).bool()


class Attention(nn.Module):
    interrupted = False

    def forward(self, x):
        scores = (x @ x.mT).masked_fill(FUTURE, -math.inf)
        if self.interrupted:
            raise KeyboardInterrupt
        return scores.softmax(-1) @ x


def stack():
    return torch.overrides._get_current_function_mode_stack()


@pytest.fixture
def x():
    return torch.randn(2, 3, T, 4, generator=torch.Generator().manual_seed(0))


def test_interrupted_forwards_end_with_the_next(x):
    model = nn.Sequential(Attention(), nn.Identity(), Attention())
    plain = model(x)
    scratch.convert(model)
    model(x)
    for depth in (0, 2):
        model[depth].interrupted = True
        with pytest.raises(KeyboardInterrupt):
            model(x)
        del model[depth].interrupted
        torch.testing.assert_close(model(x), plain)
        assert stack() == []


def test_modes_may_end_in_another_order(x):
    scratch.enable()
    with torch.device("cpu"):
        scratch.disable()
        assert [type(mode).__name__ for mode in stack()] == ["DeviceContext"]
        (x @ x.mT).softmax(-1) @ x
    assert stack() == []
    assert scratch.counts() == (0, {})


def test_another_default_device(x):
    with torch.device("meta"), scratch.enabled():
        out = ((x @ x.mT).tril().masked_fill(FUTURE, -math.inf)).softmax(-1) @ x
    torch.testing.assert_close(out, Attention()(x))
    assert scratch.counts() == (1, {})


def test_forward_derivatives_within(x):
    def code():
        scores = x @ x.mT
        with forward_ad.dual_level():
            scale = forward_ad.make_dual(torch.ones(1), torch.ones(1))
            return forward_ad.unpack_dual((scores * scale).softmax(-1) @ x).tangent

    plain = code()
    with scratch.enabled():
        torch.testing.assert_close(code(), plain)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_without_values_of_their_own(x):
    meta, sparse = x.to("meta"), x[0, 0].to_sparse()
    nested = torch.nested.nested_tensor([x[0], x[1]])
    with scratch.enabled():
        assert ((meta @ meta.mT + 1).softmax(-1) @ meta).shape == x.shape
        torch.testing.assert_close(sparse @ x[0, 0].mT, x[0, 0] @ x[0, 0].mT)
        weights = (x[0, 0] @ x[0, 0].mT).softmax(-1)
        torch.testing.assert_close(weights @ sparse, (weights + 0) @ x[0, 0])
        assert (torch.softmax(nested @ nested.transpose(-2, -1), -1) @ nested).is_nested
    assert scratch.counts().taken == 0
    assert scratch.counts().left["values of torch.sparse_coo on cpu"] == 1


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
def test_functions_compiled_where_recognition_is_on(compiler):
    """They have attention there and plain code elsewhere, whichever comes first."""
    torch.compiler.reset()
    q, k, v = torch.randn(3, 2, 3, 6, 4, dtype=torch.float64).unbind()
    hidden = torch.ones(6, 6).triu(1).bool()

    def code(q, k, v):
        return (q @ k.mT).masked_fill(hidden, -torch.inf).softmax(-1) @ v

    def step(function):
        given = [x.clone().requires_grad_() for x in (q, k, v)]
        out = function(*given)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), given)]

    plain = step(code)
    compiled = torch.compile(code, backend=compiler, fullgraph=True)
    torch.testing.assert_close(step(compiled), plain)
    assert scratch.counts().taken == 0
    for _ in range(2):
        with scratch.enabled():
            torch.testing.assert_close(step(compiled), plain)
        assert scratch.counts().taken == 1
        torch.testing.assert_close(step(compiled), plain)
    torch.compiler.reset()
