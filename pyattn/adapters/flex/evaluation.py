"""Runs mask_mods and score_mods that users write: over blocks of pairs, and once to record what they compute."""

import functools
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from pyattn.adapters.flex.graph import ARGUMENTS, READS_NO_VALUES, Argument, Node, flattened, unflattened

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def uncompiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Runs ``function`` outside of compiled graphs, which would keep a mod's meaning after it has changed."""
    rule = "pyattn: mask_mods and score_mods of your own must run outside of compiled graphs"

    @functools.wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if torch.compiler.is_exporting():
            raise NotImplementedError(f"{rule}, got torch.export")
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break(msg=f"{rule}, got fullgraph=True")
        if "torch._dynamo" not in sys.modules:  # importing it takes a second
            return function(*args, **kwargs)
        result: Result = torch.compiler.disable(function)(*args, **kwargs)
        return result

    return run


class Lookups(TorchFunctionMode):
    """Makes ``table[h, q_idx - kv_idx]`` work under vmap, where Python's indexing would read scalars as ints.

    Args:
        captured: tensors that a mod reads from outside its arguments.
        replaced: the tensor to read in place of each.
        sums: None, or for each of them where to add gradients with respect to its elements that are looked up.
    """

    def __init__(
        self,
        captured: Sequence[Tensor] = (),
        replaced: Sequence[Tensor] = (),
        sums: Sequence[Tensor] | None = None,
    ) -> None:
        super().__init__()
        self._replaced = {id(x): other for x, other in zip(captured, replaced, strict=True)}
        self._sums = {id(x): total for x, total in zip(replaced, sums or (), strict=sums is not None)}

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if self._replaced:
            args, named = tree_map_only(Tensor, lambda x: self._replaced.get(id(x), x), (tuple(args), named))
        if func is Tensor.__getitem__:
            table, places = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(place, Tensor) for place in places) and all(map(_is_place, places)):
                tensors = [torch.as_tensor(place, device=table.device) for place in places]
                if self._sums and id(table) in self._sums:
                    return _look_up(table, self._sums[id(table)], *tensors)
                return torch.ops.aten.index.Tensor(table, tensors)
        return func(*args, **named)


@functools.cache
def _keys_of_a_thread() -> tuple[torch._C.DispatchKeySet, torch._C.DispatchKeySet]:
    with ThreadPoolExecutor(1) as pool:
        both = torch._C._dispatch_tls_local_include_set, torch._C._dispatch_tls_local_exclude_set
        return pool.submit(lambda: (both[0](), both[1]())).result()


def as_outermost(function: Callable[[], Result]) -> Result:
    """Runs ``function`` as a new thread would. Inside an operator, autograd and vmap do not work."""
    with torch.inference_mode(False), torch._C._ForceDispatchKeyGuard(*_keys_of_a_thread()), torch.enable_grad():
        return function()


def _is_place(index: object) -> bool:
    return isinstance(index, int | Tensor) and not isinstance(index, bool)


class _Lookup(torch.autograd.Function):
    """``table[places]``. Its gradient goes to the elements of a sum: blocks of pairs need no gradient of the table."""

    @staticmethod
    def forward(table: Tensor, total: Tensor, *places: Tensor) -> Tensor:
        found: Tensor = torch.ops.aten.index.Tensor(table, places)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        _, ctx.total, *places = inputs
        ctx.save_for_backward(*places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        ctx.total.index_put_(ctx.saved_tensors, gradient.to(ctx.total.dtype), accumulate=True)
        return (None,) * (2 + len(ctx.saved_tensors))

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], table: Tensor, total: Tensor, *places: Tensor) -> Any:
        """Mapped places get their dimension in front, before those of all others."""
        dims = in_dims[2:]
        most = max(x.dim() - (dim is not None) for x, dim in zip(places, dims, strict=True))
        moved = [x if dim is None else _in_front(x, dim, most) for x, dim in zip(places, dims, strict=True)]
        return _look_up(table, total, *moved), 0


def _look_up(table: Tensor, total: Tensor, *places: Tensor) -> Tensor:
    found: Tensor = _Lookup.apply(table, total, *places)  # type: ignore[no-untyped-call]
    return found


def _in_front(x: Tensor, dim: int, dims: int) -> Tensor:
    first, *others = x.movedim(dim, 0).shape
    return x.movedim(dim, 0).reshape(first, *(1,) * (dims - len(others)), *others)


def over_pairs(mod: Callable[..., Tensor], places: Sequence[Tensor], *scores: Tensor) -> Tensor:
    """``mod`` for all pairs, (B, H, rows, keys).

    Args:
        mod: a mask_mod, or a score_mod with ``scores``.
        places: the indices b, h, q_idx and kv_idx, each of 1 dimension and not empty.
        scores: nothing, or the scores (B, H, rows, keys).
    """
    function = mod
    for mapped in reversed(range(4)):  # the innermost vmap comes first and maps over keys
        dims = tuple(0 if index == mapped else None for index in range(4))
        function = torch.vmap(function, in_dims=(*(0 for _ in scores), *dims))
    return function(*scores, *places)


def over_distances(mod: Callable[..., Tensor], batch: Tensor, heads: Tensor, lengths: tuple[int, int]) -> Tensor:
    """``mod`` for all distances ``kv_idx - q_idx`` from ``1 - Sq`` to ``Sk - 1``, (B, H, Sq - 1 + Sk).

    Args:
        mod: a function of b, h and the distance; it takes the arguments of a mask_mod.
        batch, heads: the indices b and h, as for :func:`over_pairs`.
        lengths: (Sq, Sk), at least 1 each.
    """
    zero, (queries, keys) = batch.new_zeros(1), (torch.arange(n, device=batch.device) for n in lengths)
    found = over_pairs(mod, [batch, heads, zero, keys]).flatten(2)
    if len(queries) == 1:
        return found
    return torch.cat([over_pairs(mod, [batch, heads, queries[1:].flip(0), zero]).flatten(2), found], 2)


class Trace(Lookups):
    """One run of a mod for a single pair: which functions of torch it calls, with which constants and tensors.

    A mod can't branch on the values of its arguments, so the calls decide its meaning.

    Args:
        what: the mod's name in errors.
        mod: a mask_mod, or a score_mod with ``dtype``.
        dtype: the scores'.

    Attributes:
        captured: the tensors that the mod reads from outside its arguments.
        reads: the arguments on which the result depends, by number.
        dtype: the result's.
        result: the mod's result as an expression; None if a function that it calls gives several tensors, changes one,
            perhaps through a view, or computes one unseen, as in TorchScript: there ``reads`` has all arguments.

    Raises:
        TypeError: a mod that returns no tensor.
        ValueError: a mod that returns a tensor with dimensions.
    """

    captured: list[Tensor]
    reads: frozenset[int]
    dtype: torch.dtype
    result: Any

    def __init__(
        self, what: str, mod: Callable[..., Tensor], device: torch.device, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self._calls: list[tuple[Any, ...]] = []
        self._made: dict[int, tuple[Tensor, tuple[Any, ...], frozenset[int]]] = {}
        self._objects: list[object] = []
        self._nodes: dict[int, Any] = {}
        self._is_expression = True
        self.captured = []
        indices = [torch.zeros(1, dtype=torch.int64, device=device)] * 4

        def single(*inputs: Tensor) -> Tensor:
            for number, x in enumerate(inputs):
                self._made[id(x)] = x, ("argument", number), frozenset({number})
                self._nodes[id(x)] = Argument(number + len(ARGUMENTS) - len(inputs))
            with self:
                result: object = mod(*inputs)
            if not isinstance(result, Tensor):
                raise TypeError(f"pyattn: {what} must return a tensor, got {result!r}")
            if result.dim():
                raise ValueError(f"pyattn: {what} must return one value for a pair, got shape {tuple(result.shape)}")
            self._calls.append(("return", self._name(result)))
            unseen = any(torch._C._functorch.is_batchedtensor(x) for x in self.captured)
            self._is_expression &= not unseen
            self.dtype, self.reads = result.dtype, frozenset(range(len(inputs))) if unseen else self._reads(result)
            self.result = self._nodes.get(id(result), result) if self._is_expression else None
            return result

        with torch.no_grad():  # so only captured tensors can require a gradient
            torch.vmap(single)(*(() if dtype is None else [torch.zeros(1, dtype=dtype, device=device)]), *indices)
        self._made.clear()
        self._nodes.clear()
        self._versions = [_version(x) for x in self.captured]

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        inputs, structure = flattened(args, kwargs or {})
        names = [self._name(x) for x in inputs]
        given, named = unflattened([self._nodes.get(id(x), x) for x in inputs], structure)
        result = super().__torch_function__(func, types, args, kwargs)
        known = frozenset().union(*[self._reads(x) for x in inputs][func in READS_NO_VALUES :])
        written = args[0] if func is Tensor.__setitem__ else result
        leaves = [written] if isinstance(written, Tensor) else tree_leaves(written)
        for place, x in enumerate(leaves):
            if isinstance(x, Tensor):
                self._made[id(x)] = x, ("result", len(self._calls), place), known
        if isinstance(written, Tensor):
            self._nodes[id(written)] = node = Node(func, given, named, written.dtype)
            self._is_expression &= node.pure
        elif any(isinstance(x, Tensor) for x in leaves):
            self._is_expression = False
        self._calls.append((func, structure, names))
        return result

    def repeats(self, other: "Trace") -> bool:
        """Whether both runs computed the same function, of the same tensors, which have not changed in between."""
        same = [id(x) for x in self.captured] == [id(x) for x in other.captured]
        return same and self._versions == other._versions and self._calls == other._calls

    def _name(self, x: object) -> tuple[Any, ...]:
        if not isinstance(x, Tensor):
            plain = isinstance(x, int | float | complex | str | slice | torch.dtype | torch.device | type(None))
            self._objects += () if plain else (x,)  # alive, so their ids stay theirs
            return type(x), repr(x) if plain else id(x)
        if id(x) not in self._made:
            self._made[id(x)] = x, ("captured", len(self.captured)), frozenset()
            self.captured.append(x)
        return self._made[id(x)][1]

    def _reads(self, x: object) -> frozenset[int]:
        return self._made[id(x)][2] if id(x) in self._made else frozenset()


def _version(x: Tensor) -> object:
    return object() if x.is_inference() else x._version  # inference tensors count no versions: never equal
