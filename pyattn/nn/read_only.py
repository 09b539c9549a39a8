"""A tensor that is computed when read, so that writing to it must not pass silently."""

from typing import Any

import torch
from torch import Tensor


class ReadOnlyMask(Tensor):
    """A module's causal mask as it was read: computed, not held, so writing to it would change nothing, and raises.

    So does writing to a view of it. Results in separate memory are plain tensors.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls ``func``; RuntimeError if it writes to a read-only mask."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        written = [kwargs.get("out"), *(args[:1] if _writes(name) or kwargs.get("inplace") else ())]
        if any(isinstance(t, cls) for t in written):
            raise RuntimeError(
                f"pyattn: mask must be assigned, not changed in place, because it is computed when read, got {name}; "
                "write module.mask = a changed copy"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            memory = {t.untyped_storage().data_ptr() for t in args if isinstance(t, cls)}

            def typed(t: Any) -> Any:
                if not isinstance(t, Tensor):
                    return t
                return t.as_subclass(cls if t.untyped_storage().data_ptr() in memory else Tensor)

            return type(result)(map(typed, result)) if type(result) in (tuple, list) else typed(result)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


def _writes(function: str) -> bool:
    """Whether a method of this name writes to its tensor: ``zero_``, ``__setitem__``, ``__iand__``."""
    if function.startswith("__"):
        return function in _IN_PLACE
    return function.endswith("_") and function != "requires_grad_"


_IN_PLACE = {"__setitem__", *(f"__i{name}__" for name in ("and", "or", "xor", "lshift", "rshift", "mod", "pow"))}
