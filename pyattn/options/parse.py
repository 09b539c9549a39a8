"""Parsing of public functions' options: checked, cast, in the operators' order; and how help() shows them."""

import inspect
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from pyattn.masks.key_ranges import plain
from pyattn.options.attention_options import FLOATS, MAY_BE_NONE, OPTIONS, PEERS, TYPES, Draws
from pyattn.options.autocast import cast, cast_rows
from pyattn.options.checks import check_tensor, int64_of, refuse
from pyattn.options.dropout import draw_seed
from pyattn.options.schema import DEFAULTS, LEARNED, PLACES

MEANINGS = "\n".join(
    textwrap.fill(f"{name}: {option.meaning}", 116, initial_indent=" " * 4, subsequent_indent=" " * 8)
    for name, option in OPTIONS.items()
)

_DEFAULTS = tuple(DEFAULTS.values())
_RULES = {
    name: (o.check, PLACES[name], name in MAY_BE_NONE, name in FLOATS, DEFAULTS[name]) for name, o in OPTIONS.items()
}
_Q_OFFSET, _Q_OFFSETS, _KEY_RANGES = PLACES["q_offset"], PLACES["q_offsets"], PLACES["key_ranges"]
_DROPOUT_P, _DROPOUT_SEED, _SELECTED = (PLACES[name] for name in ("dropout_p", "dropout_seed", "selected"))

Function = TypeVar("Function", bound=Callable[..., object])


def check_known(function: Callable[..., object], given: Mapping[str, Any]) -> None:
    """TypeError for options that do not exist; it names those to use instead."""
    unknown = {name: value for name, value in given.items() if name not in OPTIONS}
    if unknown:
        refuse(function, unknown, PEERS)


def check_given(function: Callable[..., object], given: Mapping[str, Any]) -> None:
    """The checks of :func:`parse`, which draws no seed here."""
    check_known(function, given)
    for name, value in given.items():
        if value is not None or name not in MAY_BE_NONE:
            OPTIONS[name].check(name, value)


def parse(function: Callable[..., object], given: Mapping[str, Any], device: torch.device) -> tuple[Any, ...]:
    """Checks the options given to a public function and casts them to what the operators take.

    None stands for a default, as in models' configurations. Under autocast, float tensors are cast; dropout without a
    seed draws one.

    Returns:
        The values of :class:`Options` up to the last one given: each further argument costs the operator 0.1 us.

    Raises:
        TypeError, ValueError: by :func:`check_known` and each option's check; key_ranges that are the whole mask with
            causal.
    """
    values, count = list(_DEFAULTS), 0
    for name, value in given.items():
        if name not in _RULES:
            check_known(function, given)
        check, place, may_be_none, is_float, default = _RULES[name]
        if value is default or (is_float and type(value) is float and value == default):
            continue
        if value is not None or not may_be_none:
            check(name, value)
            # torch's operators take no int beyond 64 bits, even for a float.
            values[place] = float(value) if is_float and isinstance(value, int) else value
            if count <= place:
                count = place + 1
    if isinstance(values[_Q_OFFSET], Tensor):
        values[_Q_OFFSET], values[_Q_OFFSETS] = None, int64_of(values[_Q_OFFSET])
        count = max(count, _Q_OFFSETS + 1)
    if values[_KEY_RANGES] is not None:
        values[_KEY_RANGES] = plain(values[_KEY_RANGES], values[PLACES["causal"]])
        check_tensor("key_ranges", values[_KEY_RANGES])
    if torch._C._is_any_autocast_enabled():
        for name in LEARNED:
            if (learned := values[PLACES[name]]) is not None:
                values[PLACES[name]] = cast(learned) if name == "bias" else cast_rows(learned)
    if count > _DROPOUT_P:
        last = _DROPOUT_SEED
        if isinstance(values[last], Draws) and values[_DROPOUT_P]:
            values[last], values[PLACES["dropout_origins"]] = values[last]
            last = PLACES["dropout_origins"]
        values[_DROPOUT_SEED] = _seed(values[_DROPOUT_P], values[_DROPOUT_SEED], device)
        if count <= _SELECTED:
            count = last + 1 if values[_DROPOUT_P] else _DROPOUT_P
    return tuple(values[:count])


def _seed(dropout_p: float, seed: Any, device: torch.device) -> Tensor | None:
    """The seed as the operators take it: a scalar tensor, or None without dropout."""
    if dropout_p == 0:
        return None
    if seed is None:
        return draw_seed(device)
    return seed if isinstance(seed, Tensor) else torch.tensor(seed, dtype=torch.int64, device=device)


def with_options(signature: inspect.Signature) -> inspect.Signature:
    """The signature with all options and their defaults in place of its ``*`` and ``**`` parameters."""
    caught, keyword = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD), inspect.Parameter.KEYWORD_ONLY
    own = [p for p in signature.parameters.values() if p.kind not in caught]
    options = [inspect.Parameter(n, keyword, default=DEFAULTS[n], annotation=TYPES[n]) for n in OPTIONS]
    by_place, by_name = ([p for p in own if (p.kind == keyword) == named] for named in (False, True))
    return signature.replace(parameters=[*by_place, *options, *by_name])


def takes_options(function: Function) -> Function:
    """Shows the options and their defaults in help() and inspect for a function that takes ``**options``.

    Such a function also takes ``*positional``, only to refuse it: a wrapper that catches Python's own TypeError would
    cost each call three times as much.
    """
    function.__signature__ = with_options(inspect.signature(function))  # type: ignore[attr-defined]
    if function.__doc__:  # not under -OO
        before, returns, after = inspect.cleandoc(function.__doc__).partition("\nReturns:")
        function.__doc__ = f"{before}\nOptions:\n{MEANINGS}\n{returns}{after}"
    return function
