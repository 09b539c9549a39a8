"""Functions of torch that may change a tensor in place, told by their names."""

from typing import Any

from torch._ops import OpOverload

_AUGMENTED = {"__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "and", "or", "xor", "pow"))}
_CHANGING: dict[Any, bool] = {}


def changes_in_place(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether ``func`` may change a tensor in place, as its name says."""
    known = _CHANGING.get(func)
    if known is None:
        name = getattr(func, "__name__", "")
        changing = (name.endswith("_") and not name.endswith("__")) or name in _AUGMENTED
        changing = changing or (isinstance(func, OpOverload) and func._schema.is_mutable)
        known = _CHANGING[func] = changing or (name == "__set__" or name.endswith("_backward"))
    return known or "out" in kwargs or kwargs.get("inplace", False) is True
