"""ATen operators on scores and weights, recorded instead of computed."""

import functools
from typing import Any

import torch
from torch import Tensor

from pyattn.adapters.scratch.recording.chain import Chain, LeftError
from pyattn.adapters.scratch.recording.deferred import Cell, Deferred, computed, value
from pyattn.adapters.scratch.recording.expressions import Expression, address
from pyattn.adapters.scratch.recording.leading import broadcast
from pyattn.adapters.scratch.recording.rows import MAXIMA, RowSum, column_of_sinks, drops_sinks, joined, maxima, sums
from pyattn.adapters.scratch.recording.session import HANDED_OUT
from pyattn.adapters.scratch.recording.steps import FILLS, IN_PLACE, STEPS, Arguments, assignment_as_fill

aten: Any = torch.ops.aten


class Scores(Deferred):
    """Scores or weights: operators that keep them a part of attention are recorded, others are computed."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            out = recorded(func, args, kwargs)
            return computed(func, args, kwargs) if out is None else out


_VIEWS = {aten.view.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default}
_TRANSPOSES = {aten.transpose.int, aten.permute.default, aten.t.default}
_PRODUCTS = {aten.bmm.default, aten.mm.default, aten.baddbmm.default}
_ALIASES = {aten.detach.default, aten.alias.default}
_LIKES = {
    *(aten.full_like.default, aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default),
    *(aten.new_full.default, aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default),
}
"""Operators that read a shape and a dtype, and no number."""

_BOUNDS = {aten.add.Tensor, aten.clamp.default, aten.clamp_min.default}
"""Operators that keep sums from being 0."""

_PUTS = {aten.index_put.default: aten.masked_fill.Tensor, aten.index_put_.default: aten.masked_fill_.Tensor}


def recorded(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """The deferred result of ``func``, or None if it has to be computed now."""
    if func in _ALIASES:
        return _alias(args[0])
    if func in _LIKES:
        x = args[0]
        return func(_shape_of(x), *args[1:], **kwargs | {"device": kwargs.get("device") or x.device})
    if func in _BOUNDS and (same := _same_sums(func, args, kwargs)) is not None:
        return same
    if func in _PUTS and (filled := assignment_as_fill(args)) is not None:
        func, args = _PUTS[func], filled
    if IN_PLACE.get(func) in FILLS and (scores := _scores_of(args[0])) is not None:
        return _continued(func, args, kwargs, 0, scores)
    for at, given in enumerate(args):
        for x in given if isinstance(given, list) else (given,):
            product = x.cell.product if isinstance(x, Deferred) else None
            if product is None:
                continue
            starting, chain = product.session.starting is product, x.cell.meaning
            if not starting and (chain is None or not product.session.recording):
                continue
            if _is_composite(func):
                return func.decompose(*args, **kwargs)
            if starting:
                return _started(func, args, kwargs, x)
            return _continued(func, args, kwargs, at, chain) if x is given else _joined(func, args, kwargs, x, chain)
    return None


@functools.cache
def _is_composite(func: Any) -> bool:
    """Whether ``func`` is made of other operators, which autograd splits up and inference mode does not."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


def _scores_of(data: Any) -> Chain | None:
    """The meaning of the scores whose memory ``data`` has, without their gradient: ``scores.data``."""
    if not isinstance(data, Scores) or data.cell.chain is not None:
        return None
    found = [y.meaning for y in data.cell.memory.cells if y.chain is not None]
    scores = found[0] if len(found) == 1 else None
    return scores if scores is not None and scores.product.session.recording else None


def _alias(x: Deferred) -> Scores:
    return Scores(Cell(x.cell.expression, x.cell.product, memory=x.cell.memory), x.shape, x.stride(), x)


def _started(func: Any, args: Arguments, kwargs: dict[str, Any], x: Deferred) -> Any:
    """Operators within one call that multiplies queries and keys: the product itself and views before and after it."""
    product, expression = x.cell.product, x.cell.expression
    if expression.operator is None:  # the queries themselves
        if func not in _PRODUCTS:
            out = func(*(value(y) if y is x else y for y in args), **kwargs)
            reads = expression.reads if address(out) == address(value(x)) else []
            return Scores(Cell(Expression.of(out, reads), product), out.shape, out.stride(), out)
        a, b = (y for y in args[-2:])
        size = (*a.shape[:-1], b.shape[-1])
    elif not (func in _VIEWS or func in (aten._unsafe_view.default, aten.permute.default)):
        return None
    else:
        return _view(func, args, x, None)
    return _deferred(func, args, kwargs, x, None, size)


def _shape_of(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _view(func: Any, args: Arguments, x: Deferred, chain: Chain | None) -> Scores:
    seen = func(_shape_of(x), *args[1:])
    memory = None if func is aten._unsafe_view.default else x.cell.memory
    assert x.cell.product is not None
    expression = x.cell.product.defer(Expression(func, (x.cell.expression, *args[1:])))
    return Scores(Cell(expression, x.cell.product, chain, memory), seen.shape, seen.stride(), x)


def _transposed(func: Any, args: Arguments, x: Deferred, chain: Chain) -> Scores:
    dims = func(torch.empty(tuple(range(x.dim())), device="meta"), *args[1:]).shape
    chain = chain.permuted(tuple(int(at) for at in dims))
    out = _view(func, args, x, None)
    out.cell.chain = chain
    return out


def _deferred(
    func: Any, args: Arguments, kwargs: dict[str, Any], x: Deferred, chain: Chain | None, size: Any, dtype: Any = None
) -> Scores:
    assert x.cell.product is not None
    expression = x.cell.product.defer(_expression(func, args, kwargs))
    stride = None if chain is None or x.is_contiguous() else _stride(func, args, kwargs)
    return Scores(Cell(expression, x.cell.product, chain), size, stride, x, dtype)


def _stride(func: Any, args: Arguments, kwargs: dict[str, Any]) -> tuple[int, ...]:
    """The strides that torch gives the result for scores that are not contiguous."""
    shapes = [_shape_of(y) if isinstance(y, Tensor) else y for y in args]
    given = {name: "meta" if name == "device" and y is not None else y for name, y in kwargs.items()}
    stride: tuple[int, ...] = func(*shapes, **given).stride()
    return stride


def _expression(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Expression:
    return Expression(func, tuple(y.cell.expression if isinstance(y, Deferred) else y for y in args), kwargs)


def _continued(func: Any, args: Arguments, kwargs: dict[str, Any], at: int, chain: Chain) -> Any:
    """An operator on scores or weights: its result, deferred, if it has a meaning."""
    x, product = args[at], chain.product
    try:
        if func in _TRANSPOSES:
            return _transposed(func, args, x, chain)
        if func in _VIEWS or func is aten._unsafe_view.default:
            out = _view(func, args, x, None)
            out.cell.chain = chain.viewed(tuple(out.shape))
            return out
        if func is aten.slice.Tensor and not kwargs and drops_sinks(chain, x, args):
            out = _view(func, args, x, None)
            out.cell.chain = chain.without_sinks()
            return out
        if func in MAXIMA or func is aten.sum.dim_IntList:
            chain.expect_order(func._schema.name.removeprefix("aten::"))
            return _of_rows(func, args, kwargs, x, chain)
        alone = IN_PLACE.get(func)
        step = STEPS.get(alone or func)
        if step is None:
            raise LeftError(func._schema.name.removeprefix("aten::"))
        dtype = _result_dtype(func, x, args, kwargs)
        if product.session.may_change_unnoticed(*args):
            raise LeftError(HANDED_OUT)
        chain = step(chain._replace(now=dtype), at, args, kwargs)._replace()  # the result has another autograd node
        product.read(*(y for y in args if not isinstance(y, Deferred)))
        if alone is None:
            return _deferred(func, args, kwargs, x, chain, x.shape, dtype)
        cells, old = list(x.cell.memory.cells), x.cell.expression
        # data has the memory of its scores; so have tensors saved for backward
        expected = 2 if x.cell.chain is None else 1
        shared = len(cells) > expected or any(y.expression is not old for y in cells)
        if at != 0 or shared or dtype != x.dtype or old.value is not None:
            raise LeftError("a change in place of scores that have views or were read")
    except LeftError as left:
        product.leave(str(left))
        return None
    made = product.defer(_expression(alone, args, kwargs))
    for cell in cells:
        cell.expression, cell.chain = made, None if cell.chain is None else chain
    return x


def _joined(func: Any, args: Arguments, kwargs: dict[str, Any], x: Deferred, chain: Chain) -> Scores | None:
    """Scores with a column of sinks."""
    try:
        if func is not aten.cat.default or kwargs or not x.is_contiguous():
            raise LeftError(func._schema.name.removeprefix("aten::"))
        dim = args[1] if len(args) > 1 else 0
        sinks = column_of_sinks(args[0], x, chain, dim)
        if chain.product.session.may_change_unnoticed(sinks):
            raise LeftError(HANDED_OUT)
        chain = chain.with_sinks(sinks)
    except LeftError as left:
        chain.product.leave(str(left))
        return None
    chain.product.read(sinks)
    expression = chain.product.defer(Expression(functools.partial(joined, dim), (x.cell.expression, sinks)))
    return Scores(Cell(expression, chain.product, chain), (*x.shape[:-1], x.shape[-1] + 1), None, x)


def _of_rows(func: Any, args: Arguments, kwargs: dict[str, Any], x: Deferred, chain: Chain) -> Any:
    """The maximum of each row of scores, and its place, or the sum of their exponentials."""
    if kwargs or chain.weights:
        raise LeftError(func._schema.name.removeprefix("aten::"))
    last, numbers = x.dim() - 1, x.cell.expression
    found = maxima(func, numbers, last, args) if func in MAXIMA else (sums(chain, numbers, last, args),)
    shape = (*x.shape[:-1], 1)
    made = [
        Scores(Cell(chain.product.defer(y), chain.product), shape, None, x, dtype)
        for y, dtype in zip(found, (x.dtype, torch.int64), strict=False)
    ]
    return made[0] if len(made) == 1 else tuple(made)


def _same_sums(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Scores | None:
    """Sums of exponentials after an operator that changes none of them."""
    x = args[0]
    known = x.cell.expression if isinstance(x, Scores) and not x.cell.memory.changed else None
    same = known.same(func, args, kwargs, x.dtype) if isinstance(known, RowSum) else None
    product = x.cell.product if same is not None else None
    if same is None or product is None or not product.session.recording:
        return None
    return Scores(Cell(product.defer(same), product), x.shape, None, x)


def _result_dtype(func: Any, x: Deferred, args: Arguments, kwargs: dict[str, Any]) -> torch.dtype:
    """The dtype of the result, which has the shape of ``x`` or is left."""
    if func in (aten._softmax.default, aten._log_softmax.default):
        return torch.float32 if args[2] else x.dtype
    dtype = kwargs.get("dtype") or x.dtype
    for y in args:
        if isinstance(y, Tensor) and y is not x:
            if broadcast(tuple(x.shape), tuple(y.shape)) != x.shape:
                raise LeftError("scores broadcast to a larger shape")
            if y.layout is not torch.strided or y.is_complex():
                raise LeftError(f"scores and a tensor of {y.layout} and {y.dtype}")
            if y.dim() and y.dtype != torch.bool:
                dtype = torch.promote_types(dtype, y.dtype)
    if not dtype.is_floating_point:
        raise LeftError(f"scores as {dtype}")
    return dtype
