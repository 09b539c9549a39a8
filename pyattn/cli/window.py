"""The option ``--window LEFT RIGHT``: a window as :func:`pyattn.attention` takes it."""

from typing import Any

from pyattn.cli.limits import check_integer
from pyattn.options import UNBOUNDED

OPTION: dict[str, Any] = {
    "type": int,
    "nargs": 2,
    "metavar": ("LEFT", "RIGHT"),
    "default": UNBOUNDED,
    "help": "positions to see before and after a token's own, -1: all; a causal mask hides those after it in any case; "
    "default: -1 -1",
}
"""The arguments that ``add_argument("--window")`` takes."""


def check_window(name: str, window: tuple[int, int]) -> None:
    """Raise InputError unless each bound is -1 or a number of positions."""
    for number in window:
        check_integer(f"{name}: each of its two numbers", number, -1)
