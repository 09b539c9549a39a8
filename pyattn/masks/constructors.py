"""Interval masks from lengths and positions: documents, prefixes, chunks, padding, streaming."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pyattn.masks.key_ranges import KeyRanges, known
from pyattn.options.checks import (
    MOST_NUMBERS,
    check_between,
    check_integers,
    check_names,
    check_size,
    check_sizes,
    check_type,
    check_window,
    has_values,
    shown,
)

__all__ = ["chunked", "documents", "padding", "prefix_lm", "streaming"]


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
def padding(
    lengths: Sequence[int] | Tensor, seqlen_k: int, side: str = "right", seqlen_q: int | None = None
) -> KeyRanges:
    """Sequences of different lengths in one batch: no query sees padding.

    ::

        length 3, seqlen_k 4   side "right"     causal     side "left"     causal
                               1 1 1 0          1 0 0 0    0 1 1 1         0 0 0 0
                               1 1 1 0          1 1 0 0    0 1 1 1         0 1 0 0
                               1 1 1 0          1 1 1 0    0 1 1 1         0 1 1 0
                               1 1 1 0          1 1 1 0    0 1 1 1         0 1 1 1

    Queries that are padding see whatever keys their position allows: their results are meaningless, and a loss that
    leaves them out sends them no gradient.

    Args:
        lengths: each sequence's tokens without padding, ints or an int32 or int64 tensor (B,), from 0 to seqlen_k.
        seqlen_k: the number of keys.
        side: where the padding is, "right" or "left".
        seqlen_q: the number of queries; default: seqlen_k. Queries of another sequence, as in cross-attention, may be
            any number, and 1 gives a row that serves every query.

    Returns:
        (B, seqlen_q, 2).

    Raises:
        ValueError: a length outside 0 to seqlen_k, a seqlen below 0, another side, the wrong number of dimensions.
        TypeError: any other type.

    >>> padding([2, 3], seqlen_k=3, side="left", seqlen_q=1).tolist()
    [[[1, 3]], [[0, 3]]]
    """
    if side not in ("right", "left"):
        raise ValueError(f"pyattn: side must be 'right' or 'left', got {side!r}")
    sizes = check_integers("lengths", lengths)
    rows = seqlen_k if seqlen_q is None else seqlen_q
    check_sizes(sequences=len(sizes), seqlen_k=seqlen_k)
    check_sizes(sequences=len(sizes), seqlen_q=rows)
    check_between("lengths", sizes, 0, seqlen_k)
    begin = torch.zeros_like(sizes) if side == "right" else seqlen_k - sizes
    return known(torch.stack([begin, begin + sizes], -1)[:, None].repeat(1, rows, 1), whole=False)


@check_names
def streaming(seqlen: int, first: int, window: tuple[int, int]) -> KeyRanges:
    """The first keys of all, and a window around each query: attention sinks (Xiao et al. 2024, figure 1).

    ::

        first 1, window (1, 1)     causal=False     causal=True
                                   1 1 0 0 0        1 0 0 0 0
                                   1 1 1 0 0        1 1 0 0 0
                                   1 1 1 1 0        1 1 1 0 0
                                   1 0 1 1 1        1 0 1 1 0
                                   1 0 0 1 1        1 0 0 1 1

    Over a cache, use ``streaming(cache.max_seqlen, first, window)[:, before:before + seqlen_q]``.

    Args:
        seqlen: the number of queries and of keys.
        first: how many keys at the beginning every query sees; if there are fewer, all.
        window: (left, right): how many keys before and after its own position a query sees beside them; -1: all.

    Returns:
        (1, seqlen, 2, 2).

    Raises:
        ValueError: a seqlen or first below 0, a window entry below -1.
        TypeError: any other type.

    >>> streaming(4, first=1, window=(1, 0))[0].tolist()
    [[[0, 1], [1, 1]], [[0, 1], [1, 2]], [[0, 1], [1, 3]], [[0, 1], [2, 4]]]
    """
    check_sizes(seqlen=seqlen)
    check_size("first", first)
    check_window(window)
    first, (left, right) = min(first, seqlen), (seqlen if bound < 0 else min(bound, seqlen) for bound in window)
    query, ends = torch.arange(seqlen), torch.tensor([0, first]).expand(seqlen, 2)
    around = torch.stack([query - left, query + right + 1], -1).clamp(first, seqlen)
    return known(torch.stack([ends, around], 1)[None], whole=False)
