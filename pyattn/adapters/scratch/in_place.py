"""Functions of torch that may change a tensor in place or hand its memory to somebody who may, told by their names."""

from typing import Any

from torch._ops import OpOverload

_AUGMENTED = {"__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "and", "or", "xor", "pow"))}
_MEMORY = {"numpy", "__array__", "__dlpack__", "untyped_storage", "storage", "_typed_storage", "data_ptr"}
_KNOWN: dict[Any, str] = {}

CHANGED = "queries, keys or a mask changed in place"


def change_of(func: Any, kwargs: dict[str, Any]) -> str:
    """How ``func`` may change queries, keys or a mask, the reason why their product is left; empty if it does not."""
    known = _KNOWN.get(func)
    if known is None:
        name = getattr(func, "__name__", "")
        changing = (name.endswith("_") and not name.endswith("__")) or name in _AUGMENTED
        changing = changing or (isinstance(func, OpOverload) and func._schema.is_mutable)
        changing = changing or name == "__set__" or name.endswith("_backward")
        shared = f"memory of queries, keys or a mask is handed out ({name})" if name in _MEMORY else ""
        known = _KNOWN[func] = CHANGED if changing else shared
    return known or (CHANGED if "out" in kwargs or kwargs.get("inplace", False) is True else "")
