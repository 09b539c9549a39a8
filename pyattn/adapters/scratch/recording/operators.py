"""ATen operators that are recorded instead of computed, and what each means for scores or weights."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyattn.adapters.scratch.recording.chain import Chain, LeftError
from pyattn.adapters.scratch.recording.deferred import Cell, Deferred, computed, value
from pyattn.adapters.scratch.recording.expressions import Expression, Noise, address
from pyattn.adapters.scratch.recording.leading import broadcast

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


Arguments = tuple[Any, ...]
Step = Callable[[Chain, int, Arguments, dict[str, Any]], Chain]
"""(the chain of the argument at a place, that place, all arguments) -> the chain of the result."""


def number(x: Any) -> float | None:
    """``x`` as a number, if it is one and no gradient depends on it."""
    if isinstance(x, Tensor):
        constant = type(x) is Tensor and x.numel() == 1 and not x.requires_grad and x.dtype.is_floating_point
        return float(x.item()) if constant else None
    return float(x) if isinstance(x, int | float) and not isinstance(x, bool) else None


def _multiply(chain: Chain, at: int, args: Arguments, kwargs: dict[str, Any]) -> Chain:
    other = args[1 - at]
    if isinstance(other, Deferred):
        if isinstance(other.cell.expression, Noise):
            return chain.dropped(other.cell.expression)
        raise LeftError("a product of scores")
    if (c := number(other)) is not None:
        return chain.multiplied(c)
    if not isinstance(other, Tensor):
        raise LeftError("scores times a symbol")
    return chain.multiplied_by(other)


def _divide(chain: Chain, at: int, args: Arguments, kwargs: dict[str, Any]) -> Chain:
    c = number(args[1])
    if at != 0 or not c or kwargs:
        raise LeftError("scores divided by a tensor, or rounded")
    return chain.multiplied(1 / c)


def _sum(sign: float) -> Step:
    def step(chain: Chain, at: int, args: Arguments, kwargs: dict[str, Any]) -> Chain:
        other, alpha = args[1 - at], sign * kwargs.get("alpha", 1)
        if isinstance(other, Deferred):
            raise LeftError("a sum of scores")
        if at == 1 and alpha != 1:
            raise LeftError("scores subtracted or scaled in a sum")
        if not isinstance(other, Tensor) and number(other) == 0:
            return chain
        if number(alpha) is None or not isinstance(other, Tensor):
            raise LeftError("a sum with a number")
        return chain.plus(other, alpha)

    return step


def _fill(chain: Chain, at: int, args: Arguments, kwargs: dict[str, Any]) -> Chain:
    c = number(args[2])
    if at != 0 or c is None or (isinstance(args[2], Tensor) and args[2].dim()):
        raise LeftError("a fill with a tensor")
    if torch.finfo(args[0].dtype).max < abs(c) < math.inf:
        raise LeftError(f"a fill of {args[0].dtype} with {c}")
    return chain.filled(args[1], c)


def _where(chain: Chain, at: int, args: Arguments, kwargs: dict[str, Any]) -> Chain:
    c = number(args[3 - at]) if at else None
    if c is None:
        raise LeftError("where with another tensor")
    return chain.filled(args[0], c, where=at == 2)


def _maximum(chain: Chain, at: int, args: Arguments, kwargs: dict[str, Any]) -> Chain:
    c = number(args[1 - at])
    if c is None or not c < 0:
        raise LeftError("the larger of scores and a tensor")
    return chain.at_least(c)


def _triangle(*, upper: bool) -> Step:
    def step(chain: Chain, at: int, args: Arguments, kwargs: dict[str, Any]) -> Chain:
        return chain.triangle(args[1] if len(args) > 1 else kwargs.get("diagonal", 0), upper=upper)

    return step


def _cast(chain: Chain, at: int, args: Arguments, kwargs: dict[str, Any]) -> Chain:
    dense = (None, torch.preserve_format, torch.contiguous_format)
    others = {name for name, x in kwargs.items() if x is not None and name not in ("dtype", "non_blocking")}
    if others - {"device", "layout", "memory_format"} or kwargs.get("memory_format") not in dense:
        raise LeftError("a copy with " + ", ".join(sorted(others)))
    device, layout, dtype = kwargs.get("device"), kwargs.get("layout"), kwargs.get("dtype")
    if device not in (None, chain.q.tensor.device) or layout not in (None, torch.strided):
        raise LeftError("scores moved to another device or layout")
    return chain if dtype is None else chain.cast(dtype)


_STEPS: dict[Any, Step] = {
    aten.mul.Tensor: _multiply,
    aten.mul.Scalar: _multiply,
    aten.div.Tensor: _divide,
    aten.div.Scalar: _divide,
    aten.add.Tensor: _sum(1),
    aten.sub.Tensor: _sum(-1),
    aten.tanh.default: lambda chain, at, args, kwargs: chain.capped_by_tanh(),
    aten.masked_fill.Scalar: _fill,
    aten.masked_fill.Tensor: _fill,
    aten.where.self: _where,
    aten.where.ScalarOther: _where,
    aten.where.ScalarSelf: _where,
    aten.maximum.default: _maximum,
    aten.tril.default: _triangle(upper=False),
    aten.triu.default: _triangle(upper=True),
    aten._softmax.default: lambda chain, at, args, kwargs: chain.softmax(args[1]),
    aten._to_copy.default: _cast,
    aten.clone.default: _cast,
}

_IN_PLACE = {
    aten.mul_.Tensor: aten.mul.Tensor,
    aten.mul_.Scalar: aten.mul.Scalar,
    aten.div_.Tensor: aten.div.Tensor,
    aten.div_.Scalar: aten.div.Scalar,
    aten.add_.Tensor: aten.add.Tensor,
    aten.sub_.Tensor: aten.sub.Tensor,
    aten.tanh_.default: aten.tanh.default,
    aten.masked_fill_.Scalar: aten.masked_fill.Scalar,
    aten.masked_fill_.Tensor: aten.masked_fill.Tensor,
    aten.tril_.default: aten.tril.default,
    aten.triu_.default: aten.triu.default,
}

_VIEWS = {aten.view.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default}
_PRODUCTS = {aten.bmm.default, aten.mm.default, aten.baddbmm.default}
_ALIASES = {aten.detach.default, aten.alias.default}


def recorded(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """The deferred result of ``func``, or None if it has to be computed now."""
    if func in _ALIASES:
        return _alias(args[0])
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
            return _continued(func, args, kwargs, at, chain) if x is given else None
    return None


@functools.cache
def _is_composite(func: Any) -> bool:
    """Whether ``func`` is made of other operators, which autograd splits up and inference mode does not."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


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


def _view(func: Any, args: Arguments, x: Deferred, chain: Chain | None) -> Scores:
    shape_only = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    seen = func(shape_only, *args[1:])
    memory = None if func is aten._unsafe_view.default else x.cell.memory
    assert x.cell.product is not None
    expression = x.cell.product.defer(Expression(func, (x.cell.expression, *args[1:])))
    return Scores(Cell(expression, x.cell.product, chain, memory), seen.shape, seen.stride(), x)


def _deferred(
    func: Any, args: Arguments, kwargs: dict[str, Any], x: Deferred, chain: Chain | None, size: Any, dtype: Any = None
) -> Scores:
    assert x.cell.product is not None
    expression = x.cell.product.defer(_expression(func, args, kwargs))
    return Scores(Cell(expression, x.cell.product, chain), size, None, x, dtype)


def _expression(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Expression:
    return Expression(func, tuple(y.cell.expression if isinstance(y, Deferred) else y for y in args), kwargs)


def _continued(func: Any, args: Arguments, kwargs: dict[str, Any], at: int, chain: Chain) -> Any:
    """An operator on scores or weights: its result, deferred, if it has a meaning."""
    x, product = args[at], chain.product
    try:
        if func in _VIEWS or func is aten._unsafe_view.default:
            out = _view(func, args, x, None)
            out.cell.chain = chain.viewed(tuple(out.shape))
            return out
        alone = _IN_PLACE.get(func)
        step = _STEPS.get(alone or func)
        if step is None:
            raise LeftError(func._schema.name.removeprefix("aten::"))
        dtype = _result_dtype(func, x, args, kwargs)
        chain = step(chain, at, args, kwargs)._replace()  # another chain: the result has another autograd node
        product.read(*(y for y in args if not isinstance(y, Deferred)))
        if alone is None:
            return _deferred(func, args, kwargs, x, chain, x.shape, dtype)
        if at != 0 or len(x.cell.memory.cells) > 1 or dtype != x.dtype or x.cell.expression.value is not None:
            raise LeftError("a change in place of scores that have views or were read")
    except LeftError as left:
        product.leave(str(left))
        return None
    x.cell.expression = product.defer(_expression(alone, args, kwargs))
    x.cell.chain = chain
    return x


def _result_dtype(func: Any, x: Deferred, args: Arguments, kwargs: dict[str, Any]) -> torch.dtype:
    """The dtype of the result, which has the shape of ``x`` or is left."""
    if not x.is_contiguous():
        raise LeftError("scores that are not contiguous")
    if func is aten._softmax.default:
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
