"""Functions of torch that may change a tensor in place or hand its memory to somebody who may, told by their names."""

from typing import Any

from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._pytree import tree_iter

from pyattn.adapters.scratch.recording.deferred import Deferred
from pyattn.adapters.scratch.recording.session import HANDED_OUT

_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_AUGMENTED = {"__setitem__", *(f"__i{name}__" for name in _OPERATORS)}
_STATISTICS = {"batch_norm", "instance_norm", "native_batch_norm", "fused_moving_avg_obs_fake_quant"}
"""Functions that update running statistics, which may be any of their arguments."""

_MEMORY = {"numpy", "__array__", "__dlpack__", "untyped_storage", "storage", "_typed_storage", "data_ptr"}
_KNOWN: dict[Any, str] = {}

CHANGED = "queries, keys or a mask changed in place"


def changes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], str]:
    """The tensors with memory that ``func`` may change, and how, the reason why products that read them are left."""
    change = _change(func, kwargs)
    if not change:
        return [], ""
    first = args and not kwargs and isinstance(args[0], Tensor) and not _may_change_any(func)
    changing = args[:1] if first else tree_iter((args, kwargs))
    return [x for x in changing if isinstance(x, Tensor) and not isinstance(x, Deferred)], change


def _may_change_any(func: Any) -> bool:
    """Whether ``func`` may change other arguments than the first."""
    return isinstance(func, OpOverload | OpOverloadPacket) or getattr(func, "__name__", "") in _STATISTICS


def _is_mutable(func: Any, *, outs: bool = True) -> bool:
    """Whether the schema of the operator ``func`` says that it changes an argument, or one that is no out.

    Most packets have an overload with outs, which a call then names.
    """
    if isinstance(func, OpOverloadPacket):
        return any(_is_mutable(getattr(func, name), outs=False) for name in func.overloads())
    if not isinstance(func, OpOverload):
        return False
    arguments = func._schema.arguments
    return any(x.alias_info is not None and x.alias_info.is_write and (outs or not x.is_out) for x in arguments)


def _names_outs(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether ``kwargs`` has an out of an overload of the packet ``func``, such as ``max_values``."""
    if not kwargs or not isinstance(func, OpOverloadPacket):
        return False
    schemas = (getattr(func, name)._schema for name in func.overloads())
    return any(x.is_out and x.name in kwargs for schema in schemas for x in schema.arguments)


def _change(func: Any, kwargs: dict[str, Any]) -> str:
    known = _KNOWN.get(func)
    if known is None:
        name = getattr(func, "__name__", "")
        changing = (name.endswith("_") and not name.endswith("__")) or name in _AUGMENTED | _STATISTICS
        changing = changing or _is_mutable(func)
        changing = changing or name in ("__set__", "triton_kernel_wrapper_mutation") or name.endswith("_backward")
        shared = f"{HANDED_OUT} ({name})" if name in _MEMORY else ""
        known = _KNOWN[func] = CHANGED if changing else shared
    now = "out" in kwargs or kwargs.get("inplace", False) is True or kwargs.get("max_norm") is not None
    return known or (CHANGED if now or _names_outs(func, kwargs) else "")
