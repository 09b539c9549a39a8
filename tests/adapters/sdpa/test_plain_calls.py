"""Promise: under the switch, plain calls never enter Python, and agree with all others, which do."""

import contextlib

import pytest
import torch
from support.adapters.sdpa import detached
from support.cases import assert_equal
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from pyattn import ops
from pyattn.adapters import sdpa
from pyattn.adapters.sdpa import counts, enabled

pytestmark = pytest.mark.usefixtures("nothing_counted")


@contextlib.contextmanager
def expecting(at_once, taken):
    before = ops.sdpa_calls()
    with enabled():
        yield
        assert (ops.sdpa_calls() - before, counts().taken) == (at_once, taken)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "keys", "named"),
    [
        (6, 6, {}),
        (6, 6, {"is_causal": True}),
        (3, 6, {"is_causal": True}),
        (6, 3, {"is_causal": True, "scale": 0.3}),
        (1, 6, {"scale": -2.0}),
        (5, 6, {"enable_gqa": True}),
    ],
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_plain_calls_have_the_functions_bits(dtype, rows, keys, named, mode):
    with mode():
        heads = 2 if "enable_gqa" in named else 4
        q = torch.randn(2, 4, rows, 8, dtype=dtype)
        k, v = torch.randn(2, heads, keys, 8, dtype=dtype), torch.randn(2, heads, keys, 5, dtype=dtype)
        expected = sdpa.scaled_dot_product_attention(q, k, v, **named)
        with expecting(1, 1):
            out = scaled_dot_product_attention(q, k, v, **named)
    assert_equal([out], [expected])


def test_gradients_are_the_functions():
    tensors = [t.requires_grad_() for t in detached()]
    expected = torch.autograd.grad(sdpa.scaled_dot_product_attention(*tensors, is_causal=True).square().sum(), tensors)
    with expecting(1, 1):
        out = scaled_dot_product_attention(*tensors, is_causal=True)
        assert out.requires_grad
        assert_equal(torch.autograd.grad(out.square().sum(), tensors), expected)


def under_flop_counter(q, k, v):
    with FlopCounterMode(display=False):
        return scaled_dot_product_attention(q, k, v)


def negated(q, k, v):
    return scaled_dot_product_attention(q, torch._neg_view(k), v)


OTHERS = {
    "mask": lambda q, k, v: scaled_dot_product_attention(q, k, v, torch.ones(6, 6).tril().bool()),
    "dropout": lambda q, k, v: scaled_dot_product_attention(q, k, v, dropout_p=0.5),
    "scale 0": lambda q, k, v: scaled_dot_product_attention(q, k, v, scale=0.0),
    "three dimensions": lambda q, k, v: scaled_dot_product_attention(q[0], k[0], v[0]),
    "one head of keys": lambda q, k, v: scaled_dot_product_attention(q, k[:, :1], v),
    "one batch of keys": lambda q, k, v: scaled_dot_product_attention(q, k[:1], v[:1]),
    "one head of values": lambda q, k, v: scaled_dot_product_attention(q, k, v[:, :1]),
    "flop counter": under_flop_counter,
    "negation": negated,
    "vmap": lambda q, k, v: torch.func.vmap(lambda x: scaled_dot_product_attention(x[None], k[:1], v[:1]))(q),
    "jvp": lambda q, k, v: torch.func.jvp(lambda x: scaled_dot_product_attention(x, k, v), (q,), (q,)),
}


@pytest.mark.parametrize("other", [*OTHERS])
def test_others_are_taken_by_the_rules(other):
    with expecting(0, 1):
        OTHERS[other](*detached())


@pytest.mark.parametrize(
    "call",
    [
        lambda q, k, v: scaled_dot_product_attention(q, k, v, scale=float("inf")),
        lambda q, k, v: scaled_dot_product_attention(q, k, v[:, :, :3]),
        lambda q, k, v: scaled_dot_product_attention(q, k[:, :2], v[:, :2]),
        lambda q, k, v: scaled_dot_product_attention(q[:, :3], k[:, :2], v[:, :2], enable_gqa=True),
        lambda q, k, v: scaled_dot_product_attention(q.float(), k, v),
        lambda q, k, v: scaled_dot_product_attention(q, k, v[..., :4].float()),
    ],
)
def test_refused_calls_are_torchs(call):
    with expecting(0, 0), contextlib.suppress(RuntimeError, ValueError):
        call(*detached())
    assert sum(counts().torch.values()) == 1


def test_a_backend_without_flash_attention_is_torchs():
    with expecting(0, 0), sdpa_kernel(SDPBackend.MATH):
        scaled_dot_product_attention(*detached())


def test_weights_of_modules_are_not_lost():
    """The module reads the weights of the call that its operator gets; other calls meanwhile take the rules too."""
    module, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 5, 8)
    with enabled():
        before = ops.sdpa_calls()
        _, weights = module(x, x, x)
        assert ops.sdpa_calls() == before
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 5))
        scaled_dot_product_attention(*detached())
        assert ops.sdpa_calls() == before + 1
