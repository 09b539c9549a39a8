"""Takers: functions that compute calls in place of the operators: of jagged tensors, DTensors, parts of a sequence.

Modules above fill :data:`TAKERS` and :data:`CONTEXTS`. The public functions look into the first only if q is not a
plain tensor.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

Taker = Callable[..., Any]

TAKERS: dict[type, dict[str, Taker]] = {}
"""By the type of q, then by the public function's name. A taker has the function's arguments; None: not its case."""


class KeyCache:
    """The base of caches of keys, which :func:`pyattn.attention_weights` takes in place of ``k``."""


CACHES: dict[str, Taker] = {}
"""By the public function's name: the taker of calls over a :class:`KeyCache`."""

CONTEXTS: list[Callable[..., Tensor | tuple[Tensor, ...]]] = []
"""Open contexts in which tensors hold a rank's part of the positions, the inner one last: each takes all attention."""


def taken(name: str, q: Tensor, *arguments: Any, **named: Any) -> Tensor | tuple[Tensor, ...] | None:
    """The result of the taker for q's type; None if there is none, or if it leaves the call to the operator."""
    taker = TAKERS.get(type(q), {}).get(name)
    return None if taker is None else taker(q, *arguments, **named)


def check_outside(name: str) -> None:
    """NotImplementedError within a context, where positions that are adjacent in memory need not be so in the text."""
    if CONTEXTS:
        raise NotImplementedError(
            f"pyattn: {name} must be called outside of context_parallel, where a rank has a part of the positions, got "
            "a call within it"
        )
