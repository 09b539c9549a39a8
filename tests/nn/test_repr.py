"""Promise: repr of a module shows its constructor's arguments, and leaves defaults out."""

import inspect
from typing import Any

import pytest
import torch
from support.modules import ARGUMENTS, D_IN, EXTRAS, WITH_EXTRAS, class_of, every_module

from pyattn import nn

BY_CHILDREN: dict[str, Any] = {
    "d_in": lambda value: f"in_features={value}",
    "d_out": lambda value: f"out_features={value}",
    "embed_dim": lambda value: f"in_features={value}",
    "d_model": lambda value: f"in_features={value}",
    "hidden_size": lambda value: f"in_features={value}",
    "attention_bias": lambda value: "bias=True",
    "d_k": lambda value: f"out_features={value}",
    "dropout": lambda value: f"(dropout): Dropout(p={value}",
    "qkv_bias": lambda value: "bias=True",
    "dtype": lambda value: "",
}
"""Arguments that inner modules may show in place of the module. No module of torch shows its dtype."""

OTHERS = {"dropout": 0.25, "trace_shapes": True, "need_weights": False, "persistent_mask": False, "num_heads_kv": 1}
OTHERS |= EXTRAS["all"]


@every_module
def test_every_argument_is_shown(name):
    """None of them has its default value here."""
    parameters = inspect.signature(class_of(name)).parameters
    bound = inspect.signature(class_of(name)).bind(*ARGUMENTS[name])
    given = bound.arguments | {key: value for key, value in OTHERS.items() if key in parameters}
    text = repr(class_of(name)(**given))
    for key, value in given.items():
        of_children = BY_CHILDREN.get(key, lambda value: "no module within shows it")(value)
        assert f"{key}={value!r}" in text or of_children in text, key


@every_module
def test_defaults_are_left_out(name):
    text = repr(class_of(name)(*ARGUMENTS[name]))
    for key in ("persistent_mask", "num_heads_kv", "window", "softcap", "alibi", "sinks", "rotary", "trace_shapes"):
        assert f"{key}=" not in text
    assert "None" not in text


@pytest.mark.parametrize("name", WITH_EXTRAS)
def test_a_line_for_the_eye(name):
    module = class_of(name)(*ARGUMENTS[name], window=(255, 0), sinks=True, rotary=10000.0)
    options = "window=(255, 0), sinks=True, rotary=10000.0"
    own = {
        "MultiHeadAttention": "num_heads=2, context_length=19",
        "Attention": "num_heads=3",
        "GroupedQueryAttention": "num_heads=4, num_kv_groups=2",
    }
    assert module.extra_repr() == f"{own[name]}, {options}"
    assert str(torch.nn.Sequential(module)).count(options) == 1


def test_it_follows_the_module():
    """A value changed after construction is shown as it is now."""
    module = nn.MultiHeadAttention(D_IN, 8, 6, 0.0, 2)
    module.window, module.persistent_mask = (3, 0), True
    assert module.extra_repr() == "num_heads=2, context_length=6, persistent_mask=True, window=(3, 0)"
