"""The calls that a score_mod makes, as expressions, and how they depend on the positions of query and key."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

EXACT = frozenset({torch.float32, torch.float64, torch.int32, torch.int64})
"""Types that hold every position."""

READS_NO_VALUES = frozenset(
    {
        Tensor.new_empty,
        Tensor.new_full,
        Tensor.new_ones,
        Tensor.new_zeros,
        torch.empty_like,
        torch.full_like,
        torch.ones_like,
        torch.zeros_like,
    }
)
"""Functions whose results don't depend on the values of their first argument."""

COMPARISONS = frozenset(
    {"eq", "ge", "gt", "le", "lt", "ne", "__eq__", "__ge__", "__gt__", "__le__", "__lt__", "__ne__"}
)

ARGUMENTS = ("score", "b", "h", "q_idx", "kv_idx")


class Argument(NamedTuple):
    """One of a score_mod's ARGUMENTS, by its number."""

    number: int


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

    @property
    def pure(self) -> bool:
        """Whether the function changes no tensor."""
        special = self.name.startswith("__")
        in_place = self.name.startswith(("__i", "__set")) if special else self.name.endswith("_")
        return "out" not in self.named and (not in_place or self.name == "__invert__")


LEAVES = (Tensor, int, float, complex, str, torch.dtype, torch.device, type(None))
"""Types of arguments that hold no others."""


def flattened(args: Sequence[Any], named: dict[str, Any]) -> tuple[list[Any], TreeSpec | None]:
    """The leaves of a call's arguments and their structure: None if all are LEAVES, where torch's own takes 40 us."""
    if not named and all(isinstance(x, LEAVES) for x in args):
        return list(args), None
    return tree_flatten((tuple(args), named))


def unflattened(leaves: list[Any], structure: TreeSpec | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with these leaves."""
    return (tuple(leaves), {}) if structure is None else tree_unflatten(leaves, structure)


class Form(NamedTuple):
    """The dependence of an expression on the arguments.

    Attributes:
        slopes: (x, y) of a number ``x * q_idx + y * kv_idx + constant``; None if it is another function.
        reads: for other functions, names out of ARGUMENTS and "distance", for ``kv_idx - q_idx``.
    """

    slopes: tuple[int, int] | None
    reads: frozenset[str] = frozenset()

    def depends_on(self) -> frozenset[str]:
        """The names for an expression of any form."""
        if self.slopes is None:
            return self.reads
        if sum(self.slopes) == 0:
            return frozenset({"distance"} if self.slopes[0] else ())
        return frozenset(name for name, slope in zip(ARGUMENTS[3:], self.slopes, strict=True) if slope)


def form_of(x: object) -> Form:
    """The form of an expression; captured tensors are constants."""
    if isinstance(x, Argument):
        name = ARGUMENTS[x.number]
        slopes = {"q_idx": (1, 0), "kv_idx": (0, 1)}.get(name)
        return Form(slopes, frozenset() if slopes else frozenset({name}))
    return x.form if isinstance(x, Node) else Form((0, 0))


def reads_score(x: object) -> bool:
    """Whether an expression depends on the score."""
    return "score" in form_of(x).depends_on()


def _form_of(node: Node) -> Form:
    forms = [form_of(x) for x in leaves(node)[bool(node.arguments) and node.function in READS_NO_VALUES :]]
    slopes = [form.slopes for form in forms if form.slopes is not None]
    exact = node.dtype in EXACT and not node.named and len(slopes) == len(forms)
    if exact and len(forms) == 2:
        (x, y), (other_x, other_y) = slopes
        if node.name in ("add", "sub", "__rsub__"):
            sign, other = {"add": (1, 1), "sub": (1, -1), "__rsub__": (-1, 1)}[node.name]
            return Form((sign * x + other * other_x, sign * y + other * other_y))
        number = next((n for n in node.arguments if type(n) is int), None)
        if node.name == "mul" and number is not None:
            return Form((number * (x + other_x), number * (y + other_y)))  # the number's own slopes are 0
    if len(slopes) == len(forms) == 2 and node.name in COMPARISONS:
        return Form(None, Form((slopes[0][0] - slopes[1][0], slopes[0][1] - slopes[1][1])).depends_on())
    first = forms[0].slopes if forms else None
    if first is not None and node.dtype in EXACT and node.name in ("double", "float", "int", "long", "to"):
        return Form(first)
    if first is not None and node.name == "neg":
        return Form((-first[0], -first[1]))
    return Form(None, frozenset[str]().union(*(form.depends_on() for form in forms)))


def leaves(node: Node) -> list[Any]:
    """All arguments of a node, also those in lists."""
    return tree_leaves((node.arguments, node.named), is_leaf=_is_leaf)


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
    """The value of an expression for these values of ARGUMENTS; ``known`` has those of nodes, by id."""

    def value(y: Any) -> Any:
        return inputs[y.number] if isinstance(y, Argument) else known[id(y)] if isinstance(y, Node) else y

    waiting = [x] if isinstance(x, Node) else []
    while waiting:  # no recursion, which long score_mods would exceed
        node = waiting[-1]
        missing = [y for y in leaves(node) if isinstance(y, Node) and id(y) not in known]
        if not missing and id(waiting.pop()) not in known:
            given, named = tree_map(value, (node.arguments, node.named), is_leaf=_is_leaf)
            known[id(node)] = node.function(*given, **named)
        waiting += missing
    return value(x)


def _is_leaf(x: object) -> bool:
    return isinstance(x, Argument | Node | Tensor)
