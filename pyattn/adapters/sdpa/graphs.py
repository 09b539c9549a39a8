"""Stops ``torch.compile``'s code from outliving a change of the switch of :mod:`pyattn.adapters.sdpa`.

Dynamo traces a call of ``scaled_dot_product_attention`` without looking at the dispatcher, so none of its guards fails
when the operator's kernel changes. This module therefore adds a guard to each compiled piece of code: it runs only
while the switch is as it was when the piece was compiled. Dynamo recompiles a function when all its pieces fail, and
finds either piece again when the switch changes back.
"""

import sys
import warnings
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_guarded: weakref.WeakSet[Any] = weakref.WeakSet()
"""Guard managers of the pieces that already have this guard."""


def compiling() -> AbstractContextManager[Any]:
    """Takes torch's compile lock: within it, no thread compiles."""
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    return getattr(dynamo, "compile_lock", nullcontext())


def keep_apart(was: bool, is_on: Callable[[], bool]) -> None:
    """Guards every piece compiled since the last call, when the switch was on if ``was``.

    Dynamo has no public way to do this: if a version of torch uses other names, a warning says what to do.
    """
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    if dynamo is None:  # nothing was ever compiled
        return
    try:
        _guard(dynamo.input_codes.seen, was, is_on)
    except (AttributeError, ImportError, TypeError) as error:
        warnings.warn(
            f"pyattn: with torch {torch.__version__} functions that were compiled before keep the attention that they "
            f"were compiled with: torch.compiler.reset() compiles them anew ({error})",
            stacklevel=4,
        )


def _guard(codes: Iterable[Any], was: bool, is_on: Callable[[], bool]) -> None:
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    for reference in codes:
        code = reference()
        for entry in [] if code is None else _debug_get_cache_entry_list(code):
            if entry.guard_manager not in _guarded:
                shown = [f"pyattn.adapters.sdpa.is_enabled() == {was}"]
                entry.guard_manager.root.add_lambda_guard(lambda _: is_on() == was, shown, None)
                _guarded.add(entry.guard_manager)
