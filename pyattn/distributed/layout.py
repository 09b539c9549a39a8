"""Layouts: the positions of a sequence that each rank holds."""

from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from pyattn.arguments import check_tensor, check_type
from pyattn.distributed.ranks import gather_words, ranks_of

LAYOUTS = ("zigzag", "contiguous", "chunk")

Chunks = list[tuple[range, ...]]
"""The chunks of positions that each rank holds, in the order in which they lie in its shard."""


def check_layout(layout: str) -> None:
    """ValueError for a layout that does not exist."""
    if layout not in LAYOUTS:
        raise ValueError(f"pyattn: layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")


def slices(chunks: tuple[range, ...]) -> list[slice]:
    """Where the chunks lie in their rank's shard."""
    ends = [0, *accumulate(map(len, chunks))]
    return [slice(*bounds) for bounds in pairwise(ends)]


def chunks_of(seqlen: int, ranks: int, layout: str, inner: int = 1) -> Chunks:
    """The chunks that each rank holds of a sequence.

    ::

        contiguous, chunk, 4 ranks    0 | 1 | 2 | 3
        zigzag, 4 ranks               0 | 1 | 2 | 3 | 3 | 2 | 1 | 0

    Lengths differ by at most one; those of ``chunk`` are torch.chunk's and a DTensor's, equal up to the last. Under a
    causal mask a late chunk sees more keys than an early one; with zigzag, each rank has one of both and sees as many
    as the others. Groups of ``inner`` ranks cut what one rank would hold.
    """
    outer = ranks // inner
    parts = 2 * outer if layout == "zigzag" else outer
    longest = -(-seqlen // parts)
    ends = [min(longest * part, seqlen) if layout == "chunk" else seqlen * part // parts for part in range(parts + 1)]
    pieces = [range(*bounds) for bounds in pairwise(ends)]
    pairs = layout == "zigzag"
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


def shard(
    tensor: Tensor, dim: int, group: dist.ProcessGroup | DeviceMesh | None = None, *, layout: str = "zigzag"
) -> Tensor:
    """This rank's part of a tensor that every rank has: inputs, positions, labels, the rows of a mask.

    Args:
        tensor: the whole tensor.
        dim: the dimension of the sequence.
        group: the ranks: a process group, a mesh of one dimension, or one of two for :func:`usp_attention`; None: all.
        layout: ``"zigzag"``, ``"contiguous"`` or ``"chunk"``, as in the call of :func:`ring_attention`.

    Raises:
        ValueError: a layout that does not exist, a mesh of more dimensions.
        TypeError: an argument of another type.
    """
    check_tensor("tensor", tensor)
    check_type("dim", dim, int)
    check_layout(layout)
    ranks = ranks_of(group)
    held = chunks_of(tensor.shape[dim], ranks.size, layout, ranks.inner)[ranks.own]
    return torch.cat([tensor.narrow(dim, chunk.start, len(chunk)) for chunk in held], dim)


def unshard(
    tensor: Tensor, dim: int, group: dist.ProcessGroup | DeviceMesh | None = None, *, layout: str = "zigzag"
) -> Tensor:
    """The whole tensor, on every rank, of which each rank has the part that :func:`shard` gives.

    Differentiable: the loss is the sum of the ranks' losses, so the part's gradient is the sum of those of all ranks.

    Args:
        tensor, dim, group, layout: as for :func:`shard`.

    Raises:
        ValueError: parts whose lengths are not those of the layout; and as :func:`shard`.
        TypeError: an argument of another type.
    """
    check_tensor("tensor", tensor)
    check_type("dim", dim, int)
    check_layout(layout)
    ranks = ranks_of(group)
    lengths = [words[0] for words in gather_words([tensor.shape[dim]], ranks)]
    held = chunks_of(sum(lengths), ranks.size, layout, ranks.inner)
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
        return torch.cat([total.narrow(dim, c.start, len(c)) for c in held[ranks.own]], dim), None, None, None
