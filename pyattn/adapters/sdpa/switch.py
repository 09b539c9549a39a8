"""A switch that sends torch's own ``scaled_dot_product_attention`` on the CPU to the native kernels.

It registers kernels for the operator itself with torch's dispatcher, so it reaches every caller: names bound before it
was switched on, C++, ``nn.MultiheadAttention``, ``nn.TransformerEncoderLayer``. These modules' inference fast path,
``torch._native_multi_head_attention``, has its own attention, so it is off while the switch is on
(``torch.backends.mha.set_fastpath_enabled``), and they call the operator in eval mode too.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nested._internal import ops as jagged

from pyattn import attention
from pyattn.adapters.dispatcher import Kernels
from pyattn.adapters.sdpa import at_once, graphs
from pyattn.adapters.sdpa.arguments import attend
from pyattn.adapters.sdpa.call_counts import TAKEN, TRACED, count
from pyattn.adapters.sdpa.jagged import taking_jagged
from pyattn.adapters.sdpa.modules import FAST_PATH, WANTED, LeftError, leaving_nested, taking_weights
from pyattn.adapters.sdpa.refusals import refusal, rule_of

_OPERATOR = torch.ops.aten.scaled_dot_product_attention.default
_COMPILER_TAG = "pyattn-sdpa"


def _native(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Native attention if its rules take the call, else None; the call is counted."""
    wanted = WANTED.get()
    compute = attention if wanted is None else wanted.attend
    try:
        reason = refusal(query, key, value, attn_mask)
        if reason is None:
            out = attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, compute)
    except (TypeError, ValueError, NotImplementedError) as refused:
        reason = rule_of(refused)
    if reason is None:
        count(TRACED if torch.compiler.is_compiling() or isinstance(query, FakeTensor) else TAKEN)
        return out
    count(reason)
    if wanted is not None:
        raise LeftError
    return None


def _attend(*arguments: Any, **named: Any) -> Any:
    """The operator's kernel for all but plain calls (csrc/ops/sdpa.cpp): native attention, else torch's own."""
    left = torch._C._are_functorch_transforms_active()  # to torch, by the kernel before the transforms
    out = None if left else _native(*arguments, **named)
    return _OPERATOR.decompose(*arguments, **named) if out is None else out


def _attend_transformed(theirs: Callable[..., Any], query: Tensor, *arguments: Any, **named: Any) -> Any:
    """The kernel before all transforms of torch.func, which ``theirs`` applies.

    vmap splits the operator into others before the kernels on a device see it, and these have no forward mode.
    """
    out = _native(query, *arguments, **named) if query.device.type == "cpu" else None
    return theirs(query, *arguments, **named) if out is None else out


def _leave_nested(*arguments: Any, **named: Any) -> Any:
    """The kernel for nested tensors in torch's strided layout."""
    count("nested tensors")
    return _OPERATOR.decompose(*arguments, **named)


at_once.take_others(_attend)

_REPLACED: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (torch.nn.functional, "multi_head_attention_forward", taking_weights),
    (torch.nn.MultiheadAttention, "__call__", leaving_nested),
    (torch.nn.TransformerEncoderLayer, "__call__", leaving_nested),
    (jagged, "jagged_scaled_dot_product_attention", taking_jagged),
)
"""Functions of torch that the operator's kernels don't reach: owner, name, and what makes the function in its place."""


class _Installation:
    """The kernels in the dispatcher and everything that goes with them, from construction to :meth:`remove`."""

    def __init__(self) -> None:
        name = _OPERATOR.name()
        nested, transformed = (name, "AutogradNestedTensor"), (name, "FuncTorchDynamicLayerFrontMode")
        self._kernels = Kernels({nested: _leave_nested}, {transformed: _attend_transformed})
        at_once.switch(True)
        FAST_PATH.switch_off()
        self._functions = [(owner, name, vars(owner).get(name)) for owner, name, _ in _REPLACED]
        for owner, name, replace in _REPLACED:
            setattr(owner, name, replace(getattr(owner, name)))
        self._tag = torch.compiler.config.cache_key_tag
        torch.compiler.config.cache_key_tag = self._tag + _COMPILER_TAG
        _OPERATOR._dispatch_cache.clear()

    def remove(self) -> None:
        """Restores everything as it was."""
        at_once.switch(False)
        self._kernels.remove()
        for owner, name, function in self._functions:
            if function is None:  # inherited
                delattr(owner, name)
            else:
                setattr(owner, name, function)
        FAST_PATH.restore()
        torch.compiler.config.cache_key_tag = self._tag
        _OPERATOR._dispatch_cache.clear()


class _Switch:
    """The users of the kernels: :func:`enable`, and each open block of :func:`enabled`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.enabled = False
        self.blocks = 0
        self.installation: _Installation | None = None

    def change(self, *, enabled: bool | None = None, blocks: int = 0) -> None:
        with graphs.compiling(), self.lock:
            self.enabled = self.enabled if enabled is None else enabled
            self.blocks += blocks
            wanted = self.enabled or self.blocks > 0
            if wanted == (self.installation is not None):
                return
            graphs.keep_apart(not wanted, is_enabled)
            if self.installation is None:
                self.installation = _Installation()
            else:
                self.installation.remove()
                self.installation = None


_switch = _Switch()


def _renew_lock() -> None:
    """Replaces the lock in a child process, which has no other threads but inherits the locks they held."""
    _switch.lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


def enable() -> None:
    """Sends torch's ``scaled_dot_product_attention`` on the CPU to the native kernels until :func:`disable`.

    Results, gradients, errors and autocast are as torch documents them; dropout draws other weights than torch's from
    the same generator. A mask may come with ``is_causal``, also with dropout or with a gradient of the mask. Transforms
    of ``torch.func`` and forward-mode differentiation work up to second derivatives. Jagged nested tensors are computed
    as packed sequences, also those for which torch has no kernel.

    Calls that the native kernels do not take go to torch, and :func:`pyattn.adapters.sdpa.counts` shows why: other
    dtypes, nested tensors in the strided layout or with a mask, distributed tensors, invalid arguments, whose errors
    stay torch's own, third derivatives, transforms in compiled code, ``torch.func.functionalize`` and ``linearize``,
    and calls within a ``torch.nn.attention.sdpa_kernel`` that excludes FLASH_ATTENTION, the backend that this one
    replaces. Calls on other devices are neither touched nor counted.

    torch turns a tensor given as ``scale`` into a float before it comes here: it raises if the tensor requires a
    gradient and drops its tangent in forward mode. :func:`pyattn.adapters.sdpa.scaled_dot_product_attention` has both.

    ``nn.MultiheadAttention`` comes here with ``need_weights=False`` and, uncompiled, with True: the weights are native
    too, and 0 where a query sees no key. Its inference fast path, and that of ``nn.TransformerEncoder``, is off while
    the switch is on: padded rows then hold numbers where the fast path may put zeros. Only strided nested tensors,
    which torch takes on no other path, still take it, and are counted.

    ``torch.compile`` takes the native operator into its graphs. Functions compiled before are recompiled at their next
    call, and after :func:`disable` run again as they were; exported programs don't change.
    ``torch.compiler.config.cache_key_tag`` separates the caches of compiled code on disk.

    The switch is global to the process, affects all threads, and may be changed
    from any of them at any time. Enabling it twice is harmless.
    """
    _switch.change(enabled=True)


def disable() -> None:
    """Undoes :func:`enable`. Blocks of :func:`enabled` that are still open keep the switch on."""
    _switch.change(enabled=False)


@contextmanager
def enabled() -> Iterator[None]:
    """:func:`enable` within a block. Blocks may be nested, and overlap in several threads; all threads are affected."""
    _switch.change(blocks=1)
    try:
        yield
    finally:
        _switch.change(blocks=-1)


def is_enabled() -> bool:
    """Whether the switch is on."""
    return _switch.installation is not None
