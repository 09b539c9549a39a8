"""Checks of what users pass, each failure one sentence: the rule, and the value that breaks it."""

import inspect
import reprlib
from collections.abc import Callable, Mapping
from typing import NoReturn, TypeVar

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., object])

PEERS_WORDS = {
    "attn_mask": "masks given as tensors are not written yet, use causal and q_offset",
    "dropout": "use dropout_p",
    "enable_gqa": "leave it out, k and v may have fewer heads than q",
    "is_causal": "use causal (default True, bottom-right; scaled_dot_product_attention's upper-left is q_offset=0)",
    "mask": "masks given as tensors are not written yet, use causal and q_offset",
    "scale": "use softmax_scale",
    "window_size": "windows are not written yet",
}
"""Arguments of ``torch.nn.functional.scaled_dot_product_attention`` and its peers, and what stands for each here."""


def shown(value: object) -> str:
    """``value`` as an error shows it: an array by type and shape, anything else by a repr of one line at most."""
    shape = getattr(value, "shape", ())
    if isinstance(shape, tuple) and shape:
        return f"{type(value).__module__}.{type(value).__qualname__} of shape {tuple(shape)}"
    return reprlib.repr(value)


def check_type(name: str, value: object, *types: type) -> None:
    """TypeError unless ``value`` is of one of ``types``; symbolic numbers of torch.compile go unmentioned."""
    if not isinstance(value, types):
        kinds = " or ".join(kind.__name__ for kind in types if not kind.__name__.startswith("Sym"))
        raise TypeError(f"pyattn: {name} must be {kinds}, got {shown(value)}")


def check_64_bits(name: str, value: object) -> None:
    """ValueError for an int that int64 does not hold."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"pyattn: {name} must fit in 64 bits, got {value}")


def check_size(name: str, value: object, least: int = 0) -> None:
    """TypeError for what is no int, ValueError for one below ``least``."""
    check_type(name, value, int, torch.SymInt)
    if isinstance(value, int) and value < least:
        raise ValueError(f"pyattn: {name} must be at least {least}, got {value}")


def check_tensor(name: str, value: object) -> None:
    """TypeError for what is no tensor, NotImplementedError for a nested one."""
    check_type(name, value, Tensor)
    if isinstance(value, Tensor) and value.is_nested:
        raise NotImplementedError(f"pyattn: {name} must be a dense tensor, got a nested one")


def hide_catch_all(function: Function) -> Function:
    """Leaves ``*positional`` and ``**named`` out of the signature that help() and inspect show.

    The function takes them to hand them to :func:`refuse`. A wrapper that catches Python's own TypeError would cost
    each call three times as much.
    """
    signature = inspect.signature(function)
    hidden = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    shown_parameters = [p for p in signature.parameters.values() if p.kind not in hidden]
    function.__signature__ = signature.replace(parameters=shown_parameters)  # type: ignore[attr-defined]
    return function


def refuse(function: Callable[..., object], positional: tuple[object, ...], named: Mapping[str, object]) -> NoReturn:
    """TypeError for arguments that ``function`` does not have, naming those that stand for them."""
    parameters = inspect.signature(function).parameters.values()
    name = function.__name__
    if positional:
        first = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        raise TypeError(
            f"pyattn: {name} takes {', '.join(first)} by position and the rest by name (other libraries have attn_mask "
            f"or dropout_p next), got {len(positional)} more, the first {shown(positional[0])}"
        )
    all_names = "its arguments are " + ", ".join(p.name for p in parameters)
    words = [f"no argument {word} ({PEERS_WORDS.get(word, all_names)}), got {shown(named[word])}" for word in named]
    raise TypeError(f"pyattn: {name} has " + "; ".join(words))
