"""Promise: state dicts hold a long context's mask only on request, and load strictly with and without it."""

import inspect
import re
from typing import Any

import pytest
import torch
from support.modules import ARGUMENTS, CONTEXT_LENGTH, D_IN, class_of, output

from pyattn import nn, reference

LONG = 2049
"""One more than the longest context whose mask is written by default."""


def mask_keys(module: torch.nn.Module) -> list[str]:
    return [key for key in module.state_dict() if key.endswith("mask")]


WITH_MASK = [name for name, arguments in ARGUMENTS.items() if mask_keys(class_of(name, reference)(*arguments))]
each_module = pytest.mark.parametrize("name", WITH_MASK)


def made(name: str, context_length: int, home: Any = nn, **options: Any) -> torch.nn.Module:
    arguments = (context_length if x == CONTEXT_LENGTH else x for x in ARGUMENTS[name])
    return class_of(name, home)(*arguments, **options)


def test_who_takes_the_keyword():
    takes = [name for name in ARGUMENTS if "persistent_mask" in inspect.signature(class_of(name)).parameters]
    assert takes == WITH_MASK
    assert len(takes) == 8


@each_module
@pytest.mark.parametrize(
    ("context_length", "asked", "written"),
    [(2048, None, True), (LONG, None, False), (6, True, True), (LONG, True, True), (6, False, False)],
)
def test_when_it_is_written(name, context_length, asked, written):
    with torch.device("meta"):
        module = made(name, context_length, persistent_mask=asked)
        assert bool(mask_keys(module)) == written
        twin = made(name, context_length, persistent_mask=asked)
        assert twin.load_state_dict(module.state_dict(), strict=True, assign=True)


@each_module
def test_long_states_go_both_ways(name):
    x = torch.randn(1, 5, D_IN)
    plain, usual, asked = made(name, LONG, reference), made(name, LONG), made(name, LONG, persistent_mask=True)
    for module in (usual, asked):
        module.load_state_dict(plain.state_dict(), strict=True)
        torch.testing.assert_close(output(module, x), output(plain, x))
    assert not mask_keys(usual), "a mask that was loaded is not a request to write one"
    assert list(asked.state_dict()) == list(plain.state_dict())
    back = made(name, LONG, reference)
    back.load_state_dict(asked.state_dict(), strict=True)
    for module in (asked, made(name, LONG), made(name, LONG, persistent_mask=False)):
        module.load_state_dict(usual.state_dict(), strict=True)
        module.load_state_dict(asked.state_dict(), strict=True)
        assert torch.equal(output(module, x), output(usual, x))
    assert mask_keys(asked), "a state without one takes back no request"


@each_module
@pytest.mark.parametrize("asked", [None, False, True])
def test_a_mask_that_is_there_is_checked(name, asked):
    module = made(name, LONG, persistent_mask=asked)
    state = made(name, LONG, persistent_mask=True).state_dict()
    key = next(key for key in state if key.endswith("mask"))
    shape = f"pyattn: {key} must have shape ({LONG}, {LONG}), got (6, 6)"
    with pytest.raises(RuntimeError, match=re.escape(shape)):
        module.load_state_dict(state | {key: torch.ones(6, 6).triu(1)})
    with pytest.raises(RuntimeError, match=re.escape(f"pyattn: {key} must be the causal mask")):
        module.load_state_dict(state | {key: torch.zeros(LONG, LONG)})


@pytest.mark.parametrize(("asked", "written"), [(None, True), (True, True), (False, False)])
def test_an_assigned_mask_is_written(asked, written):
    """No constructor argument can express it, so it is written for long contexts too."""
    module = made("MultiHeadAttention", LONG, persistent_mask=asked)
    module.load_state_dict(made("MultiHeadAttention", LONG).state_dict(), strict=True)
    module.mask = torch.zeros(LONG, LONG)
    assert ("mask" in module.state_dict()) == written


@pytest.mark.parametrize("value", [False, True])
def test_the_attribute_reaches_a_mask_that_was_assigned(value):
    """Set before or after the attribute, and however the buffer was assigned."""
    for register in (False, True):
        for before in (False, True):
            module = made("MultiHeadAttention", 6, persistent_mask=value if before else not value)
            if register:
                module.register_buffer("mask", torch.zeros(6, 6), persistent=not value)
            else:
                module.mask = torch.zeros(6, 6)
            module.persistent_mask = value
            assert ("mask" in module.state_dict()) == value
            assert (module.mask == 0).all()


def test_the_attribute_is_the_keyword():
    module = made("MultiHeadAttention", 6)
    for value, written in ((False, False), (True, True), (None, True)):
        module.persistent_mask = value
        assert module.persistent_mask == bool(mask_keys(module)) == written
    module.persistent_mask = False
    module.load_state_dict(made("MultiHeadAttention", 6).state_dict(), strict=True)
    assert not module.persistent_mask, "never"


@pytest.mark.parametrize("value", [1, "no"])
def test_other_types(value):
    with pytest.raises(TypeError, match=f"^pyattn: persistent_mask must be bool or NoneType, got {value!r}$"):
        made("MultiHeadAttention", 6, persistent_mask=value)
