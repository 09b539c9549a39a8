"""Checks of what users pass, each failure one sentence: the rule, and the value that breaks it."""

import difflib
import functools
import inspect
import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

Function = TypeVar("Function", bound=Callable[..., object])

MOST_NUMBERS = 2**58
"""No memory holds as many, and their bytes still fit in 64 bits."""


class _Short(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        """Python refuses to write out an int of more than 4,300 digits."""
        return super().repr_int(x, level) if x.bit_length() <= 128 else f"an int of {x.bit_length()} bits"


_short = _Short()


def shown(value: object) -> str:
    """``value`` as an error shows it: an array by type and shape, anything else by a repr of one line at most."""
    shape = getattr(value, "shape", ())
    if isinstance(shape, tuple) and shape:
        return f"{type(value).__module__}.{type(value).__qualname__} of shape {tuple(shape)}"
    return _short.repr(value)


def check_type(name: str, value: object, *types: type) -> None:
    """TypeError unless ``value`` is of one of ``types``: a bool is no int, symbolic numbers go unmentioned."""
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        kinds = " or ".join(kind.__name__ for kind in types if not kind.__name__.startswith("Sym"))
        raise TypeError(f"pyattn: {name} must be {kinds}, got {shown(value)}")


def check_64_bits(name: str, value: object) -> None:
    """ValueError for an int that int64 does not hold."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"pyattn: {name} must fit in 64 bits, got {shown(value)}")


def _is_int(value: object) -> bool:
    return isinstance(value, int | torch.SymInt) and not isinstance(value, bool)


def check_window(window: object) -> None:
    """TypeError for what is no pair of ints, ValueError for one with an int below -1."""
    if not (isinstance(window, tuple | list) and len(window) == 2 and all(map(_is_int, window))):
        raise TypeError(
            "pyattn: window must be a pair of ints (left, right), window=(W - 1, 0) for a query and the W - 1 keys "
            f"before it, got {shown(window)}"
        )
    for bound in window:
        check_64_bits("window", bound)
        if bound < -1:
            raise ValueError(f"pyattn: window must be (left, right), each at least -1, got {list(window)}")


def check_scale(name: str, value: object) -> None:
    """TypeError for what is no number, ValueError for an int that no double holds; the operator checks doubles."""
    check_type(name, value, int, float, torch.SymInt, torch.SymFloat, type(None))
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        raise ValueError(f"pyattn: {name} must be finite, got {shown(value)}")


def check_finite(name: str, value: object) -> None:
    """TypeError for what is no number, ValueError for one below 0, infinite or NaN."""
    check_type(name, value, int, float, torch.SymFloat)
    if isinstance(value, int | float) and not 0 <= value <= sys.float_info.max:
        raise ValueError(f"pyattn: {name} must be finite and at least 0, got {shown(value)}")


def check_probability(name: str, value: object) -> None:
    """TypeError for what is no number, ValueError for one outside [0, 1); False is 0, as ``training and p`` has it."""
    check_type(name, 0 if value is False else value, int, float)
    if isinstance(value, int | float) and not 0 <= value < 1:
        raise ValueError(f"pyattn: {name} must be at least 0 and below 1, got {shown(value)}")


def check_size(name: str, value: object, least: int = 0) -> None:
    """TypeError for what is no int, ValueError for one below ``least`` or past 64 bits."""
    check_type(name, value, int, torch.SymInt)
    check_64_bits(name, value)
    if isinstance(value, int) and value < least:
        raise ValueError(f"pyattn: {name} must be at least {least}, got {value}")


def check_sizes(least: int = 0, /, **sizes: int) -> None:
    """:func:`check_size` of each, and ValueError for more numbers than any memory holds."""
    count = 1
    for name, size in sizes.items():
        check_size(name, size, least)
        count *= max(1, size) if isinstance(size, int) else 1
    if count >= MOST_NUMBERS:
        got = " * ".join(map(str, sizes.values()))
        raise ValueError(f"pyattn: {' * '.join(sizes)} must be below {MOST_NUMBERS}, got {got}")


def device_of(device: Any) -> torch.device | None:
    """The device that is meant; TypeError for what names none, ValueError for one that this torch cannot use."""
    check_type("device", device, torch.device, str, int, type(None))
    if device is None:
        return None
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, ImportError) as error:  # as each device type has it
        raise ValueError(f"pyattn: device must be one that this torch can use, got {device}") from error


def check_integers(name: str, values: Sequence[int] | Tensor, device: torch.device | None = None) -> Tensor:
    """``values`` as an int64 tensor of one dimension, or TypeError, ValueError or NotImplementedError."""
    check_type(name, values, Sequence, Tensor)
    if isinstance(values, Tensor):
        if values.layout is not torch.strided:
            raise NotImplementedError(f"pyattn: {name} must be a dense tensor, got layout {values.layout}")
        if values.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"pyattn: {name} must be int32 or int64, got {values.dtype}")
    else:
        each = f"each of {name}"
        for value in values:
            check_type(each, value, int)
            check_64_bits(each, value)
        values = torch.tensor(values, dtype=torch.int64, device=device)
    if values.dim() != 1:
        raise ValueError(f"pyattn: {name} must have 1 dimension, got shape {tuple(values.shape)}")
    return values.to(torch.int64)


def int64_of(values: Tensor) -> Tensor:
    """int32 as int64, which the operators take; any other dtype is theirs to refuse."""
    return values.to(torch.int64) if values.dtype == torch.int32 else values


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


def check_names(function: Function) -> Function:
    """:func:`refuse` for arguments that the function does not have, at the cost of one more call."""
    parameters = inspect.signature(function).parameters
    known, kinds = frozenset(parameters), [p.kind for p in parameters.values()]
    takes_all = inspect.Parameter.VAR_POSITIONAL in kinds
    most = sys.maxsize if takes_all else kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD)

    @functools.wraps(function)
    def checked(*positional: Any, **named: Any) -> object:
        if len(positional) > most:
            refuse_positional(function, positional[most:])
        if not known.issuperset(named):
            refuse(function, {name: value for name, value in named.items() if name not in known})
        return function(*positional, **named)

    return checked  # type: ignore[return-value]


def refuse_positional(function: Callable[..., object], positional: tuple[object, ...]) -> NoReturn:
    """TypeError for arguments after those that ``function`` takes by position."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    first = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    rest = " and the rest by name" if any(p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters) else ""
    others = ""
    if any(p.name == "softmax_scale" for p in parameters):
        others = " (other libraries have attn_mask or dropout_p next)"
    raise TypeError(
        f"pyattn: {_name(function)} takes {', '.join(first) or 'nothing'} by position{rest}{others}, got "
        f"{len(positional)} more, the first {shown(positional[0])}"
    )


def _name(function: Callable[..., object]) -> str:
    return function.__qualname__.removesuffix(".__init__")


def refuse(function: Callable[..., object], named: Mapping[str, object], peers: Mapping[str, str] = {}) -> NoReturn:
    """TypeError for arguments that ``function`` does not have, naming those that stand for them.

    ``peers`` are words of other libraries, and how to say the same here.
    """
    own = [name for name in inspect.signature(function).parameters if name != "self"]
    words = [f"no argument {word} ({_hint(word, own, peers)}), got {shown(named[word])}" for word in named]
    raise TypeError(f"pyattn: {_name(function)} has " + "; ".join(words))


def _hint(word: str, own: Sequence[str], peers: Mapping[str, str]) -> str:
    """Names the argument that ``word`` stands for in a function with the arguments ``own``."""
    if word in peers:
        return peers[word]
    turned = [name for name in own if sorted(name.split("_")) == sorted(word.split("_"))]
    for close in turned or difflib.get_close_matches(word, [*own, *peers], n=1):
        return f"did you mean {close}?" + (f" {peers[close]}" if close in peers else "")
    return "its arguments are " + ", ".join(own)
