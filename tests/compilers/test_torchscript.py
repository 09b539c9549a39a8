"""Promise: torch.jit.trace takes every module, for all lengths; torch.jit.script refuses in one sentence."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.modules import (
    ARGUMENTS,
    D_IN,
    EXTRAS,
    WITH_EXTRAS,
    assert_same,
    class_of,
    every_module,
    output,
    set_dropout,
)
from torch import Tensor, nn

import pyattn
from pyattn import attention, attention_varlen

# torch's own warnings: it is deprecated, and it reports shape checks in Python.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


def module(name: str, **extras: Any) -> nn.Module:
    made = class_of(name)(*ARGUMENTS[name], **extras).double()
    assert isinstance(made, nn.Module)
    return made


def saved_and_loaded(traced: Any) -> Callable[..., Any]:
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    return torch.jit.load(file)


@pytest.mark.parametrize("training", [False, True])
@every_module
def test_a_trace_is_the_module_for_all_lengths(name, training):
    """In training without dropout; parameters require gradients in both modes. torch's own check runs it twice more."""
    for extras in (EXTRAS["all"],) if name in WITH_EXTRAS else ({},):
        plain = module(name, **extras).train(training)
        traced = saved_and_loaded(torch.jit.trace(plain, torch.randn(2, 6, D_IN).double(), check_trace=not training))
        for batch, seqlen in ((2, 6), (3, 9), (1, 1)):
            x = torch.randn(batch, seqlen, D_IN).double()
            found = traced(x)
            assert_same(found[0] if isinstance(found, tuple) else found, output(plain, x))


def test_a_trace_draws_dropout_anew():
    plain = module("MultiHeadAttention")
    set_dropout(plain, 0.5)
    x = torch.randn(2, 6, D_IN).double()
    traced = torch.jit.trace(plain, x, check_trace=False)  # torch's check runs it twice and gets other numbers
    torch.manual_seed(7)
    first, second = traced(x), traced(x)
    assert not torch.equal(first, second)
    torch.manual_seed(7)
    assert_same(first, plain(x))
    assert_same(second, plain(x))


def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, window=(2, 0))


def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention_varlen(q[0], k[0], v[0], *torch.tensor([[0, q.shape[1]]] * 2), 9, 9)


@pytest.mark.parametrize("function", [call, packed])
def test_a_traced_function_has_no_gradient(function):
    q, k, v = (torch.randn(2, 4, 6, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    traced = torch.jit.trace(function, (q, k, v))
    assert_same(traced(q, k, v), function(q, k, v))
    with pytest.raises(RuntimeError, match=r"derivative for pyattn::attention.*_forward is not implemented"):
        traced(q, k, v).sum().backward()


class Inside(nn.Module):
    """A user's module that contains one of ours."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Calling(nn.Module):
    """A user's module that calls the function."""

    def forward(self, x: Tensor) -> Tensor:
        return attention(x, x, x)


SENTENCE = (
    r"^pyattn: torch.jit.script cannot compile pyattn's attention; use torch.jit.trace, torch.export or torch.compile$"
)


@every_module
def test_script_refuses_modules(name):
    for made in (module(name), Inside(module(name))):
        with pytest.raises(NotImplementedError, match=SENTENCE):
            torch.jit.script(made)


@pytest.mark.parametrize(
    "face",
    [
        attention,
        call,
        Calling(),
        pyattn.parts.attention_backward,
        pyattn.parts.merge,
        *(getattr(pyattn, f"attention_{name}") for name in ("with_cache", "with_prefix", "weights", "varlen")),
    ],
)
def test_script_refuses_functions(face):
    with pytest.raises(NotImplementedError, match=SENTENCE):
        torch.jit.script(face)
