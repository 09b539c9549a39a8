"""Results of FlashAttention 3's functions, which differ between its versions: out, or (out, softmax_lse).

Until July 2025 flash_attn_func, flash_attn_varlen_func and flash_attn_qkvpacked_func returned both, and callers took
element 0. That of out alone is the first sequence or token, which broadcasts: a wrong number without an error.
"""

import dis
import functools
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch import Tensor

Results = Tensor | tuple[Tensor, Tensor]
"""out, or (out, softmax_lse)."""


def check_caller(name: str) -> None:
    """TypeError if the statement that called the function takes element 0 of its result, or unpacks it.

    It looks at the bytecode after the call, so it sees ``f(...)[0]``, ``out, lse = f(...)`` and ``x = f(...)`` followed
    by ``x[0]``, and no other use. Code under torch.compile is not looked at.
    """
    if torch.compiler.is_compiling():
        return
    frame = sys._getframe(2)
    if taken := _takes_apart(frame.f_code, frame.f_lasti):
        raise TypeError(
            f"pyattn: {name} returns out alone, as FlashAttention 3 does since July 2025, but its caller {taken} it, "
            f"got {frame.f_code.co_filename}:{frame.f_lineno}; for code that expects (out, softmax_lse), call "
            "pyattn.adapters.flash_attn.enable(fa3_returns_lse=True) or pass return_attn_probs=True"
        )


def with_lse(function: Callable[..., Results]) -> Callable[..., Results]:
    """The function as it was before July 2025: it returns (out, softmax_lse) in any case."""

    @functools.wraps(function)
    def both(*args: Any, **kwargs: Any) -> Results:
        return function(*args, **kwargs | {"return_attn_probs": True})

    return both


@functools.lru_cache(maxsize=1024)
def _takes_apart(code: CodeType, at: int) -> str | None:
    """How the instructions after the call at offset ``at`` use its result."""
    following = [i for i in dis.get_instructions(code) if i.offset > at and i.opname not in ("CACHE", "NOP")][:4]
    if following and following[0].opname in ("UNPACK_SEQUENCE", "UNPACK_EX"):
        return "unpacks"
    if len(following) == 4 and following[0].opname.startswith("STORE_"):
        stored = following[0].argval
        if following[0].opname == "STORE_FAST_LOAD_FAST":
            following = following[1:] if stored[0] == stored[1] else []
        elif following[1].opname.startswith("LOAD_") and following[1].argval == stored:
            following = following[2:]
    if len(following) < 2 or not following[0].opname.startswith(("LOAD_CONST", "LOAD_SMALL_INT")):
        return None
    subscript = following[1].opname == "BINARY_SUBSCR" or following[1].argrepr == "[]"
    zero = type(following[0].argval) is int and following[0].argval == 0
    return "takes element 0 of" if subscript and zero else None
