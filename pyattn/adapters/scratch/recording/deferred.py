"""Tensors whose values are computed when something reads them.

A :class:`Deferred` is a wrapper: it has a shape, strides, a dtype, a device and torch's ``grad_fn``, but no memory. It
lies below autograd: every operator on it meets ``__torch_dispatch__``, which computes it with torch's own kernels, so
the gradient of whatever is computed in this way is torch's own.
"""

import enum
import weakref
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from pyattn.adapters.scratch.recording.chain import Chain
from pyattn.adapters.scratch.recording.expressions import Expression
from pyattn.adapters.scratch.recording.session import Product


class Memory:
    """Cells that a reader takes for one piece of memory: a tensor, its views, its detached aliases."""

    __slots__ = ("cells", "changed")

    def __init__(self) -> None:
        self.cells: weakref.WeakSet[Cell] = weakref.WeakSet()
        self.changed: bool = False


class Cell:
    """The content of a wrapper tensor: an expression and, if it is a part of attention, its meaning.

    ``edge`` is the autograd node that the recorded operator gave the wrapper. Another one means that something else,
    such as a caller's own ``autograd.Function``, has taken the tensor since.
    """

    __slots__ = ("__weakref__", "chain", "edge", "expression", "memory", "product")

    def __init__(
        self,
        expression: Expression,
        product: Product | None,
        chain: Chain | None = None,
        memory: Memory | None = None,
    ) -> None:
        self.expression: Expression = expression
        self.product: Product | None = product
        self.chain: Chain | None = chain
        self.edge: tuple[str, int] | None = None
        self.memory: Memory = Memory() if memory is None else memory
        self.memory.cells.add(self)

    @property
    def meaning(self) -> Chain | None:
        """The chain, unless something has changed the memory or looked into the gradient's path."""
        hidden = self.memory.changed or self.product is None or self.product.watched
        return None if hidden else self.chain


D = TypeVar("D", bound="Deferred")


class Deferred(Tensor):
    """A tensor that stands for an expression. Everything works on it; reading it computes it."""

    cell: Cell

    @staticmethod
    def __new__(cls: type[D], cell: Cell, size: Any, stride: Any, like: Tensor, dtype: torch.dtype | None = None) -> D:
        """A wrapper around ``cell`` with the dtype, unless given, and the device of ``like``."""
        made: D = torch.Tensor._make_wrapper_subclass(
            cls, size, strides=stride, dtype=like.dtype if dtype is None else dtype, device=like.device
        )
        made.cell = cell
        return made

    def __init__(self, *_: Any) -> None:
        pass

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if foreign(types):
            args, kwargs = tree_map_only(Deferred, plain, (args, kwargs))
            return func(*args, **kwargs)
        args, kwargs = prepared(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return computed(func, args, kwargs or {})


class _Kind(enum.Enum):
    ORDINARY = enum.auto()
    OF_GRADIENTS = enum.auto()
    OF_MEMORY = enum.auto()
    OF_DATA = enum.auto()


_OF_GRADIENTS = frozenset(
    (
        "grad_fn",
        "register_hook",
        "requires_grad_",
        "retain_grad",
        "register_post_accumulate_grad_hook",
        "grad",
        "backward",
        "_backward_hooks",
    )
)
"""Functions that look at or change the gradient of scores, which are then computed as they were written."""

_OF_MEMORY = frozenset(
    (
        *("numpy", "tolist", "item", "data_ptr", "untyped_storage", "storage", "storage_type", "_typed_storage"),
        *("__array__", "__dlpack__", "__dlpack_device__", "__cuda_array_interface__", "__reduce_ex__", "__deepcopy__"),
        *("__repr__", "__format__", "__str__", "share_memory_", "is_shared", "is_pinned", "pin_memory", "to_sparse"),
    )
)
"""Functions that need a tensor with memory."""


_kinds: dict[Any, _Kind] = {}


def _kind(func: Any) -> _Kind:
    name = getattr(func, "__name__", "")
    assigned = name == "__set__"
    if assigned or name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", "")
    kind = _Kind.ORDINARY
    if assigned:
        kind = _Kind.OF_DATA if name == "data" else _Kind.OF_GRADIENTS
    elif name in _OF_GRADIENTS:
        kind = _Kind.OF_GRADIENTS
    elif name in _OF_MEMORY:
        kind = _Kind.OF_MEMORY
    _kinds[func] = kind
    return kind


def prepared(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments for a function of torch, of which some are deferred: plain where it needs memory."""
    kind = _kinds.get(func) or _kind(func)
    if kind is _Kind.OF_GRADIENTS:
        for x in tree_deferred((args, kwargs)):
            with torch._C.DisableTorchFunctionSubclass():
                differentiable = not x.is_leaf
            if x.cell.product is not None:
                x.cell.product.watch(getattr(func, "__name__", "grad_fn"), differentiable)
    elif kind is _Kind.OF_MEMORY:
        args, kwargs = tree_map_only(Deferred, plain, (args, kwargs))
    elif kind is _Kind.OF_DATA:
        args = _assigned(*args)
    return args, kwargs


def _assigned(target: Tensor, data: Tensor) -> tuple[Tensor, Tensor]:
    """The arguments of ``target.data = data``."""
    data = plain(data) if isinstance(data, Deferred) else data
    if isinstance(target, Deferred):
        settle(target.cell)
        target.cell.expression = Expression.of(data.detach(), [])
    return target, data


def foreign(types: Any) -> bool:
    """Whether tensors of somebody else's class, which has its own functions, meet deferred ones."""
    return any(x is not Tensor and not issubclass(x, Deferred | torch.nn.Parameter) for x in types)


def tree_deferred(tree: Any) -> list["Deferred"]:
    """The deferred tensors in ``tree``."""
    found: list[Deferred] = []
    tree_map_only(Deferred, found.append, tree)
    return found


class _Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, deferred: Tensor) -> Tensor:
        assert isinstance(deferred, Deferred)
        return value(deferred).view(deferred.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def plain(deferred: Deferred) -> Tensor:
    """A tensor with the same memory, values and gradient that has nothing deferred."""
    out: Tensor = _Plain.apply(deferred)  # type: ignore[no-untyped-call]
    return out


def value(deferred: Deferred) -> Tensor:
    """The values, without a gradient."""
    return deferred.cell.expression.compute()


def settle(cell: Cell) -> None:
    """Computes what is still to be read from ``cell``'s memory, which is about to change, and forgets its meaning."""
    if cell.product is not None:
        cell.product.settle()
    for other in list(cell.memory.cells):
        other.expression.compute()
    cell.memory.changed = True


def computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func`` by torch's kernels, on the values of the deferred arguments."""
    aliased = {}
    for x in tree_deferred((args, kwargs)):
        if x.cell.product is not None:
            x.cell.product.leave(func._schema.name.removeprefix("aten::"))
    for argument, given in _given(func._schema, args, kwargs):
        if argument.alias_info is None or argument.name == "":
            continue
        if argument.alias_info.is_write and isinstance(given, list):  # whose tensors torch does not count changes of
            torch.autograd.graph.increment_version(
                [x for x in given if not (isinstance(x, Deferred) or x.is_inference())]
            )
        for x in tree_deferred(given):
            settle(x.cell)
            if argument.alias_info.is_write:
                aliased[id(value(x))] = x
    args, kwargs = tree_map_only(Deferred, value, (args, kwargs))
    with torch.no_grad():
        out = func(*args, **kwargs)
    return tree_map_only(Tensor, lambda x: aliased.get(id(x), x), out) if aliased else out


def _given(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Any, Any]]:
    pairs = list(zip(schema.arguments, args, strict=False))
    return pairs + [(argument, kwargs[argument.name]) for argument in schema.arguments if argument.name in kwargs]
