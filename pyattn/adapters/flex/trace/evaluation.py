"""Runs mask_mods and score_mods that users write, over blocks of pairs."""

import functools
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


_elements: Callable[[Tensor, Sequence[Tensor]], Tensor] = torch.ops.aten.index.Tensor


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
                return _elements(table, tensors)
        return func(*args, **named)


@functools.cache
def _keys_of_a_thread() -> tuple[torch._C.DispatchKeySet, torch._C.DispatchKeySet]:
    with ThreadPoolExecutor(1) as pool:
        both = torch._C._dispatch_tls_local_include_set, torch._C._dispatch_tls_local_exclude_set
        return pool.submit(lambda: (both[0](), both[1]())).result()


def outermost(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Runs ``function``, an operator's, as a new thread would: inside an operator, autograd and vmap do not work."""

    @functools.wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with torch.inference_mode(False), torch._C._ForceDispatchKeyGuard(*_keys_of_a_thread()), torch.enable_grad():
            return function(*args, **kwargs)

    return run


def _is_place(index: object) -> bool:
    return isinstance(index, int | Tensor) and not isinstance(index, bool)


class _Lookup(torch.autograd.Function):
    """``table[places]``. Its gradient goes to the elements of a sum: blocks of pairs need no gradient of the table."""

    @staticmethod
    def forward(table: Tensor, total: Tensor, *places: Tensor) -> Tensor:
        return _elements(table, places)

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


def over_pairs(
    mod: Callable[..., Tensor], places: Sequence[Tensor], *scores: Tensor, lookups: Lookups | None = None
) -> Tensor:
    """``mod`` for all pairs, (B, H, rows, keys).

    Args:
        mod: a mask_mod, or a score_mod with ``scores``.
        places: the indices b, h, q_idx and kv_idx, each of 1 dimension and not empty.
        scores: nothing, or the scores (B, H, rows, keys).
        lookups: what the mod reads in place of other tensors.
    """
    function = mod
    for mapped in reversed(range(4)):  # the innermost vmap comes first and maps over keys
        dims = tuple(0 if index == mapped else None for index in range(4))
        function = torch.vmap(function, in_dims=(*(0 for _ in scores), *dims))
    with lookups or Lookups():
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
