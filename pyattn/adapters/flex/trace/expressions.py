"""The calls that a mod makes, as expressions, and how they depend on the positions of query and key."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


def _functions(*names: str) -> frozenset[Any]:
    """Functions and methods of torch under these names: another library's ``add`` may be no sum."""
    return frozenset(getattr(place, name) for place in (torch, Tensor) for name in names if hasattr(place, name))


SUMS: dict[Any, tuple[int, int]] = {
    **dict.fromkeys(_functions("add"), (1, 1)),
    **dict.fromkeys(_functions("sub", "subtract"), (1, -1)),
    **dict.fromkeys(_functions("rsub", "__rsub__"), (-1, 1)),
}
"""Functions that return the sum of two arguments, each with this sign."""

PRODUCTS = _functions("mul", "multiply")
QUOTIENTS = _functions("div", "true_divide")
NEGATIONS = _functions("neg", "negative")
TANH = _functions("tanh")
CASTS = _functions("long", "to")
EQUALITIES = _functions("eq", "ne", "__eq__", "__ne__")
COMPARISONS = EQUALITIES | _functions("ge", "gt", "le", "lt", "__ge__", "__gt__", "__le__", "__lt__")

READS_NO_VALUES = _functions(
    *("new_empty", "new_full", "new_ones", "new_zeros"), *("empty_like", "full_like", "ones_like", "zeros_like")
)
"""Functions whose results don't depend on the values of their first argument."""

EXACT = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool})
"""Types whose values int64 holds."""

POSITIONS = 2**40
"""More than any length: a mod is evaluated for tensors of positions, which would take 8 TB."""

ARGUMENTS = ("score", "b", "h", "q_idx", "kv_idx")


@dataclass(frozen=True)
class Argument:
    """One of a score_mod's ARGUMENTS, by its number."""

    number: int
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Node:
    """A call of a function of torch, which gave one tensor of this dtype.

    Its arguments are nodes, the score_mod's arguments, captured tensors and constants.
    """

    function: Any
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """The function's name."""
        return getattr(self.function, "__name__", "")

    @functools.cached_property
    def form(self) -> "Form":
        """The node's form, computed once."""
        return _form_of(self)


class Form(NamedTuple):
    """The dependence of an expression on the arguments.

    Attributes:
        slopes: (x, y) of an int64 that is ``x * q_idx + y * kv_idx + constant`` modulo 2^64; None for all others.
        reads: for others, names out of ARGUMENTS and "distance", for ``kv_idx - q_idx``.
        size: with slopes, a bound on the magnitude of that sum; below 2^63, no operation on the way overflows.
    """

    slopes: tuple[int, int] | None
    reads: frozenset[str] = frozenset()
    size: int = 0

    def depends_on(self) -> frozenset[str]:
        """The names for an expression of any form."""
        if self.slopes is None:
            return self.reads
        if sum(self.slopes) == 0:
            return frozenset({"distance"} if self.slopes[0] else ())
        return frozenset(name for name, slope in zip(ARGUMENTS[3:], self.slopes, strict=True) if slope)


def form_of(x: object) -> Form:
    """The form of an expression; captured tensors are constants."""
    if isinstance(x, Node):
        return x.form
    if isinstance(x, Argument):
        name = ARGUMENTS[x.number]
        slopes = {"q_idx": (1, 0), "kv_idx": (0, 1)}.get(name)
        return Form(slopes, frozenset({name}) if slopes is None else frozenset(), POSITIONS)
    is_integer = isinstance(x, int) or (isinstance(x, Tensor) and x.dim() == 0 and x.dtype in EXACT)
    return Form((0, 0), size=abs(int(x))) if is_integer else Form(None)  # type: ignore[call-overload]


def reads_score(x: object) -> bool:
    """Whether an expression depends on the score."""
    return "score" in form_of(x).depends_on()


def signs(node: Node) -> tuple[int, int] | None:
    """The signs of the two arguments of which a node is the sum; None for other nodes, and sums with ``alpha``."""
    return SUMS.get(node.function) if len(node.arguments) == 2 and not node.named else None


def _form_of(node: Node) -> Form:
    linear = _linear(node) if node.dtype == torch.int64 else None
    if linear is not None:
        return linear
    forms = [form_of(x) for x in leaves(node)[bool(node.arguments) and node.function in READS_NO_VALUES :]]
    if node.function in COMPARISONS and len(forms) == 2:
        difference = _sum(forms, (1, -1))
        # Numbers are equal modulo 2^64 if their difference is 0. Their order follows from it unless one has overflown.
        exact = node.function in EQUALITIES or max(form.size for form in forms) < 2**63
        if difference is not None and exact:
            return Form(None, difference.depends_on())
    # A function of expressions depends on no more than they do, whatever it computes.
    return Form(None, frozenset[str]().union(*(form.depends_on() for form in forms)))


def _linear(node: Node) -> Form | None:
    """The form of an int64 that is linear in the positions: sums, differences and multiples wrap modulo 2^64."""
    each, forms = signs(node), [form_of(x) for x in node.arguments]
    if each is not None:
        return _sum(forms, each)
    if node.function in CASTS and forms and forms[0].slopes is not None:
        return forms[0]  # was an int64, or is a constant that int64 holds
    if node.function in NEGATIONS and len(forms) == 1:
        return _sum(forms, (-1,))
    number = next((n for n in node.arguments if type(n) is int), None)
    if node.function in PRODUCTS and len(forms) == 2 and number is not None:
        return _sum([form for x, form in zip(node.arguments, forms, strict=True) if x is not number], (number,))
    return None


def _sum(forms: Sequence[Form], factors: Sequence[int]) -> Form | None:
    """The form of the sum of multiples; None if a summand is not linear."""
    total, size = (0, 0), 0
    for form, factor in zip(forms, factors, strict=True):
        if form.slopes is None:
            return None
        total = total[0] + factor * form.slopes[0], total[1] + factor * form.slopes[1]
        size += abs(factor) * form.size
    return Form(total, size=size)


def leaves(node: Node) -> list[Any]:
    """All arguments of a node, also those in lists."""
    found = list[Any]()
    mapped(found.append, (node.arguments, node.named))
    return found


def mapped(function: Callable[[Any], Any], x: Any) -> Any:
    """``x`` with ``function`` of all inside it that is no tuple, list, dict or slice."""
    if isinstance(x, tuple):
        return tuple([mapped(function, part) for part in x])
    if isinstance(x, list):
        return [mapped(function, part) for part in x]
    if isinstance(x, dict):
        return {name: mapped(function, part) for name, part in x.items()}
    if isinstance(x, slice):
        return slice(*[mapped(function, part) for part in (x.start, x.stop, x.step)])
    return function(x)


def tensors_in(x: object) -> list[Tensor]:
    """The captured tensors of an expression, each once."""
    found, nodes, waiting = dict[int, Tensor](), set[int](), [x]
    while waiting:
        y = waiting.pop()
        if isinstance(y, Tensor):
            found[id(y)] = y
        elif isinstance(y, Node) and id(y) not in nodes:
            nodes.add(id(y))
            waiting += leaves(y)
    return list(found.values())


def value_of(x: Any, inputs: tuple[Any, ...], known: dict[int, Any]) -> Any:
    """The value of an expression for these values of ARGUMENTS; ``known`` has those of nodes, by id.

    An expression that depends on no argument needs no ``inputs``.
    """

    def value(y: Any) -> Any:
        if isinstance(y, Argument):
            return inputs[y.number] if inputs else torch.zeros((), dtype=y.dtype)
        return known[id(y)] if isinstance(y, Node) else y

    waiting = [x] if isinstance(x, Node) else []
    while waiting:  # no recursion, which long score_mods would exceed
        node = waiting[-1]
        missing = [y for y in leaves(node) if isinstance(y, Node) and id(y) not in known]
        if not missing and id(waiting.pop()) not in known:
            given, named = mapped(value, (node.arguments, node.named))
            known[id(node)] = node.function(*given, **named)
        waiting += missing
    return value(x)
