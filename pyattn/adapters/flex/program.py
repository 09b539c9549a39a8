"""Recorded score_mods as programs with names, which the operators of compiled graphs take in place of functions."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from pyattn.adapters.flex.recording import Call, Encoded

Function = TypeVar("Function", bound=Callable[..., object])


class Program:
    """The calls of a score_mod, and which of their results it returned."""

    def __init__(self, calls: tuple[Call, ...], result: Encoded) -> None:
        self._calls, self._result = calls, result

    def score_mod(self, captured: Sequence[Tensor], numbers: Sequence[float]) -> Callable[..., Tensor]:
        """The score_mod that captures these."""
        given: dict[str, Sequence[Any]] = {"captured": captured, "number": numbers}

        def score_mod(*arguments: Tensor) -> Tensor:
            results = list[Any]()
            known = given | {"argument": arguments, "result": results}
            for function, places, named in self._calls:
                results.append(function(*_decoded(places, known), **_decoded(named, known)))
            result: Tensor = _decoded(self._result, known)
            return result

        return score_mod


def _decoded(code: Encoded, known: dict[str, Any]) -> Any:
    kind, x = code
    if kind == "constant":
        return x
    if kind == "tuple":
        return tuple(_decoded(part, known) for part in x)
    if kind == "list":
        return [_decoded(part, known) for part in x]
    if kind == "dict":
        return {name: _decoded(part, known) for name, part in x}
    if kind == "slice":
        return slice(*(_decoded(part, known) for part in x))
    if kind == "part":
        return known["result"][x[0]][x[1]]
    return known[kind][x]


PROGRAMS: dict[str, Program] = {}
"""By name, as long as the process lives: a graph may run at any time."""

_names: dict[tuple[Any, ...], str] = {}


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
def name_of(calls: tuple[Call, ...], result: Encoded) -> str:
    """The program's name, the same in each process, so a graph that is read from a cache runs no other program."""
    key = calls, result
    if key not in _names:
        functions = [f"{getattr(call[0], '__module__', None)}.{getattr(call[0], '__name__', None)}" for call in calls]
        written = repr((functions, [call[1:] for call in calls], result))
        name = f"score_mod {hashlib.sha256(written.encode()).hexdigest()[:16]}"
        while name in PROGRAMS:  # of functions that share their names
            name += "+"
        _names[key], PROGRAMS[name] = name, Program(calls, result)
    return _names[key]


@_constant
def captures_arguments(captured: int) -> bool:
    """Whether the last ``scored`` of dynamo's graph reads what depends on the score_mod's arguments.

    dynamo hides from modes attributes such as ``x.mT`` and the parts in ``x, y = z``.

    Args:
        captured: which argument of the operator has the captured tensors.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    found, dependent = False, set[object]()
    for node in InstructionTranslator.current_tx().output.graph.nodes:
        if node.target is torch.ops.pyattn_flex.arguments.default:
            dependent = {node}
        elif not dependent.isdisjoint(node.all_input_nodes):
            dependent.add(node)
        if node.target is torch.ops.pyattn_flex.scored.default:
            found = not dependent.isdisjoint(node.args[captured])
    return found
