"""Promise: help(), editors and type checkers show every option of a function, its default and its meaning."""

import inspect
from collections.abc import Callable

import pytest
import stub
import torch
from support.assertions import refused

import pyattn
from pyattn.options import Options
from pyattn.options.attention_options import OPTIONS
from pyattn.options.schema import DEFAULTS
from pyattn.parts import attention_backward

FUNCTIONS = [
    pyattn.attention,
    pyattn.attention_varlen,
    pyattn.attention_weights,
    pyattn.attention_with_cache,
    pyattn.attention_with_prefix,
    attention_backward,
]

each_function = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)


def test_options_are_those_of_the_operators() -> None:
    """The operators take two more arguments: the offsets of each sequence, and dropout's origins."""
    assert [*Options._fields] == [*DEFAULTS]
    assert OPTIONS.keys() | {"q_offsets", "dropout_origins"} == DEFAULTS.keys()
    for name, op in (("attention_backward", 8), ("attention_varlen_forward", 8), ("attention_paged_forward", 5)):
        arguments = getattr(torch.ops.pyattn, name).default._schema.arguments[op:]
        assert [a.name for a in arguments][: len(DEFAULTS)] == [*DEFAULTS]


@each_function
def test_help_shows_every_option(function: Callable[..., object]) -> None:
    parameters = inspect.signature(function).parameters
    for name, option in OPTIONS.items():
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[name].default == DEFAULTS[name]
        assert f" {name}: {option.meaning} " in " ".join(str(function.__doc__).split())
    assert not {"options", "positional"} & parameters.keys()


def test_editors_show_the_same() -> None:
    assert stub.STUB.read_text() == stub.stub(), "python tests/tools/stub.py writes it"


Q = torch.randn(1, 2, 5, 4)
CUT = *[Q[:, :, 2:]] * 2, *[Q[:, :, :2]] * 2
ALL_BUT_PACKED: dict[str, Callable[..., object]] = {
    "attention": lambda **options: pyattn.attention(Q, Q, Q, **options),
    "attention_weights": lambda **options: pyattn.attention_weights(Q, Q, **options),
    "attention_with_cache": lambda **options: pyattn.attention_with_cache(Q, filled(), **options),
    "attention_with_prefix": lambda **options: pyattn.attention_with_prefix(Q, *CUT, **options),
    "attention_backward": lambda **options: attention_backward(Q, Q, Q, Q, Q, Q[..., 0], **options),
}


def filled() -> pyattn.KVCache:
    cached = pyattn.KVCache(1, 2, 5, 4)
    cached.append(Q, Q)
    return cached


@pytest.mark.parametrize("function", ALL_BUT_PACKED)
@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"causal": torch.ones(2)}, TypeError, "causal must be bool, got torch.Tensor of shape (2,)"),
        ({"dropout_p": torch.ones(2)}, TypeError, "dropout_p must be int or float, got torch.Tensor of shape (2,)"),
        ({"dropout_p": 1.5}, ValueError, "dropout_p must be at least 0 and below 1, got 1.5"),
        ({"sinks": torch.zeros(2, device="meta")}, ValueError, "sinks must be on q's device, got meta and cpu"),
        ({"bias": torch.zeros(5, 5).to_sparse()}, NotImplementedError, "bias must be a dense tensor"),
        ({"bias": torch.ones(5, 5) > 0}, TypeError, "bias must be float, added to the scores (use mask for a bool"),
        ({"mask": torch.ones(5, 5)}, TypeError, "mask must have dtype bool, got float32"),
    ],
    ids=["causal", "dropout_p", "dropout_p above 1", "sinks", "bias", "bool bias", "float mask"],
)
def test_every_function_refuses_the_same(
    function: str, options: dict[str, object], kind: type[Exception], message: str
) -> None:
    with refused(kind, message):
        ALL_BUT_PACKED[function](**options)
