"""Interval masks: ``key_ranges`` for :func:`pyattn.attention`, in the forms that models need.

Every function but :func:`tree`, whose bool mask is for drafted tokens behind a cache, returns :class:`KeyRanges`, int64
(B or 1, seqlen, 2): query ``i`` sees the keys ``begin <= j < end`` of its pair, on top of ``causal`` and ``window``.
Those of :func:`prefix_lm` and :func:`from_bool` are the whole mask and are refused with ``causal=True``, the default;
the others work with either. Attention also takes a bare int32 or int64 tensor of that shape, with any ``causal``.
Memory is linear in seqlen, and a block of keys that no query of a block sees costs nothing. Results are on the device
of the tensors given here, or on torch's default device if only ints are given.

Drawn below: query ``i`` down, key ``j`` across, 1 = takes part.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pyattn.arguments import (
    MOST_NUMBERS,
    check_between,
    check_integers,
    check_names,
    check_size,
    check_sizes,
    check_type,
    has_values,
    shown,
)
from pyattn.key_ranges import KeyRanges, bare, known
from pyattn.trees import tree

__all__ = ["KeyRanges", "chunked", "documents", "from_bool", "padding", "prefix_lm", "tree", "within"]


@check_names
def documents(lengths: Sequence[int] | Tensor) -> KeyRanges:
    """Documents packed one after another into one sequence: no query sees another document.

    ::

        lengths 2, 3     causal=False     causal=True
                         1 1 0 0 0        1 0 0 0 0
                         1 1 0 0 0        1 1 0 0 0
                         0 0 1 1 1        0 0 1 0 0
                         0 0 1 1 1        0 0 1 1 0
                         0 0 1 1 1        0 0 1 1 1

    Args:
        lengths: the documents' lengths, ints or an int32 or int64 tensor of 1 dimension. They may be 0; seqlen is their
            sum. For padding at the end of a row, add its length as one more document.

    Returns:
        (1, seqlen, 2), for every sequence of a batch. For rows packed differently, ``torch.cat`` their ranges.

    Raises:
        ValueError: a length below 0, the wrong number of dimensions.
        TypeError: any other type.

    >>> documents([2, 3])[0].tolist()
    [[0, 2], [0, 2], [2, 5], [2, 5], [2, 5]]
    """
    sizes = check_integers("lengths", lengths)
    check_between("lengths", sizes, 0)
    if has_values(sizes) and sizes.double().sum() >= MOST_NUMBERS:
        raise ValueError(f"pyattn: lengths must add up to less than {MOST_NUMBERS}, got {shown(sizes.tolist())}")
    end = sizes.cumsum(0)
    ranges = torch.stack([end - sizes, end], -1).repeat_interleave(sizes, 0)[None]
    return known(ranges, whole=False)


@check_names
def prefix_lm(prefix: int | Tensor, seqlen: int) -> KeyRanges:
    """A prefix whose tokens all see each other, then causal text (Raffel et al. 2020, figure 4).

    Attention requires ``causal=False`` with it: query ``i`` sees the keys below ``max(prefix, i + 1)``. Over a cache,
    use ``prefix_lm(prefix, cache.max_seqlen)[:, before:before + seqlen_q]``. ::

        prefix 2, seqlen 4     1 1 0 0
                               1 1 0 0
                               1 1 1 0
                               1 1 1 1
    Args:
        prefix: the prefix's length, an int or an int32 or int64 tensor (B,), from 0 to seqlen.
        seqlen: the number of queries and of keys.

    Returns:
        (B, seqlen, 2), or (1, seqlen, 2) for an int.

    Raises:
        ValueError: a prefix outside 0 to seqlen, a seqlen below 0, the wrong number of dimensions.
        TypeError: any other type.

    >>> prefix_lm(2, seqlen=4)[0].tolist()
    [[0, 2], [0, 2], [0, 3], [0, 4]]
    """
    check_type("prefix", prefix, int, Tensor)
    sizes = check_integers("prefix", [prefix] if isinstance(prefix, int) else prefix)
    check_sizes(sequences=len(sizes), seqlen=seqlen)
    check_between("prefix", sizes, 0, seqlen)
    end = torch.maximum(sizes[:, None], torch.arange(1, seqlen + 1, device=sizes.device))
    return known(torch.stack([torch.zeros_like(end), end], -1), whole=True)


@check_names
def chunked(seqlen: int, chunk: int) -> KeyRanges:
    """Chunks of ``chunk`` tokens each, the last one perhaps shorter: no query sees another chunk.

    ::

        seqlen 5, chunk 2     causal=False     causal=True
                              1 1 0 0 0        1 0 0 0 0
                              1 1 0 0 0        1 1 0 0 0
                              0 0 1 1 0        0 0 1 0 0
                              0 0 1 1 0        0 0 1 1 0
                              0 0 0 0 1        0 0 0 0 1

    Args:
        seqlen: the number of queries and of keys.
        chunk: at least 1.

    Returns:
        (1, seqlen, 2).

    Raises:
        ValueError: a seqlen below 0, a chunk below 1.
        TypeError: any type but int.

    >>> chunked(5, chunk=2)[0].tolist()
    [[0, 2], [0, 2], [2, 4], [2, 4], [4, 5]]
    """
    check_sizes(seqlen=seqlen)
    check_size("chunk", chunk, least=1)
    begin = torch.arange(seqlen) // chunk * chunk
    return known(torch.stack([begin, (begin + chunk).clamp(max=seqlen)], -1)[None], whole=False)


@check_names
def padding(lengths: Sequence[int] | Tensor, seqlen: int, side: str = "right") -> KeyRanges:
    """Sequences of different lengths in one batch: no query sees padding.

    ::

        length 3, seqlen 4     side "right"     causal     side "left"     causal
                               1 1 1 0          1 0 0 0    0 1 1 1         0 0 0 0
                               1 1 1 0          1 1 0 0    0 1 1 1         0 1 0 0
                               1 1 1 0          1 1 1 0    0 1 1 1         0 1 1 0
                               1 1 1 0          1 1 1 0    0 1 1 1         0 1 1 1

    Queries that are padding see whatever keys their position allows: their results are meaningless, and a loss that
    leaves them out sends them no gradient.

    Args:
        lengths: each sequence's tokens without padding, ints or an int32 or int64 tensor (B,), from 0 to seqlen.
        seqlen: the number of keys and of queries. With fewer queries, as with a cache, slice: ``[:, -seqlen_q:]``.
        side: where the padding is, "right" or "left".

    Returns:
        (B, seqlen, 2).

    Raises:
        ValueError: a length outside 0 to seqlen, a seqlen below 0, another side, the wrong number of dimensions.
        TypeError: any other type.

    >>> padding([2, 3], seqlen=3, side="left")[:, 0].tolist()
    [[1, 3], [0, 3]]
    """
    if side not in ("right", "left"):
        raise ValueError(f"pyattn: side must be 'right' or 'left', got {side!r}")
    sizes = check_integers("lengths", lengths)
    check_sizes(sequences=len(sizes), seqlen=seqlen)
    check_between("lengths", sizes, 0, seqlen)
    begin = torch.zeros_like(sizes) if side == "right" else seqlen - sizes
    return known(torch.stack([begin, begin + sizes], -1)[:, None].repeat(1, seqlen, 1), whole=False)


@check_names
def from_bool(mask: Tensor) -> KeyRanges | None:
    """The ranges equivalent to a bool mask, if there are any.

    ``attention(..., mask=mask)`` finds the ranges itself, at each call. Use this function for a mask that serves many
    calls, or to learn whether a mask consists of ranges. ::

        1 1 1 0    [0, 3)        1 0 1 1    None: a hole
        0 1 1 1    [1, 4)        1 1 1 1
        0 0 0 0    [0, 0)        0 0 1 1

    Args:
        mask: bool, True = takes part, 1 to 4 dimensions, which broadcast from the right: (B or 1, Hq or 1, Sq, Sk).

    Returns:
        (B or 1, Sq, 2), for ``causal=False`` because they are the whole mask; None where a row has holes or heads
        differ. A mask with one row for all queries, (B, 1, 1, Sk), gives (B, 1, 2): apply ``expand(-1, seqlen_q, -1)``.
        If the mask only hides padding, ``KeyRanges(from_bool(mask))`` goes on top of ``causal=True``.

    Raises:
        ValueError: the wrong number of dimensions.
        TypeError: a mask that is not a bool tensor.

    >>> from_bool(torch.ones(3, 3, dtype=torch.bool).tril()).tolist()
    [[[0, 1], [0, 2], [0, 3]]]
    """
    check_type("mask", mask, Tensor)
    if mask.dtype != torch.bool:
        raise TypeError(f"pyattn: mask must be bool, True = takes part, got {mask.dtype}")
    if not 1 <= mask.dim() <= 4:
        raise ValueError(f"pyattn: mask must have 1 to 4 dimensions, got shape {tuple(mask.shape)}")
    wide = mask[(None,) * (4 - mask.dim())]
    seqlen_k, heads = wide.shape[3], wide.shape[1]
    if seqlen_k == 0 or heads == 0:
        return known(torch.zeros(wide.shape[0], wide.shape[2], 2, dtype=torch.int64, device=mask.device), whole=True)
    keys = wide.to(torch.uint8)
    count = keys.sum(-1)
    begin = keys.argmax(-1).masked_fill(count == 0, 0)  # argmax gives the first maximum
    end = (seqlen_k - keys.flip(-1).argmax(-1)).masked_fill(count == 0, 0)
    ranges = torch.stack([begin, end], -1)
    if (end - begin != count).any() or (ranges != ranges[:, :1]).any():
        return None
    return known(ranges[:, 0], whole=True)


def within(ranges: Tensor, others: Tensor) -> Tensor:
    """The keys that two ranges share: documents with padding, a prefix in each document, ... ::

        documents [2, 2]     prefix_lm 3     within both
        1 1 0 0              1 1 1 0         1 1 0 0
        1 1 0 0              1 1 1 0         1 1 0 0
        0 0 1 1              1 1 1 0         0 0 1 0
        0 0 1 1              1 1 1 1         0 0 1 1

    Args:
        ranges, others: KeyRanges or bare tensors, (B or 1, Sq or 1, 2) each.

    Returns:
        KeyRanges, whole if either one is; a bare tensor if both are bare.

    Raises:
        TypeError: an argument that is not a tensor.

    >>> within(documents([2, 2]), prefix_lm(3, seqlen=4))
    KeyRanges(tensor([[[0, 2],
                       [0, 2],
                       [2, 3],
                       [2, 4]]]), whole=True)
    """
    check_type("ranges", ranges, Tensor)
    check_type("others", others, Tensor)
    one, other = bare(ranges), bare(others)
    begin = torch.maximum(one[..., 0], other[..., 0])
    both = torch.stack([begin, torch.maximum(begin, torch.minimum(one[..., 1], other[..., 1]))], -1)
    typed = [t for t in (ranges, others) if isinstance(t, KeyRanges)]
    return known(both, any(t.whole for t in typed)) if typed else both
