"""Recognition in the graphs that dynamo traces, whichever backend compiles them.

A module's hooks are traced where its caller is. Those of a module that is compiled by itself, or whose forward breaks
its graph, run before and after that graph: they enter a mode, through which dynamo traces every function of torch.
"""

import sys
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from pyattn.adapters.scratch.recognition import Recognition


class _Compiling(TorchFunctionMode):
    """Has the attention replaced in each graph that is traced while it is on."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling():
            in_this_graph()
        return func(*args, **(kwargs or {}))


_mode = _Compiling()


def in_this_graph() -> None:
    """Called while dynamo traces: has the attention of its graph replaced before the graph is compiled."""
    from torch._dynamo.comptime import comptime

    from pyattn.adapters.scratch.graphs import before_compiling

    comptime(before_compiling)


Recognition.traced = staticmethod(in_this_graph)


def begin(hooks: str) -> None:
    """Called while dynamo traces a hook of the Python module ``hooks``, before a module's forward."""
    if _is_by_itself(hooks):
        torch.overrides._push_mode(_mode)
    else:
        in_this_graph()


def end(hooks: str) -> None:
    """The same after the forward, which dynamo does not trace after an error."""
    ended = _is_by_itself(hooks) if torch.compiler.is_dynamo_compiling() else sys.exc_info()[0] is not None
    if ended and torch.overrides._get_current_function_mode() is _mode:
        torch.overrides._pop_mode()


def _is_by_itself(hooks: str) -> bool:
    from pyattn.adapters.scratch.graphs import is_outermost

    outermost: bool = is_outermost(hooks)
    return outermost
