"""The recorder of mask_mods and score_mods: the calls of functions of torch that one makes for a single pair.

Eager code runs it, and dynamo traces it: there the calls are constants, and what they read are values of the graph.
"""

from collections.abc import Callable, Sequence
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from pyattn.adapters.flex.trace.evaluation import Lookups
from pyattn.adapters.flex.trace.expressions import mapped

RecordedCall = tuple[Any, Any, Any]
"""A function with its arguments and its named ones, in which tensors and numbers have names: "%argument0", "%captured0"
and "%number0", "%0" for the result of the first call, and "%0.1" for its second part if it is a sequence."""

CONSTANTS = str, bool, type, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None), type(...)
"""Types of constants besides numbers: equal ones mean the same."""


class Recording(Lookups):
    """The calls of functions of torch while it is active.

    Args:
        arguments: the mod's.
        copied: gives what is read in place of a captured tensor, before the call that reads it first.

    Attributes:
        calls: in order.
        dtypes: each call's result as its dtype, a sequence as a tuple of them; None for what is no tensor.
        names: all tensors that occurred, each with its name.
        captured: the tensors that come from elsewhere.
        read: what ``copied`` gave for each.
        numbers: ints and floats, which may be symbolic, and other numbers.
        is_known: whether all other objects in the calls are CONSTANTS.
        switches: whether gradients are switched on or off in between.
    """

    def __init__(self, arguments: Sequence[Tensor], copied: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.calls: list[RecordedCall] = []
        self.dtypes: list[Any] = []
        # By tensors: dynamo can't trace id.
        self.names: dict[Tensor, str] = {x: f"%argument{number}" for number, x in enumerate(arguments)}
        self.captured: list[Tensor] = []
        self.read: list[Tensor] = []
        self.numbers: list[Any] = []
        self.is_known: bool = True
        self.switches: bool = False
        self._has_tensors = self._has_objects = False
        self._copied, self._differentiable = copied, torch.is_grad_enabled()

    def named(self, x: Any) -> Any:
        """The name of a tensor or number; a constant as it is."""
        if isinstance(x, Tensor):
            self._has_tensors = True
            if x not in self.names:
                self.names[x] = f"%captured{len(self.captured)}"
                self.captured.append(x)
                self.read.append(self._copied(x))
            return self.names[x]
        if isinstance(x, CONSTANTS):
            return x
        if isinstance(x, Number):
            self.numbers.append(x)
            return f"%number{len(self.numbers) - 1}"
        self._has_objects = True
        return x

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._has_tensors = self._has_objects = False
        call = func, mapped(self.named, tuple(args)), mapped(self.named, kwargs or {})
        if self._has_objects and not self._has_tensors:  # as_tensor(array): the result is captured
            return super().__torch_function__(func, types, args, kwargs)
        self.is_known = self.is_known and not self._has_objects
        switched = func is torch._C._set_grad_enabled or torch.is_grad_enabled() != self._differentiable
        self.switches = self.switches or switched  # dynamo hides the call
        result, name = super().__torch_function__(func, types, args, kwargs), f"%{len(self.calls)}"
        self.calls.append(call)
        if isinstance(result, tuple | list):
            self.names.update({x: f"{name}.{place}" for place, x in enumerate(result) if isinstance(x, Tensor)})
            self.dtypes.append(tuple([x.dtype if isinstance(x, Tensor) else None for x in result]))
        else:
            self.names.update({result: name} if isinstance(result, Tensor) else {})
            self.dtypes.append(result.dtype if isinstance(result, Tensor) else None)
        return result


class Program:
    """The calls of a mod, and what it returned, by its name.

    ``absolute``: the names of captured tensors that are the abs of others, and those of these.
    """

    def __init__(self, calls: Sequence[RecordedCall], returned: Any, absolute: Sequence[tuple[str, str]] = ()) -> None:
        self._calls, self._returned, self._absolute = calls, returned, dict(absolute)

    def replayed(
        self,
        arguments: Sequence[Any],
        captured: Sequence[Any],
        numbers: Sequence[Any],
        call: Callable[..., Any] = lambda function, given, named: function(*given, **named),
    ) -> Any:
        """The mod's result for these values, where ``call`` gives the result of each call in turn."""
        values = {"%argument": arguments, "%captured": captured, "%number": numbers}
        known = {f"{kind}{number}": x for kind, each in values.items() for number, x in enumerate(each)}

        def value(x: Any) -> Any:
            if not isinstance(x, str):
                return x
            return abs(value(self._absolute[x])) if x in self._absolute else known.get(x, x)

        for number, (function, given, named) in enumerate(self._calls):
            known[f"%{number}"] = result = call(function, mapped(value, given), mapped(value, named))
            if isinstance(result, tuple | list):
                known.update({f"%{number}.{place}": x for place, x in enumerate(result)})
        return mapped(value, self._returned)
