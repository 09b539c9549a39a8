"""Takers: functions that compute calls whose q has a tensor type of their own: jagged tensors, DTensors.

Modules above fill :data:`TAKERS`; the public functions look there only if q is not a plain tensor.
"""

from collections.abc import Callable
from typing import Any

import torch

Taker = Callable[..., Any]

TAKERS: dict[type, dict[str, Taker]] = {}
"""By the type of q, then by the public function's name. A taker has the function's arguments; None: not its case."""


def taken(name: str, q: torch.Tensor, *arguments: Any, **named: Any) -> Any:
    """The result of the taker for q's type; None if there is none, or if it leaves the call to the operator."""
    taker = TAKERS.get(type(q), {}).get(name)
    return None if taker is None else taker(q, *arguments, **named)
