"""Calls whose arguments do not fit a function's signature: Python refuses them before the function runs."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pyattn.distributed.agreement.ranks import agree, ranks_of

Function = TypeVar("Function", bound=Callable[..., Any])


def all_hear(function: Function) -> Function:
    """Lets all ranks raise if one rank's call lacks an argument or gives one twice.

    The ranks are those of its argument ``group`` or ``mesh``. Without ranks there, the call raises alone.
    """
    parameters = inspect.signature(function).parameters
    group = next(parameters[name] for name in ("group", "mesh") if name in parameters)
    place = [*parameters].index(group.name)

    @functools.wraps(function)
    def called(*positional: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*positional, **named)
        try:
            return function(*positional, **named)
        except TypeError as error:
            ran = error.__traceback__ is not None and error.__traceback__.tb_next is not None
            given = positional[place] if len(positional) > place else named.get(group.name, group.default)
            if not ran and (given is None or isinstance(given, (dist.ProcessGroup, DeviceMesh))):
                agree(function.__name__, ranks_of(given), {}, [], error)
            raise

    return cast(Function, called)
