"""Calls with several leading dimensions, q (..., H, S, D), as calls over one batch dimension, which the kernels take.

A kernel finds sequence ``b`` of a tensor at ``b * stride``, or reads one sequence for all. Leading dimensions therefore
fold into one where a single stride steps through them; :func:`by_batches` loops over the others::

    q     (B, N, H, S, D)        B calls over N sequences: bias[b], (1, H, S, S), is read in place,
    bias  (B, 1, H, S, S)        and its gradient has its own size
    mask  (B, N, 1, 1, S)        one call over B * N sequences, if there were no bias

A tensor that is not larger than q is copied where it does not fold: that costs less than another call.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from pyattn.derivatives.transforms import transforming
from pyattn.options.axes import AXES, FORMS, TENSORS
from pyattn.options.checks import has_values
from pyattn.options.schema import Options

Shape = tuple[int, ...]

AXES_OF = AXES | TENSORS
"""The axes of the options and of all other tensors of a call."""


def by_batches(
    compute: Callable[..., tuple[Tensor, ...]], tensors: dict[str, Tensor], options: Options
) -> tuple[Tensor, ...]:
    """The results of ``compute(**tensors, options=options)``, a function of one batch dimension, for several of them.

    Args:
        compute: takes tensors and options with the batch (B, ...) in place of leading dimensions, and returns tensors
            (B, ...).
        tensors: by the names in :data:`pyattn.options.axes.TENSORS`, q and k among them; those of q, k and v broadcast.
        options: of the operators; their leading dimensions, which may be missing, broadcast to those of the tensors.

    Returns:
        The results with the leading dimensions that q, k and v have together. Dropout draws the weights of one call
        over them all, flattened in their order.
    """
    lead = _broadcast({name: t for name, t in tensors.items() if name in ("q", "k", "v")})
    given: dict[str, Tensor] = tensors | {
        name: t for name, t in options._asdict().items() if name in AXES and isinstance(t, Tensor)
    }
    found = {name: _aligned(name, t, lead) for name, t in given.items()}
    aligned = {name: t for name, t in found.items() if t is not None}
    q = tensors["q"]
    large = [t for t in aligned.values() if math.prod(t.shape[len(lead) :]) > math.prod(q.shape[-3:])]
    looped = _looped(large, lead)
    if looped and options.dropout_p and _shared(aligned.get("dropout_origins"), lead):
        one_row = None if options.dropout_origins is None else options.dropout_origins.reshape(1, 5)
        whole = options._replace(dropout_origins=one_row).origins_for(math.prod(lead), q.shape[-3], q.device)
        aligned["dropout_origins"] = whole.unflatten(0, lead)
    order = [*looped, *(dim for dim in range(len(lead)) if dim not in looped)]
    outer, inner = (tuple(lead[dim] for dim in dims) for dims in (looped, order[len(looped) :]))
    slices = {name: _slices(t.permute(*order, *range(len(lead), t.dim())), outer) for name, t in aligned.items()}

    def calls() -> Iterator[tuple[Tensor, ...]]:
        for number in range(math.prod(outer)):
            own = {name: _folded(name, each[number], inner) for name, each in slices.items()}
            scores = {name: t for name, t in own.items() if name not in tensors}
            yield compute(options=options._replace(**scores), **{name: own.get(name, t) for name, t in tensors.items()})

    sizes, back = (*outer, *inner), [order.index(dim) for dim in range(len(lead))]
    results = [t.reshape(*sizes, *t.shape[2:]) for t in _joined(calls(), math.prod(outer))]
    return tuple(t.permute(*back, *range(len(lead), t.dim())) for t in results)


def _broadcast(tensors: Mapping[str, Tensor]) -> Shape:
    """The leading dimensions that the tensors have together; ValueError if they don't broadcast or one has none."""
    if min([t.dim() for t in tensors.values()]) < 4:
        rule = "have at least 4 dimensions (..., num_heads, seqlen, head_dim)"
    else:
        try:
            return tuple(torch.broadcast_shapes(*[t.shape[:-3] for t in tensors.values()]))
        except RuntimeError:
            rule = "have dimensions before the last three that broadcast"
    shapes = " and ".join([f"{name} {tuple(t.shape)}" for name, t in tensors.items()])
    raise ValueError(f"pyattn: {' and '.join(tensors)} must {rule}, got {shapes}")


def _aligned(name: str, tensor: Tensor, lead: Shape) -> Tensor | None:
    """(*own, ...) with as many leading dimensions as ``lead``, each its size or 1; None for a tensor without any.

    Where an axis in the middle may be missing, the form with more leading dimensions counts. ValueError for dimensions
    that do not broadcast; a tensor that has too few passes, and the operator's own error names the rule.
    """
    forms = [words for words in sorted(FORMS[AXES_OF[name]].values(), key=len) if words and words[0][0] == "b"]
    shown = name.replace("offsets", "offset")  # the operators' name for a q_offset of each sequence
    for words in forms:
        own = tensor.dim() - len(words) + 1
        if 1 <= own <= len(lead):
            sizes = tensor.shape[:own]
            if any(size != 1 and size != full for size, full in zip(sizes, lead[len(lead) - own :], strict=True)):
                raise ValueError(
                    f"pyattn: leading dimensions of {shown} must broadcast to {lead}, those of q, k and v, got "
                    f"{tuple(sizes)} of shape {tuple(tensor.shape)}"
                )
            return tensor[(None,) * (len(lead) - own)]
    most = len(lead) - 1 + max([len(words) for words in forms], default=tensor.dim())
    if tensor.dim() > most:
        raise ValueError(
            f"pyattn: {shown} must have at most {most} dimensions beside leading dimensions {lead} of q, k and v, got "
            f"shape {tuple(tensor.shape)}"
        )
    return None


def _looped(tensors: Sequence[Tensor], lead: Shape) -> Shape:
    """The dimensions to loop over: the fewest calls between which each tensor's other ones fold without a copy."""
    if 0 in lead:
        return ()
    strides = [t.expand(*lead, *t.shape[len(lead) :]).stride() for t in tensors]
    wide = [dim for dim, size in enumerate(lead) if size != 1]
    best = wide
    for count in range(len(wide)):
        for looped in itertools.combinations(wide, count):
            rest = [dim for dim in wide if dim not in looped]
            folds = all(own[i] == own[j] * lead[j] for own in strides for i, j in itertools.pairwise(rest))
            if folds and math.prod([lead[dim] for dim in looped]) < math.prod([lead[dim] for dim in best]):
                best = [*looped]
    return tuple(best)


def _slices(tensor: Tensor, sizes: Shape) -> list[Tensor]:
    """The slices along the first dimensions, each of its size or 1, in row-major order.

    They are made by unbind, whose backward writes each gradient once: select's would write all of the tensor's each.
    """
    if not sizes:
        return [tensor]
    each = [_slices(one, sizes[1:]) for one in tensor.unbind(0)]
    return [one for some in (each * sizes[0] if len(each) == 1 else each) for one in some]


def _shared(tensor: Tensor | None, lead: Shape) -> bool:
    """Whether all sequences share one row of an aligned tensor."""
    return tensor is None or all(size == 1 for size in tensor.shape[: len(lead)])


def _folded(name: str, tensor: Tensor, sizes: Shape) -> Tensor:
    """(*own, ...) as an operator takes it: one row if all sequences share it, else (prod(sizes), ...)."""
    own, rest = tensor.shape[: len(sizes)], tensor.shape[len(sizes) :]
    forms = FORMS[AXES_OF[name]]
    if all(size == 1 for size in own):
        if forms[len(rest) + 1][0] == "b?":
            return tensor.reshape(1, *rest)
        if len(rest) in forms:  # without a batch
            return tensor.reshape(rest)
    return tensor.expand(*sizes, *rest).reshape(math.prod(sizes), *rest)


def _joined(calls: Iterator[tuple[Tensor, ...]], count: int) -> list[Tensor]:
    """The calls' results (count, B, ...), dense in the order of a call's; without gradient, written one by one."""
    first = next(calls)
    if count == 1:
        return [t[None] for t in first]
    orders = [_by_stride(t) for t in first]
    if transforming() or any(t.requires_grad or not has_values(t) for t in first):
        each = zip(*(first, *calls), strict=True)
        joined = [torch.stack([t.permute(order) for t in parts]) for parts, order in zip(each, orders, strict=True)]
    else:
        joined = [t.new_empty(count, *(t.shape[dim] for dim in order)) for t, order in zip(first, orders, strict=True)]
        for number, parts in enumerate(itertools.chain([first], calls)):
            for whole, t, order in zip(joined, parts, orders, strict=True):
                whole[number].copy_(t.permute(order))
    backs = [[1 + order.index(dim) for dim in range(len(order))] for order in orders]
    return [t.permute(0, *back) for t, back in zip(joined, backs, strict=True)]


def _by_stride(tensor: Tensor) -> list[int]:
    """The dimensions, outer ones first: torch.compile does not sort sizes that are symbols."""
    order: list[int] = []
    for dim in range(tensor.dim()):
        order.insert(len([other for other in order if tensor.stride(other) >= tensor.stride(dim)]), dim)
    return order
