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
    values, count = DEFAULTS.copy(), 0
    for name, value in given.items():
        if name not in OPTIONS:
            check_known(function, given)
        if value is not None or name not in MAY_BE_NONE:
            OPTIONS[name].check(name, value)
            # torch's operators take no int beyond 64 bits, even for a float.
            values[name] = float(value) if isinstance(value, int) and name in FLOATS else value
            if count <= PLACES[name]:
                count = PLACES[name] + 1
    if isinstance(values["q_offset"], Tensor):
        values["q_offset"], values["q_offsets"] = None, int64_of(values["q_offset"])
        count = max(count, PLACES["q_offsets"] + 1)
    if "key_ranges" in given:
        values["key_ranges"] = plain(values["key_ranges"], values["causal"])
        if values["key_ranges"] is not None:
            check_tensor("key_ranges", values["key_ranges"])
    if torch._C._is_any_autocast_enabled():
        for name in LEARNED:
            to = cast if name == "bias" else cast_rows
            values[name] = None if values[name] is None else to(values[name])
    if "dropout_p" in given or "dropout_seed" in given:
        last = "dropout_seed"
        if isinstance(values[last], Draws) and values["dropout_p"]:
            values[last], values["dropout_origins"] = values[last]
            last = "dropout_origins"
        values["dropout_seed"] = _seed(values["dropout_p"], values["dropout_seed"], device)
        count = PLACES[last] + 1 if values["dropout_p"] else min(count, PLACES["dropout_p"])
    return tuple(values.values())[:count]


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
