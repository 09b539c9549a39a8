"""Recorded score_mods as programs with names, which the operators of compiled graphs take in place of functions.

dynamo inlines a score_mod for one pair, under a mode that it traces as well: the calls are constants, what they capture
are values of the graph. So it guards on all that the score_mod reads, also inside closures and modules, and the
score_mod may be defined, and its tensors computed, in the graph.
"""

import hashlib
import operator
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from pyattn.adapters.flex.compiled import operators
from pyattn.adapters.flex.trace.recording import Program, RecordedCall
from pyattn.locks import Lock

Function = TypeVar("Function", bound=Callable[..., object])


PROGRAMS: dict[str, Program] = {}
"""By name, as long as the process lives: a graph may run at any time."""

_names: dict[tuple[Any, ...], str] = {}
_lock = Lock()


def _constant(function: Function) -> Function:
    """:func:`torch.compiler.assume_constant_result`, without importing dynamo, which takes a second."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_constant
def graph_in_progress() -> str | None:
    """The name of the graph that dynamo builds; None outside of dynamo."""
    graph = torch._guards.CompileContext.current_compile_id()
    return None if graph is None else str(graph)


@_constant
def name_of(calls: tuple[RecordedCall, ...], returned: Any, absolute: tuple[tuple[str, str], ...] = ()) -> str:
    """The name of a :class:`Program`, the same in each process, so a graph from a cache runs no other program."""
    functions = tuple(function for function, *_ in calls)
    called = [
        f"{getattr(function, '__module__', None)}.{getattr(function, '__name__', None)}" for function in functions
    ]
    key = functions, repr((called, [given for _, *given in calls], returned, absolute))
    with _lock:  # or two threads give two programs one name
        if key not in _names:
            name = f"score_mod {hashlib.sha256(key[1].encode()).hexdigest()[:16]}"
            while name in PROGRAMS:  # of functions that share their names
                name += "+"
            _names[key], PROGRAMS[name] = name, Program(calls, returned, absolute)
        return _names[key]


@_constant
def absolute_among(captured: int, tensors: int) -> tuple[tuple[int, int], ...]:
    """The captured tensors that Python's ``abs`` made: the number of each, and that of its argument among all tensors.

    dynamo hides ``abs`` from modes. The last nodes of its graph are ``copied`` of all captured tensors, then of all.
    """
    marked = [node.args[0] for node in _nodes() if node.target is operators.copied]
    marked = marked[len(marked) - captured - tensors :]
    all_tensors = {node: number for number, node in enumerate(marked[captured:])}
    made = [(number, node) for number, node in enumerate(marked[:captured]) if node.target is operator.abs]
    return tuple((number, all_tensors[node.args[0]]) for number, node in made if node.args[0] in all_tensors)


@_constant
def calls_abs() -> bool:
    """Whether dynamo's graph has a call of Python's ``abs``."""
    return any(node.target is operator.abs for node in _nodes())


def _nodes() -> Any:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return InstructionTranslator.current_tx().output.graph.nodes


@_constant
def captures_arguments(captured: int, absolute: tuple[str, ...]) -> bool:
    """Whether the last ``scored`` of dynamo's graph reads what depends on the score_mod's arguments.

    dynamo hides from modes attributes such as ``x.mT`` and the parts in ``x, y = z``.

    Args:
        captured: which argument of the operator has the captured tensors.
        absolute: the names of those that don't count.
    """
    found, dependent = False, set[object]()
    for node in _nodes():
        if node.target is operators.arguments:
            dependent = {node}
        elif not dependent.isdisjoint(node.all_input_nodes):
            dependent.add(node)
        if node.target is torch.ops.pyattn_flex.scored.default:
            names = {f"%captured{number}": x for number, x in enumerate(node.args[captured])}
            found = any(x in dependent for name, x in names.items() if name not in absolute)
    return found
