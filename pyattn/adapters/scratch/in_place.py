"""Functions of torch that may change a tensor in place or hand its memory to somebody who may, told by their names."""

from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_iter

from pyattn.adapters.scratch.recording.deferred import Deferred

_AUGMENTED = {"__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "and", "or", "xor", "pow"))}
_MEMORY = {"numpy", "__array__", "__dlpack__", "untyped_storage", "storage", "_typed_storage", "data_ptr"}
_KNOWN: dict[Any, str] = {}

CHANGED = "queries, keys or a mask changed in place"


def changes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], str]:
    """The tensors with memory that ``func`` may change, and how, the reason why products that read them are left."""
    change = _change(func, kwargs)
    if not change:
        return [], ""
    first = args and not kwargs and isinstance(args[0], Tensor) and not isinstance(func, OpOverload)
    changing = args[:1] if first else tree_iter((args, kwargs))
    return [x for x in changing if isinstance(x, Tensor) and not isinstance(x, Deferred)], change


def _change(func: Any, kwargs: dict[str, Any]) -> str:
    known = _KNOWN.get(func)
    if known is None:
        name = getattr(func, "__name__", "")
        changing = (name.endswith("_") and not name.endswith("__")) or name in _AUGMENTED
        changing = changing or (isinstance(func, OpOverload) and func._schema.is_mutable)
        changing = changing or name == "__set__" or name.endswith("_backward")
        shared = f"memory of queries, keys or a mask is handed out ({name})" if name in _MEMORY else ""
        known = _KNOWN[func] = CHANGED if changing else shared
    return known or (CHANGED if "out" in kwargs or kwargs.get("inplace", False) is True else "")
