"""Promise: TorchScript compiles torch's modules while the switch is on, and the compiled code follows the switch."""

import functools
import io

import pytest
import torch
from support.adapters.gradients import with_gradients
from torch import nn

from pyattn.adapters.sdpa import counts, enabled, reset_counts

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


def by_switch(module, x, **options):
    """Results and gradients of ``x`` with the switch off and on, and how many calls it took while on."""
    function = functools.partial(module, **options)
    expected = with_gradients(function, x)
    reset_counts()
    with enabled():
        return expected, with_gradients(function, x), counts().taken


def saved_and_loaded(script):
    file = io.BytesIO()
    torch.jit.save(script, file)
    file.seek(0)
    return torch.jit.load(file)


def test_attention_compiled_under_the_switch():
    module = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    arguments = [torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)] * 3
    with enabled():
        script = torch.jit.script(module)

    def call(x, **options):
        return script(x, x, x, **options)

    for need_weights, taken in ((False, 1), (True, 0)):
        expected, found, calls = by_switch(call, arguments[0], need_weights=need_weights)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(expected[0], module(*arguments, need_weights=need_weights)[0])
        assert calls == taken


def test_an_encoder_saved_and_loaded():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    with enabled():
        script = saved_and_loaded(torch.jit.script(encoder))
    for training in (True, False):
        expected, found, taken = by_switch(script.train(training), x)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(found[0], encoder.train(training)(x))
        assert taken == 2


def test_a_trace_follows_the_switch():
    x = torch.randn(1, 2, 5, 8, dtype=torch.float64, requires_grad=True)

    def attention(x):
        return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    with enabled():
        traced = torch.jit.trace(attention, x)
    expected, found, taken = by_switch(traced, x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found[0], attention(x))
    assert taken == 1
