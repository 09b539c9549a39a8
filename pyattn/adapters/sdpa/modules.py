"""Functions of torch's attention modules that never reach the operator, as the switch replaces them.

``nn.MultiheadAttention`` computes its weights itself if it is asked for them, and its fast path, which the switch turns
off, is the only one that takes nested tensors.
"""

import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from pyattn import attention, attention_weights
from pyattn.adapters.sdpa import at_once
from pyattn.adapters.sdpa.call_counts import count
from pyattn.options.dropout import draw_seed


class LeftError(Exception):
    """The operator's call of a module that wants weights is left to torch."""


class Wanted:
    """The weights of one call of the operator.

    Attributes:
        weights: (B, H, L, S) once they are computed.
    """

    weights: Tensor | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, dropout_p: float = 0.0, **options: Any) -> Tensor:
        """:func:`pyattn.attention`, and the weights that multiplied ``v``."""
        seed = draw_seed(q.device) if dropout_p else None
        options |= {"dropout_p": dropout_p, "dropout_seed": seed}
        self.weights = attention_weights(q, k, **options)
        out: Tensor = attention(q, k, v, **options)
        return out


WANTED: ContextVar[Wanted | None] = ContextVar("WANTED", default=None)
"""The wishes of the module that is calling the operator, if it wants weights."""


def taking_weights(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch's ``multi_head_attention_forward`` with native weights, which are 0 where torch's own are NaN.

    torch computes them where the operator's call would be torch's too, in compiled or traced code, and if every weight
    is dropped, which is counted.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def attending(*arguments: Any, **named: Any) -> Any:
        tracing = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        if tracing or torch.compiler.is_compiling():
            return function(*arguments, **named)
        bound = signature.bind(*arguments, **named)
        bound.apply_defaults()
        given = bound.arguments
        query, mask = given["query"], given["attn_mask"]
        if not given["need_weights"] or query.device.type != "cpu":
            return function(*arguments, **named)
        if given["dropout_p"] == 1 and given["training"]:
            count("nn.MultiheadAttention with need_weights=True that drops every weight")
            return function(*arguments, **named)
        wanted = Wanted()
        token = WANTED.set(wanted)
        try:
            # With a mask, is_causal is only a hint, which torch does not read where it computes weights.
            alone = {"need_weights": False, "is_causal": given["is_causal"] and mask is None}
            with at_once.forbidden():
                out, _ = function(**(given | alone))
        except LeftError:
            return function(*arguments, **named)
        finally:
            WANTED.reset(token)
        weights = wanted.weights
        if weights is None:  # another kernel took the operator's call
            return function(*arguments, **named)
        if given["average_attn_weights"]:
            weights = weights.mean(1)
        return out, weights.squeeze(0) if query.dim() == 2 else weights

    attending.__prepare_scriptable__ = lambda: function  # type: ignore[attr-defined]  # TorchScript compiles torch's own
    return attending


class FastPath:
    """torch's fast path of modules: off from :meth:`switch_off` to :meth:`restore`, except while :meth:`taken`.

    The flag is the process's, so dense inputs that other threads evaluate meanwhile may take the fast path too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._was_enabled, self._is_off, self._calls = True, False, 0

    def switch_off(self) -> None:
        """Turns the fast path off."""
        with self._lock:
            self._was_enabled, self._is_off = torch.backends.mha.get_fastpath_enabled(), True
            torch.backends.mha.set_fastpath_enabled(False)

    def restore(self) -> None:
        """Sets the fast path as it was."""
        with self._lock:
            self._is_off = False
            torch.backends.mha.set_fastpath_enabled(self._was_enabled)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """The fast path as it was, in a block."""
        with self._lock:
            self._calls += 1
            if self._is_off:
                torch.backends.mha.set_fastpath_enabled(self._was_enabled)
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1
                if self._is_off and not self._calls:
                    torch.backends.mha.set_fastpath_enabled(False)

    def renew(self) -> None:
        """Begins anew in a child process, which has no other threads but inherits the locks they held."""
        self._lock, self._calls = threading.Lock(), 0


FAST_PATH = FastPath()

os.register_at_fork(after_in_child=FAST_PATH.renew)


def leaving_nested(call: Callable[..., Any]) -> Callable[..., Any]:
    """A module's ``__call__`` that leaves strided nested inputs to torch's fast path; they are counted."""

    @functools.wraps(call)
    def run(module: Any, *arguments: Any, **named: Any) -> Any:
        x = arguments[0] if arguments else next(iter(named.values()), None)
        if not (isinstance(x, Tensor) and x.is_nested and x.layout == torch.strided):
            return call(module, *arguments, **named)
        count("nested tensors")
        with FAST_PATH.taken():
            return call(module, *arguments, **named)

    return run
