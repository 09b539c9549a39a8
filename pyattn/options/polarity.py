"""A warning for masks of the other polarity: True = hidden, as in the book and nn.MultiheadAttention."""

import math
import warnings
from ctypes import c_double, c_float

import torch
from torch import Tensor

from pyattn.locks import Lock

is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor

MESSAGE = (
    "pyattn: no query sees a key, so every result is 0: mask is True where a key takes part, and ~mask turns around "
    "one that is True where a key is hidden, got a mask that hides all keys"
)
_warned = False
_lock = Lock()


def warn_if_all_hidden(lse: Tensor, keys: int) -> None:
    """Warns, once in a process, if a call with a mask and ``keys`` keys gave the rows ``lse`` none to see.

    One row decides nearly always, and its value is read from memory: an operation of torch would take a twentieth of a
    small call. On a GPU, where reading waits, nothing is checked.
    """
    global _warned
    if _warned or type(lse) is not Tensor or not lse.is_cpu or torch.compiler.is_compiling():
        return
    if not (size := lse.nbytes) or not keys or is_wrapped(lse) or not lse.is_contiguous():
        return
    kind, width = (c_double, 8) if lse.dtype == torch.float64 else (c_float, 4)
    last = kind.from_address(lse.data_ptr() + size - width).value
    if last == -math.inf and bool(torch.isneginf(lse.detach()).all()):
        with _lock:
            first, _warned = not _warned, True
        if first:
            warnings.warn(MESSAGE, stacklevel=3)
