"""Checks of user arguments. Each error is one sentence: the rule, then the value that breaks it."""

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
"""More numbers than any memory holds, few enough that their bytes still fit in 64 bits."""


class _Short(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        """Python refuses to print an int of more than 4,300 digits."""
        return super().repr_int(x, level) if x.bit_length() <= 128 else f"an int of {x.bit_length()} bits"


_short = _Short()


def shown(value: object) -> str:
    """``value`` as an error shows it: an array by type and shape, anything else by a repr of at most one line."""
    shape = getattr(value, "shape", ())
    if isinstance(shape, tuple) and shape:
        return f"{type(value).__module__}.{type(value).__qualname__} of shape {tuple(shape)}"
    return repr(value) if torch.compiler.is_compiling() else _short.repr(value)  # torch.compile traces no reprlib


def check_type(name: str, value: object, *types: type) -> None:
    """TypeError unless ``value`` has one of ``types``; a bool is not an int. The message omits symbolic types."""
    if type(value) in types:
        return
    if not isinstance(value, types) or isinstance(value, bool):
        kinds = " or ".join(kind.__name__ for kind in types if not kind.__name__.startswith("Sym"))
        raise TypeError(f"pyattn: {name} must be {kinds}, got {shown(value)}")


def check_64_bits(name: str, value: object) -> None:
    """ValueError for an int outside the range of int64."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"pyattn: {name} must fit in 64 bits, got {shown(value)}")


def _is_int(value: object) -> bool:
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def check_window(window: object) -> None:
    """TypeError unless ``window`` is a pair of ints; ValueError if either is below -1."""
    if not (isinstance(window, (tuple, list)) and len(window) == 2 and _is_int(window[0]) and _is_int(window[1])):
        raise TypeError(
            "pyattn: window must be a pair of ints (left, right), window=(W - 1, 0) for a query and the W - 1 keys "
            f"before it, got {shown(window)}"
        )
    for bound in window:
        check_64_bits("window", bound)
        if bound < -1:
            raise ValueError(f"pyattn: window must be (left, right), each at least -1, got {list(window)}")


def check_scale(name: str, value: object) -> None:
    """TypeError unless ``value`` is a number; ValueError for an int past float's range; the operator checks floats."""
    check_type(name, value, int, float, torch.SymInt, torch.SymFloat, type(None))
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        raise ValueError(f"pyattn: {name} must be finite, got {shown(value)}")


def check_finite(name: str, value: object) -> None:
    """TypeError unless ``value`` is a number; ValueError if it is negative, infinite or NaN."""
    check_type(name, value, int, float, torch.SymFloat)
    if isinstance(value, (int, float)) and not 0 <= value <= sys.float_info.max:
        raise ValueError(f"pyattn: {name} must be finite and at least 0, got {shown(value)}")


def check_probability(name: str, value: object) -> None:
    """TypeError unless ``value`` is a number; ValueError outside [0, 1). False is 0: ``training and p`` yields it."""
    check_type(name, 0 if value is False else value, int, float)
    if isinstance(value, (int, float)) and not 0 <= value < 1:
        raise ValueError(f"pyattn: {name} must be at least 0 and below 1, got {shown(value)}")


def check_size(name: str, value: object, least: int = 0) -> None:
    """TypeError unless ``value`` is an int; ValueError if it is below ``least`` or does not fit in 64 bits."""
    check_type(name, value, int, torch.SymInt)
    check_64_bits(name, value)
    if isinstance(value, int) and value < least:
        raise ValueError(f"pyattn: {name} must be at least {least}, got {value}")


def check_sizes(least: int = 0, /, **sizes: int) -> None:
    """Calls :func:`check_size` on each; ValueError if their product is more than any memory holds."""
    count = 1
    for name, size in sizes.items():
        check_size(name, size, least)
        count *= max(1, size) if isinstance(size, int) else 1
    if count >= MOST_NUMBERS:
        got = " * ".join(map(str, sizes.values()))
        raise ValueError(f"pyattn: {' * '.join(sizes)} must be below {MOST_NUMBERS}, got {got}")


def device_of(device: Any) -> torch.device | None:
    """``device`` as a torch.device; TypeError if it names none, ValueError if this torch cannot use it."""
    check_type("device", device, torch.device, str, int, type(None))
    if device is None:
        return None
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, ImportError) as error:  # which one depends on the device type
        raise ValueError(f"pyattn: device must be one that this torch can use, got {device}") from error


def check_integers(
    name: str, values: Sequence[int] | Tensor, device: torch.device | None = None, dims: int = 1
) -> Tensor:
    """``values`` as an int64 tensor of ``dims`` dimensions; otherwise TypeError, ValueError or NotImplementedError."""
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
    if values.dim() != dims:
        plural = "s" if dims > 1 else ""
        raise ValueError(f"pyattn: {name} must have {dims} dimension{plural}, got shape {tuple(values.shape)}")
    return values.to(torch.int64)


def int64_of(values: Tensor) -> Tensor:
    """int32 converted to int64, which the operators take; they refuse other dtypes themselves."""
    return values.to(torch.int64) if values.dtype == torch.int32 else values


def has_values(tensor: Tensor) -> bool:
    """Whether Python may branch on the tensor's values: not if it is fake or meta, in a transform or being compiled."""
    if torch.compiler.is_compiling() or tensor.is_meta or isinstance(tensor, FakeTensor):
        return False
    functorch = torch._C._functorch
    # torch.autograd.functional's vectorize=True, and is_grads_batched=True, use an older vmap
    return not (functorch.is_functorch_wrapped_tensor(tensor) or functorch.is_legacy_batchedtensor(tensor))


def integers_of(values: Tensor) -> list[int] | None:
    """The values of an integer vector on the CPU; None where a call is recorded, whose graph would keep them."""
    known = type(values) is Tensor and values.is_cpu and values.dtype in (torch.int64, torch.int32)
    if not known or values.dim() != 1 or torch.compiler.is_compiling() or torch._C._is_tracing():
        return None
    if torch._C._functorch.is_functorch_wrapped_tensor(values) or torch._C._len_torch_dispatch_stack():
        return None
    integers: list[int] = values.tolist()
    return integers


def check_between(name: str, values: Tensor, least: int, most: int | None = None) -> None:
    """ValueError naming the first of ``values`` outside [least, most]; no check if they can't be read."""
    if not has_values(values):
        return
    wrong = values < least if most is None else (values < least) | (values > most)
    if wrong.any():
        at = int(wrong.to(torch.uint8).argmax())
        allowed = f"at least {least}" if most is None else f"between {least} and {most}"
        raise ValueError(f"pyattn: each of {name} must be {allowed}, got {int(values[at])} at {at}")


def check_tensor(name: str, value: object) -> None:
    """TypeError unless ``value`` is a tensor; NotImplementedError for a nested one."""
    check_type(name, value, Tensor)
    if isinstance(value, Tensor) and value.is_nested:
        raise NotImplementedError(f"pyattn: {name} must be a dense tensor, got a nested one")


def check_names(function: Function) -> Function:
    """Decorator that refuses unknown arguments by :func:`refuse`; it costs one more Python call."""
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

    # A separate code object for each function: torch.compile keeps at most eight graphs of a code object.
    checked.__code__ = checked.__code__.replace(co_name=function.__qualname__)  # type: ignore[attr-defined]
    return checked  # type: ignore[return-value]


def refuse_positional(function: Callable[..., object], positional: tuple[object, ...]) -> NoReturn:
    """TypeError for more positional arguments than ``function`` takes."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    first = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    rest = " and the rest by name" if any(p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters) else ""
    others = ""
    if {"q", "softmax_scale"} <= {p.name for p in parameters}:
        others = " (other libraries have attn_mask or dropout_p next)"
    raise TypeError(
        f"pyattn: {_name(function)} takes {', '.join(first) or 'nothing'} by position{rest}{others}, got "
        f"{len(positional)} more, the first {shown(positional[0])}"
    )


def positional_error(function: Callable[..., object], positional: tuple[object, ...]) -> TypeError | None:
    """The error of :func:`refuse_positional`; None without such arguments."""
    try:
        if positional:
            refuse_positional(function, positional)
    except TypeError as error:
        return error
    return None


def _name(function: Callable[..., object]) -> str:
    return function.__qualname__.removesuffix(".__init__")


def refuse(function: Callable[..., object], named: Mapping[str, object], peers: Mapping[str, str] = {}) -> NoReturn:
    """TypeError for arguments that ``function`` does not have; it names the ones to use instead.

    ``peers`` maps argument names of other libraries to how to say the same here.
    """
    if torch.compiler.is_compiling():  # it traces no signatures
        raise TypeError(f"pyattn: {function.__name__} has no argument {', '.join(named)}")
    own = [name for name in inspect.signature(function).parameters if name != "self"]
    words, hints = [], set[str]()
    for word in named:
        hint = _hint(word, own, peers)
        words.append(f"no argument {word}{'' if hint in hints else f' ({hint})'}, got {shown(named[word])}")
        hints.add(hint)
    raise TypeError(f"pyattn: {_name(function)} has " + "; ".join(words))


def _hint(word: str, own: Sequence[str], peers: Mapping[str, str]) -> str:
    """Suggests what to use instead of ``word`` in a function with the arguments ``own``."""
    if word in peers:
        return peers[word]
    turned = [name for name in own if sorted(name.split("_")) == sorted(word.split("_"))]
    likeness = {name: difflib.SequenceMatcher(None, name, word).ratio() for name in (*own, *peers)}
    closest = max(likeness, key=lambda name: likeness[name], default="")  # the first of equals: seqlen_k, not seqlen_q
    if turned or likeness.get(closest, 0.0) >= 0.6:  # difflib's own threshold
        close = turned[0] if turned else closest
        return f"did you mean {close}?" + (f" {peers[close]}" if close in peers else "")
    return "its arguments are " + ", ".join(own)
