"""Recorded score_mods as programs with names, which the operators of compiled graphs take in place of functions.

dynamo inlines a score_mod for one pair, under a mode that it traces as well: the calls are constants, what they capture
are values of the graph. So it guards on all that the score_mod reads, also inside closures and modules, and the
score_mod may be defined, and its tensors computed, in the graph.
"""

import hashlib
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from pyattn.adapters.flex.compiled import operators
from pyattn.adapters.flex.trace.evaluation import Lookups

Function = TypeVar("Function", bound=Callable[..., object])

Encoded = tuple[str, Any]
"""One of ``("argument" or "captured" or "number" or "result", its number)``, ``("part", (result, place))``,
``("constant", x)``, ``("abs", code)``, ``("tuple" or "list" or "slice", parts)``, ``("dict", ((name, part), ...))``."""

RecordedCall = tuple[Any, Encoded, Encoded]
"""A function with its arguments, encoded, and its named ones."""


FROM_ARRAYS = torch.as_tensor, torch.asarray, torch.tensor


class Recording(Lookups):
    """The calls of functions of torch while it is active.

    Attributes:
        calls: in order.
        captured: the tensors that come from elsewhere.
        numbers: ints and floats, which may be symbolic.
        tensors, codes: all tensors that occurred, each with its code.
        switches: whether gradients are switched on or off in between, which calls don't tell.
    """

    def __init__(self, arguments: Sequence[Tensor]) -> None:
        super().__init__()
        self.calls: list[RecordedCall] = []
        self.captured: list[Tensor] = []
        self.numbers: list[float] = []
        self.switches: bool = False
        self._differentiable = torch.is_grad_enabled()
        self.tensors: list[Tensor] = list(arguments)
        self.codes: list[Encoded] = [("argument", number) for number in range(len(arguments))]

    def encoded(self, x: Any) -> Encoded:
        """``x`` as a constant, apart from tensors and numbers."""
        if isinstance(x, Tensor):
            for tensor, code in zip(self.tensors, self.codes, strict=True):
                if tensor is x:  # dynamo can't trace id
                    return code
            self.captured.append(x)
            return self._named(x, ("captured", len(self.captured) - 1))
        if isinstance(x, tuple | list):
            return "tuple" if isinstance(x, tuple) else "list", tuple([self.encoded(part) for part in x])
        if isinstance(x, slice):
            return "slice", tuple([self.encoded(part) for part in (x.start, x.stop, x.step)])
        if isinstance(x, dict):
            return "dict", tuple([(name, self.encoded(part)) for name, part in x.items()])
        if isinstance(x, int | float) and not isinstance(x, bool):
            self.numbers.append(x)
            return "number", len(self.numbers) - 1
        return "constant", x

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in FROM_ARRAYS and args and not isinstance(args[0], Tensor | tuple | list | int | float | complex):
            # The graph takes an array as a tensor.
            return super().__torch_function__(func, types, args, kwargs)
        self.switches = self.switches or torch.is_grad_enabled() != self._differentiable
        call = len(self.calls)
        self.calls.append((func, self.encoded(tuple(args)), self.encoded(kwargs or {})))
        result = super().__torch_function__(func, types, args, kwargs)
        if isinstance(result, Tensor):
            self._named(result, ("result", call))
        elif isinstance(result, tuple | list):
            for place, x in enumerate(result):
                if isinstance(x, Tensor):
                    self._named(x, ("part", (call, place)))
        return result

    def _named(self, x: Tensor, code: Encoded) -> Encoded:
        self.tensors.append(x)
        self.codes.append(code)
        return code


class Program:
    """The calls of a score_mod, and which of their results it returned."""

    def __init__(self, calls: tuple[RecordedCall, ...], result: Encoded) -> None:
        self._calls, self._result = calls, result

    def score_mod(self, captured: Sequence[Tensor], numbers: Sequence[float]) -> Callable[..., Tensor]:
        """The score_mod that captures these."""
        given: dict[str, Sequence[Any]] = {"captured": captured, "number": numbers}

        def score_mod(*arguments: Tensor) -> Any:
            results = list[Any]()
            known = given | {"argument": arguments, "result": results}
            for function, places, named in self._calls:
                results.append(function(*_decoded(places, known), **_decoded(named, known)))
            return _decoded(self._result, known)

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
    return abs(_decoded(x, known)) if kind == "abs" else known[kind][x]


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
def name_of(calls: tuple[RecordedCall, ...], result: Encoded, absolute: tuple[tuple[int, Encoded], ...] = ()) -> str:
    """The program's name, the same in each process, so a graph that is read from a cache runs no other program.

    ``absolute``: the numbers of captured tensors that are the abs of others, and these.
    """
    calls = tuple((function, *(_replaced(code, dict(absolute)) for code in given)) for function, *given in calls)
    result = _replaced(result, dict(absolute))
    key = calls, result
    if key not in _names:
        functions = [f"{getattr(call[0], '__module__', None)}.{getattr(call[0], '__name__', None)}" for call in calls]
        written = repr((functions, [call[1:] for call in calls], result))
        name = f"score_mod {hashlib.sha256(written.encode()).hexdigest()[:16]}"
        while name in PROGRAMS:  # of functions that share their names
            name += "+"
        _names[key], PROGRAMS[name] = name, Program(calls, result)
    return _names[key]


def _replaced(code: Any, absolute: dict[int, Encoded]) -> Any:
    """``code`` with the abs of others in place of the captured tensors with these numbers."""
    if not isinstance(code, tuple):
        return code
    if code[:1] == ("captured",) and code[1] in absolute:
        return "abs", _replaced(absolute[code[1]], absolute)
    return tuple(_replaced(part, absolute) for part in code)


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
def captures_arguments(captured: int, absolute: tuple[int, ...]) -> bool:
    """Whether the last ``scored`` of dynamo's graph reads what depends on the score_mod's arguments.

    dynamo hides from modes attributes such as ``x.mT`` and the parts in ``x, y = z``.

    Args:
        captured: which argument of the operator has the captured tensors.
        absolute: the numbers of those that don't count.
    """
    found, dependent = False, set[object]()
    for node in _nodes():
        if node.target is operators.arguments:
            dependent = {node}
        elif not dependent.isdisjoint(node.all_input_nodes):
            dependent.add(node)
        if node.target is torch.ops.pyattn_flex.scored.default:
            found = any(x in dependent for number, x in enumerate(node.args[captured]) if number not in absolute)
    return found
