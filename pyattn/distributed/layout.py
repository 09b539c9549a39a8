"""Layouts: the positions of a sequence that each rank holds."""

from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from pyattn.distributed.agreement.checks import check_values
from pyattn.distributed.agreement.ranks import Ranks, agree, ranks_of
from pyattn.distributed.agreement.signature import all_hear
from pyattn.distributed.sequence_layout import SequenceLayout, begins_of
from pyattn.options.checks import check_tensor, check_type

LAYOUTS = ("zigzag", "contiguous", "chunk")
EACH = "zigzag_varlen"
"""The layout that cuts each packed sequence."""

Chunks = list[tuple[range, ...]]
"""The chunks of positions that each rank holds, in the order in which they lie in its shard."""


def check_layout(layout: str, packed: bool = False) -> None:
    """ValueError for a layout that does not exist, or that is for packed sequences alone."""
    layouts = (*LAYOUTS, EACH) if packed else LAYOUTS
    if layout not in layouts:
        raise ValueError(f"pyattn: layout must be one of {', '.join(layouts)}, got {layout!r}")


def slices(chunks: tuple[range, ...]) -> list[slice]:
    """Where the chunks lie in their rank's shard."""
    ends = [0, *accumulate(map(len, chunks))]
    return [slice(*bounds) for bounds in pairwise(ends)]


def sequence_layout_of(
    name: str, begins: list[int], total: int, ranks: int, layout: str, inner: int = 1
) -> SequenceLayout:
    """The packed sequences that begin there, of that many tokens, in the order of the layout."""
    return SequenceLayout(name, begins, total, 2 * (ranks // inner) if layout == EACH else 1)


def chunks_of(seqlen: int, ranks: int, layout: str, inner: int = 1, sequences: SequenceLayout | None = None) -> Chunks:
    """The chunks that each rank holds of a sequence, or of packed sequences in the order of the layout.

    ::

        contiguous, chunk, 4 ranks    0 | 1 | 2 | 3
        zigzag, 4 ranks               0 | 1 | 2 | 3 | 3 | 2 | 1 | 0

    Lengths differ by at most one; those of ``chunk`` are torch.chunk's and a DTensor's, equal up to the last. Under a
    causal mask a late chunk sees more keys than an early one; with zigzag, each rank has one of both and sees as many
    as the others. The chunks of ``zigzag_varlen`` are the parts into which ``sequences`` are cut. Groups of ``inner``
    ranks cut what one rank would hold.
    """
    outer, pairs = ranks // inner, layout in ("zigzag", EACH)
    parts = 2 * outer if pairs else outer
    longest = -(-seqlen // parts)
    ends = [min(longest * part, seqlen) if layout == "chunk" else seqlen * part // parts for part in range(parts + 1)]
    if layout == EACH and sequences is not None:
        ends = sequences.ends
    pieces = [range(*bounds) for bounds in pairwise(ends)]
    held: Chunks = [(pieces[rank], pieces[-1 - rank]) if pairs else (pieces[rank],) for rank in range(outer)]
    return held if inner == 1 else [cut for chunks in held for cut in _cut(chunks, inner)]


def _cut(chunks: tuple[range, ...], inner: int) -> Chunks:
    """The pieces of one rank's chunks, each of one or more chunks."""
    length = sum(map(len, chunks))
    found = []
    for begin, end in pairwise(length * part // inner for part in range(inner + 1)):
        places = zip(slices(chunks), chunks, strict=True)
        inside = [chunk[max(begin - at.start, 0) : max(end - at.start, 0)] for at, chunk in places]
        found.append(tuple(inside))
    return found


def tokens_of(total: int, ranks: Ranks, layout: str, cu_seqlens: Tensor | None) -> Chunks:
    """The tokens that each rank holds, in the order in which they lie in its shard.

    Raises:
        ValueError, TypeError: cu_seqlens that are wrong, or missing, or given for another layout.
    """
    if cu_seqlens is None and layout != EACH:
        return chunks_of(total, ranks.size, layout, ranks.inner)
    if cu_seqlens is None or layout != EACH:
        got = f"{'none' if cu_seqlens is None else 'some'} for {layout}"
        raise ValueError(f"pyattn: cu_seqlens must be given for layout {EACH}, and for no other, got {got}")
    begins = begins_of("cu_seqlens", cu_seqlens)
    sequences = sequence_layout_of("cu_seqlens", begins, total, ranks.size, layout, ranks.inner)
    held = chunks_of(total, ranks.size, layout, ranks.inner, sequences)
    return [tuple(run for chunk in chunks for run in sequences.tokens(chunk)) for chunks in held]


def shard(
    tensor: Tensor,
    dim: int,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    layout: str = "zigzag",
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """This rank's part of a tensor that every rank has: inputs, positions, labels, the rows of a mask.

    Args:
        tensor: the whole tensor.
        dim: the dimension of the sequence.
        group: the ranks: a process group, a mesh of one dimension, or one of two for :func:`usp_attention`; None: all.
        layout: ``"zigzag"``, ``"contiguous"`` or ``"chunk"``, as in the call of :func:`ring_attention`; for packed
            sequences also ``"zigzag_varlen"``, which cuts each of them zigzag.
        cu_seqlens: (sequences + 1,), int32 or int64: where each sequence begins; with ``"zigzag_varlen"`` alone.

    Raises:
        ValueError: a dim or a layout that does not exist, a mesh of more dimensions, cu_seqlens that do not fit.
        TypeError: an argument of another type.
    """
    _check(tensor, dim, layout)
    ranks = ranks_of(group)
    held = tokens_of(tensor.shape[dim], ranks, layout, cu_seqlens)[ranks.own]
    return _rows(tensor, dim, held)


def _check(tensor: Tensor, dim: int, layout: str) -> None:
    check_tensor("tensor", tensor)
    check_type("dim", dim, int)
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"pyattn: dim must be a dimension of the tensor, got {dim} and shape {tuple(tensor.shape)}")
    check_layout(layout, packed=True)


def _rows(tensor: Tensor, dim: int, tokens: tuple[range, ...]) -> Tensor:
    """These tokens of a tensor that has all."""
    parts = [tensor.narrow(dim, run.start, len(run)) for run in tokens]
    return torch.cat(parts or [tensor.narrow(dim, 0, 0)], dim)


@all_hear
def unshard(
    tensor: Tensor,
    dim: int,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    layout: str = "zigzag",
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """The whole tensor, on every rank, of which each rank has the part that :func:`shard` gives.

    Differentiable: the loss is the sum of the ranks' losses, so the part's gradient is the sum of those of all ranks.

    Args:
        tensor, dim, group, layout, cu_seqlens: as for :func:`shard`.

    Raises:
        ValueError: parts whose lengths are not those of the layout; and as :func:`shard`. If the arguments of ranks
            differ, or one rank's are wrong, every rank raises.
        TypeError: an argument of another type.
    """
    ranks, error = ranks_of(group), None
    facts, words = dict[str, Any](), [0]
    try:
        check_values("tensor", tensor)
        _check(tensor, dim, layout)
        dim %= tensor.dim()
        others = [*tensor.shape[:dim], *tensor.shape[dim + 1 :]]
        begins = None if cu_seqlens is None else begins_of("cu_seqlens", cu_seqlens)
        facts = {"dtype": str(tensor.dtype), "dim": dim, "shape without dim": others, "layout": layout}
        facts |= {"device": tensor.device.type, "cu_seqlens": begins}
        facts |= {"requires_grad": torch.is_grad_enabled() and tensor.requires_grad}
        words = [tensor.shape[dim]]
    except Exception as problem:  # whatever it is, the others must not wait for this rank
        error = problem
    lengths = [length for (length,) in agree("unshard", ranks, facts, words, error)]
    held = tokens_of(sum(lengths), ranks, layout, cu_seqlens)
    expected = [sum(map(len, chunks)) for chunks in held]
    if lengths != expected:
        raise ValueError(
            f"pyattn: a sequence of {sum(lengths)} has parts of {expected} in layout {layout}, got {lengths}"
        )
    whole: Tensor = _Gather.apply(tensor, dim, ranks, held)  # type: ignore[no-untyped-call]
    return whole


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, dim, ranks, held):  # type: ignore[no-untyped-def]
        ctx.of = dim, ranks, held
        lengths = [sum(map(len, chunks)) for chunks in held]
        mine = tensor.movedim(dim, 0).contiguous()
        padded = mine.new_zeros(max(lengths), *mine.shape[1:])
        padded[: len(mine)] = mine
        parts = [torch.empty_like(padded) for _ in held]
        # Bytes, because gloo knows few dtypes.
        dist.all_gather(
            [part.view(-1).view(torch.uint8) for part in parts], padded.view(-1).view(torch.uint8), group=ranks.group
        )
        whole = mine.new_empty(sum(lengths), *mine.shape[1:])
        for part, chunks in zip(parts, held, strict=True):
            for chunk, rows in zip(chunks, slices(chunks), strict=True):
                whole[chunk.start : chunk.stop] = part[rows]
        return whole.movedim(0, dim).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        dim, ranks, held = ctx.of
        total = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True).contiguous()
        dist.all_reduce(total, group=ranks.group)
        total = total.to(gradient.dtype)
        return _rows(total, dim, held[ranks.own]), None, None, None
