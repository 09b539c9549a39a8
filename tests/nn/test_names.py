"""Promise: an argument that a module lacks is refused in one sentence that names the one with a similar spelling."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.modules import ARGUMENTS, D_IN, class_of, every_module, pair

from pyattn import nn

SIMILAR = {
    "num_kv_heads": "num_heads_kv",
    "key_range": "key_ranges",
    "masks": "mask",
    "attn_mask": "mask",
    "biases": "bias",
    "kvcache": "kv_cache",
    "need_weight": "need_weights",
    "num_head": "num_heads",
    "drop_out": "dropout",
    "windows": "window",
    "persist_mask": "persistent_mask",
}
"""Words that users write in place of some modules' arguments."""


def hint(word: str, own: list[str]) -> str:
    return f"did you mean {SIMILAR[word]}?" if SIMILAR[word] in own else ""


def names_of(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def refused(call: Callable[..., Any], name: str, own: list[str], *positional: Any, **named: Any) -> None:
    for word in ("zzzz", *SIMILAR):
        words = hint(word, own) if word in SIMILAR else f"its arguments are {', '.join(own)}"
        if words:
            message = f"pyattn: {name} has no argument {word} ({words}), got 3"
            with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
                call(*positional, **named, **{word: 3})


@every_module
def test_of_a_constructor(name):
    made = class_of(name)
    if name != "SimplifiedSelfAttention":  # it has no arguments
        home = made.__init__.__qualname__.removesuffix(".__init__")
        refused(made, home, names_of(made), *ARGUMENTS[name])


@every_module
def test_of_a_call(name):
    module, _ = pair(name)
    refused(module, type(module).forward.__qualname__, names_of(module.forward), torch.ones(2, 7, D_IN))


@pytest.mark.parametrize("size", ["small", "medium", "large", "xl"])
def test_of_a_factory(size):
    factory = getattr(nn, f"create_gpt2_{size}_attention")
    refused(factory, factory.__name__, names_of(factory))


@every_module
def test_more_by_position_than_there_are(name):
    """nn.MultiheadAttention takes query, key and value; other modules take a mask."""
    module, _ = pair(name)
    x = torch.ones(2, 7, D_IN)
    first = [p.name for p in inspect.signature(module.forward).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    message = f"pyattn: {type(module).forward.__qualname__} takes {', '.join(first)} by position and the rest by name, "
    with pytest.raises(TypeError, match=f"^{re.escape(message)}got 2 more, the first torch.Tensor of shape "):
        module(*[x] * len(first), x, x)


@every_module
def test_what_help_shows(name):
    """The actual arguments, of the constructor and of a call."""
    made = class_of(name)
    constructor = [] if name == "SimplifiedSelfAttention" else names_of(made)  # nn.Module's own
    assert not {"args", "kwargs", "positional", "named"} & {*constructor, *names_of(made.forward)}
    assert "need_weights" in names_of(made.forward)
