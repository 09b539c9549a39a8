"""Promise: a constructor refuses what it can't build in one sentence with the values; None means "not given"."""

import inspect
import re
from typing import Any

import pytest
import torch
from support.modules import ARGUMENTS, WITH_EXTRAS, class_of

from pyattn import KVCache, nn

SIZES = ("d_in", "d_out", "embed_dim", "d_model", "d_k", "context_length", "num_heads", "num_heads_kv", "num_kv_groups")
SIZES += ("hidden_size", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def cases(*names: str) -> list[tuple[str, str]]:
    """Each module with each of these arguments that its constructor has."""
    parameters = {module: inspect.signature(class_of(module)).parameters for module in ARGUMENTS}
    return [(module, name) for module in ARGUMENTS for name in names if name in parameters[module]]


def made(module: str, **changed: Any) -> torch.nn.Module:
    """The module of ARGUMENTS with some of them changed."""
    bound = inspect.signature(class_of(module)).bind(*ARGUMENTS[module])
    return class_of(module)(**bound.arguments | changed)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.MultiHeadAttention(4, 10, 6, 0.0, 3), "d_out must be a multiple of num_heads, got 10 and 3"),
        (
            lambda: nn.MultiHeadAttention(4, 12, 6, 0.0, 12, num_heads_kv=5),
            "num_heads must be a multiple of num_heads_kv, got 12 and 5",
        ),
        (
            lambda: nn.GroupedQueryAttention(4, 8, 0.0, 4, 3),
            "num_heads must be a multiple of num_kv_groups, got 4 and 3",
        ),
        (lambda: nn.Attention(10, 3), "embed_dim must be a multiple of num_heads, got 10 and 3"),
        (
            lambda: nn.Attention(12, 12, num_heads_kv=5),
            "num_heads must be a multiple of num_heads_kv, got 12 and 5",
        ),
        (lambda: nn.Attention(12, 4, window=(-2, 0)), "window must be (left, right), each at least -1, got [-2, 0]"),
        (lambda: nn.Attention(12, 4, softcap=-1.0), "softcap must be finite and at least 0, got -1.0"),
        (
            lambda: nn.Attention(12, 4, rotary=100.0),
            "rotary must be a base above 0, with an even head_dim, got 100.0 and 3",
        ),
        (
            lambda: nn.MultiHeadLatentAttention(12, 2, 5, 7, 6, 3, 4),
            "rope_theta must be a base above 0, with an even qk_rope_head_dim, got 10000.0 and 3",
        ),
        (lambda: nn.Attention(12, 3, rotary=0), "rotary must be a base above 0, with an even head_dim, got 0 and 4"),
    ],
)
def test_constructor_errors(make, message):
    with pytest.raises(ValueError, match=f"^{re.escape('pyattn: ' + message)}$"):
        make()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            {"window": 256},
            "window must be a pair of ints (left, right), window=(W - 1, 0) for a query and the W - 1 keys before it, "
            "got 256",
        ),
        ({"softcap": "50"}, "softcap must be int or float, got '50'"),
        ({"alibi": 8.0}, "alibi must be bool, got 8.0"),
        ({"sinks": torch.zeros(2)}, "sinks must be bool, got torch.Tensor of shape (2,)"),
        ({"rotary": True}, "rotary must be int or float, got True"),
    ],
)
@pytest.mark.parametrize("name", WITH_EXTRAS)
def test_extras_of_other_types(name, extra, message):
    with pytest.raises(TypeError, match=f"^{re.escape('pyattn: ' + message)}$"):
        class_of(name)(*ARGUMENTS[name], **extra)


@pytest.mark.parametrize(("module", "name"), cases(*SIZES))
def test_sizes(module, name):
    for value in (True, 3.0, "3", torch.tensor([3])):
        got = "torch.Tensor of shape (1,)" if isinstance(value, torch.Tensor) else repr(value)
        with pytest.raises(TypeError, match=f"^{re.escape(f'pyattn: {name} must be int, got {got}')}$"):
            made(module, **{name: value})
    for value in (0, -4):
        with pytest.raises(ValueError, match=f"^pyattn: {name} must be at least 1, got {value}$"):
            made(module, **{name: value})


def test_sizes_of_every_module_are_checked():
    assert {module for module, _ in cases(*SIZES)} == ARGUMENTS.keys() - {"SimplifiedSelfAttention"}


def test_a_caches_sizes():
    with pytest.raises(TypeError, match=r"^pyattn: num_heads_kv must be int, got True$"):
        KVCache(2, True, 8, 4)


ANY_NUMBER = ("MultiHeadAttentionWrapper", "Ch03_MHA_Wrapper", "MultiHeadLatentAttention")
"""Modules whose width is a multiple of num_heads, whatever it is."""


@pytest.mark.parametrize(("module", "name"), [case for case in cases("num_heads") if case[0] not in ANY_NUMBER])
def test_heads_that_do_not_divide(module, name):
    with pytest.raises(ValueError, match=r"^pyattn: (d_out|embed_dim) must be a multiple of num_heads, got \d+ and 7$"):
        made(module, **{name: 7})


@pytest.mark.parametrize(("module", "name"), cases("dropout"))
def test_dropout(module, name):
    for value in (-0.1, 1.5, 2, float("nan")):
        with pytest.raises(ValueError, match=f"^pyattn: dropout must be between 0 and 1, got {value}$"):
            made(module, **{name: value})
    for value in (True, "0.1", None):
        with pytest.raises(TypeError, match=f"^pyattn: dropout must be int or float, got {value!r}$"):
            made(module, **{name: value})
    for value in (0, 1, 0.5):
        made(module, **{name: value})


@pytest.mark.parametrize("name", WITH_EXTRAS)
def test_none_is_not_given(name):
    usual, module = made(name), made(name, window=None, softcap=None, rotary=None)
    assert (module.window, module.softcap, module.rotary) == (usual.window, usual.softcap, usual.rotary)
    module.load_state_dict(usual.state_dict())
    x = torch.randn(2, 5, 12)
    assert torch.equal(module(x), usual(x))


@pytest.mark.parametrize("name", WITH_EXTRAS)
def test_a_window_is_a_pair(name):
    """(left, right), also as a list, as in JSON configurations; a window of all keys is no window."""
    assert made(name, window=[3, 0]).extra_repr() == made(name, window=(3, 0)).extra_repr()
    assert made(name, window=[-1, -1]).extra_repr() == made(name).extra_repr()
