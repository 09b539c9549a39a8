"""Each ATen operator that keeps scores or weights a part of attention, and what it means for their chain."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from pyattn.adapters.scratch.recording.chain import Chain, LeftError
from pyattn.adapters.scratch.recording.deferred import Deferred
from pyattn.adapters.scratch.recording.expressions import Noise
from pyattn.adapters.scratch.recording.rows import (
    RowMaximum,
    RowSum,
    dropped,
    exponential,
    gated,
    less_maximum,
    log_softmax,
    over_sums,
    softmax,
    without_nan,
)
from pyattn.adapters.scratch.recording.terms import Fill, Floor

aten: Any = torch.ops.aten

Arguments = tuple[Any, ...]
Step = Callable[[Chain, int, Arguments, dict[str, Any]], Chain]
"""(the chain of the argument at a place, that place, all arguments) -> the chain of the result."""


def number(x: Any) -> float | None:
    """``x`` as a number, if it is one and no gradient depends on it; a tensor without memory may have kept it."""
    if isinstance(x, FakeTensor) and x.constant is not None and not x.requires_grad:
        with unset_fake_temporarily():
            return number(x.constant)
    if isinstance(x, Tensor):
        constant = type(x) is Tensor and x.numel() == 1 and not x.requires_grad and x.dtype.is_floating_point
        return float(x.item()) if constant else None
    return float(x) if isinstance(x, int | float) and not isinstance(x, bool) else None


def _multiply(chain: Chain, at: int, args: Arguments, kwargs: dict[str, Any]) -> Chain:
    other = args[1 - at]
    if isinstance(other, Deferred):
        if isinstance(other.cell.expression, Noise):
            return dropped(chain, other.cell.expression)
        raise LeftError("a product of scores")
    c = number(other)
    factor = other if c is None else c
    if not isinstance(factor, Tensor | float):
        raise LeftError(f"{_kind(chain)} times a symbol")
    if chain.weights:
        return gated(chain, factor, divides=False)
    return chain.multiplied_by(factor) if isinstance(factor, Tensor) else chain.multiplied(factor)


def _kind(chain: Chain) -> str:
    return chain.halfway or ("weights" if chain.weights else "scores")


def _changed(*given: Deferred) -> bool:
    return any(x.cell.memory.changed for x in given)


def _divide(chain: Chain, at: int, args: Arguments, kwargs: dict[str, Any]) -> Chain:
    if at != 0 or kwargs:
        raise LeftError(f"a number divided by {_kind(chain)}, or a rounded quotient")
    if isinstance(args[1], Deferred) and isinstance(args[1].cell.expression, RowSum):
        if not args[1].cell.expression.is_of(args[0].cell.expression) or _changed(*args[:2]):
            raise LeftError("a quotient of other exponentials")
        return over_sums(chain)
    c = number(args[1])
    divisor = args[1] if c is None else c
    if isinstance(divisor, Deferred) or not isinstance(divisor, Tensor | float) or c == 0:
        raise LeftError(f"{_kind(chain)} divided by {'0' if c == 0 else 'scores or a symbol'}")
    if chain.weights:
        return gated(chain, divisor, divides=True)
    return chain.divided_by(divisor) if isinstance(divisor, Tensor) else chain.multiplied(1 / divisor)


def _sum(sign: float) -> Step:
    def step(chain: Chain, at: int, args: Arguments, kwargs: dict[str, Any]) -> Chain:
        other, alpha = args[1 - at], sign * kwargs.get("alpha", 1)
        if isinstance(other, Deferred):
            of_rows = other.cell.expression
            same = isinstance(of_rows, RowMaximum) and of_rows.scores is args[at].cell.expression
            if not same or at != 0 or alpha != -1 or _changed(args[at], other):
                raise LeftError("a sum of scores")
            return less_maximum(chain)
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
    of_data = args[0].cell.chain is None
    if of_data:
        chain.expect_scores("a fill of data")
    if of_data and chain.capped:  # tanh keeps its result for backward
        raise LeftError("a fill of the data of capped scores")
    return chain.filled(args[1], c, passes=of_data)


def assignment_as_fill(args: Arguments) -> Arguments | None:
    """The arguments of the fill that ``x[..., mask] = number`` is, if the assignment is one."""
    x, indices, number, *accumulate = args
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    if any(accumulate) or len(dims) != 1 or isinstance(number, Deferred) or number.numel() != 1:
        return None
    mask, first = indices[dims[0]], dims[0]
    past = first + mask.dim()
    if mask.dtype != torch.bool or mask.shape != x.shape[first:past] or number.dtype != x.dtype:
        return None
    return x, mask if past == x.dim() else mask[(..., *(None,) * (x.dim() - past))], number.view(())


def _constant(x: Any) -> float | None:
    """The number that ``x`` is everywhere, if it is one and no gradient depends on it."""
    if type(x) is not Tensor or x.requires_grad or not x.dtype.is_floating_point or x.numel() == 0:
        return None
    least, largest = torch.aminmax(x)
    return float(least) if bool(least == largest) else None


def _where(chain: Chain, at: int, args: Arguments, kwargs: dict[str, Any]) -> Chain:
    other = args[3 - at] if at else None
    c = number(other)
    if c is None:
        c = _constant(other)
    if c is None:
        raise LeftError("where with another tensor")
    return chain.filled(args[0], c, where=at == 2)


def _maximum(chain: Chain, at: int, args: Arguments, kwargs: dict[str, Any]) -> Chain:
    c = number(args[1 - at])
    if c is None or not c < 0:
        raise LeftError("the larger of scores and a tensor")
    return _at_least(chain, c)


def _clamp(chain: Chain, at: int, args: Arguments, kwargs: dict[str, Any]) -> Chain:
    least = args[1] if len(args) > 1 else kwargs.get("min")
    most = args[2] if len(args) > 2 else kwargs.get("max")
    c = None if at else number(least)
    if c is None or not -torch.finfo(args[0].dtype).max <= c < 0 or most is not None:
        raise LeftError("clamp")
    return _at_least(chain, c)


def _at_least(chain: Chain, value: float) -> Chain:
    chain.expect_scores("a lower bound")
    return chain._replace(changes=(*chain.changes, Floor(value)))


def _tanh(chain: Chain, at: int, args: Arguments, kwargs: dict[str, Any]) -> Chain:
    """The inner part of a softcap."""
    chain.expect_scores("tanh")
    if chain.changes or chain.capped:
        raise LeftError("tanh of scores after other operations")
    return chain._replace(capped=True)


def _triangle(*, upper: bool) -> Step:
    def step(chain: Chain, at: int, args: Arguments, kwargs: dict[str, Any]) -> Chain:
        chain.expect_scores("a triangle")
        chain.expect_order("a triangle")
        diagonal, device = args[1] if len(args) > 1 else kwargs.get("diagonal", 0), chain.q.tensor.device
        fill = Fill.beyond(diagonal, chain.sizes, device, chain.leads[-1], upper=upper)
        return chain._replace(changes=(*chain.changes, fill))

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


def _nan_to_num(chain: Chain, at: int, args: Arguments, kwargs: dict[str, Any]) -> Chain:
    given = args[1] if len(args) > 1 else kwargs.get("nan")
    return without_nan(chain, 0.0 if given is None else given)


STEPS: dict[Any, Step] = {
    aten.mul.Tensor: _multiply,
    aten.mul.Scalar: _multiply,
    aten.div.Tensor: _divide,
    aten.div.Scalar: _divide,
    aten.neg.default: lambda chain, at, args, kwargs: _multiply(chain, 0, (args[0], -1.0), kwargs),
    aten.add.Tensor: _sum(1),
    aten.sub.Tensor: _sum(-1),
    aten.tanh.default: _tanh,
    aten.masked_fill.Scalar: _fill,
    aten.masked_fill.Tensor: _fill,
    aten.where.self: _where,
    aten.where.ScalarOther: _where,
    aten.where.ScalarSelf: _where,
    aten.maximum.default: _maximum,
    aten.clamp.default: _clamp,
    aten.clamp_min.default: _clamp,
    aten.tril.default: _triangle(upper=False),
    aten.triu.default: _triangle(upper=True),
    aten.nan_to_num.default: _nan_to_num,
    aten._softmax.default: lambda chain, at, args, kwargs: softmax(chain, args[1]),
    aten._log_softmax.default: lambda chain, at, args, kwargs: log_softmax(chain, args[1]),
    aten.exp.default: lambda chain, at, args, kwargs: exponential(chain, args[0].dtype),
    aten._to_copy.default: _cast,
    aten.clone.default: _cast,
}

FILLS = {aten.masked_fill.Scalar, aten.masked_fill.Tensor}

IN_PLACE = {
    aten.mul_.Tensor: aten.mul.Tensor,
    aten.mul_.Scalar: aten.mul.Scalar,
    aten.div_.Tensor: aten.div.Tensor,
    aten.div_.Scalar: aten.div.Scalar,
    aten.neg_.default: aten.neg.default,
    aten.add_.Tensor: aten.add.Tensor,
    aten.sub_.Tensor: aten.sub.Tensor,
    aten.tanh_.default: aten.tanh.default,
    aten.exp_.default: aten.exp.default,
    aten.masked_fill_.Scalar: aten.masked_fill.Scalar,
    aten.masked_fill_.Tensor: aten.masked_fill.Tensor,
    aten.tril_.default: aten.tril.default,
    aten.triu_.default: aten.triu.default,
    aten.nan_to_num_.default: aten.nan_to_num.default,
    aten.clamp_.default: aten.clamp.default,
    aten.clamp_min_.default: aten.clamp_min.default,
}
