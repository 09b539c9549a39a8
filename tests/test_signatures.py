"""Promise: help(), editors and type checkers show every option of a function, its default and what it means."""

import inspect
from collections.abc import Callable

import pytest
import stub
import torch

import pyattn
from pyattn.options import DEFAULTS, OPTIONS, Options
from pyattn.parts import attention_backward

FUNCTIONS = [
    pyattn.attention,
    pyattn.attention_varlen,
    pyattn.attention_weights,
    pyattn.attention_with_cache,
    attention_backward,
]

each_function = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)


def test_options_are_those_of_the_operators() -> None:
    """The operators take the offsets of each sequence apart."""
    assert [*Options._fields] == [*DEFAULTS]
    assert OPTIONS.keys() | {"q_offsets"} == DEFAULTS.keys()
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


def test_none_stands_for_a_default() -> None:
    q = torch.randn(1, 2, 5, 4)
    none = {name: None for name in OPTIONS if name != "causal"}
    assert torch.equal(pyattn.attention(q, q, q, **none), pyattn.attention(q, q, q))
