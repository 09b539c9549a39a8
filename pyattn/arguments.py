"""Checks of what users pass, each failure one sentence: the rule, and the value that breaks it."""

import inspect
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

Function = TypeVar("Function", bound=Callable[..., object])

PEERS_WORDS = {
    "attn_bias": "use bias",
    "attn_mask": "use bias: bool, True = takes part, or added to the scores; with causal=False if it is the whole mask",
    "block_mask": "use bias for a mask given as a tensor, key_ranges for one range of keys a query: pyattn.masks",
    "dropout": "use dropout_p",
    "enable_gqa": "leave it out, k and v may have fewer heads than q",
    "is_causal": "use causal (default True, bottom-right; scaled_dot_product_attention's upper-left is q_offset=0)",
    "key_padding_mask": "use bias of shape (B, 1, 1, Sk), True = takes part, or key_ranges=pyattn.masks.padding(...)",
    "mask": "use bias: bool, True = takes part, or added to the scores; with causal=False if it is the whole mask",
    "s_aux": "use sinks",
    "scale": "use softmax_scale",
    "score_mod": "use softcap, bias or alibi_slopes",
    "sliding_window": "use window=(W - 1, 0): a query sees itself and the W - 1 keys before it",
    "window_size": "use window",
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


def check_window(window: object) -> None:
    """TypeError for what is no pair of ints, ValueError for one with an int below -1."""
    kinds = int, torch.SymInt
    if not (isinstance(window, tuple | list) and len(window) == 2 and all(isinstance(x, kinds) for x in window)):
        raise TypeError(f"pyattn: window must be a pair of ints (left, right), got {shown(window)}")
    for bound in window:
        check_64_bits("window", bound)
        if bound < -1:
            raise ValueError(f"pyattn: window must be (left, right), each at least -1, got {list(window)}")


def check_finite(name: str, value: object) -> None:
    """TypeError for what is no number, ValueError for one below 0, infinite or NaN."""
    check_type(name, value, int, float, torch.SymFloat)
    if isinstance(value, bool):
        raise TypeError(f"pyattn: {name} must be int or float, got {value}")
    if isinstance(value, int | float) and not 0 <= value < math.inf:
        raise ValueError(f"pyattn: {name} must be finite and at least 0, got {value}")


def check_size(name: str, value: object, least: int = 0) -> None:
    """TypeError for what is no int, ValueError for one below ``least`` or past 64 bits."""
    check_type(name, value, int, torch.SymInt)
    check_64_bits(name, value)
    if isinstance(value, int) and value < least:
        raise ValueError(f"pyattn: {name} must be at least {least}, got {value}")


def check_integers(name: str, values: Sequence[int] | Tensor, device: torch.device | None = None) -> Tensor:
    """``values`` as an int64 tensor of one dimension, or TypeError or ValueError."""
    check_type(name, values, Sequence, Tensor)
    if isinstance(values, Tensor):
        if values.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"pyattn: {name} must be int32 or int64, got {values.dtype}")
    else:
        for value in values:
            check_type(f"each of {name}", value, int)
        values = torch.tensor(values, dtype=torch.int64, device=device)
    if values.dim() != 1:
        raise ValueError(f"pyattn: {name} must have 1 dimension, got shape {tuple(values.shape)}")
    return values.to(torch.int64)


def has_values(tensor: Tensor) -> bool:
    """Whether Python may branch on the tensor's values: not on fake and meta ones, in transforms, nor in a compiler."""
    if torch.compiler.is_compiling() or tensor.is_meta or isinstance(tensor, FakeTensor):
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def check_between(name: str, values: Tensor, least: int, most: int | None = None) -> None:
    """ValueError for the first of ``values`` outside [least, most], if they can be read."""
    if not has_values(values):
        return
    wrong = values < least if most is None else (values < least) | (values > most)
    if wrong.any():
        at = int(wrong.to(torch.uint8).argmax())
        allowed = f"at least {least}" if most is None else f"between {least} and {most}"
        raise ValueError(f"pyattn: each of {name} must be {allowed}, got {int(values[at])} at {at}")


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
