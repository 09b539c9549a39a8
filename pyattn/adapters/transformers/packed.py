"""Documents packed into one row, separated by lengths or by position ids, as ``key_ranges``.

transformers masks packed documents only if a model has neither a cache nor an
attention_mask, and some models never do. The position ids reach the attention function
of most models, and mean the same everywhere: a document begins where they restart.
"""

import inspect
import warnings
import weakref
from collections import Counter

import torch
from torch import Tensor, nn

from pyattn import masks
from pyattn.adapters.transformers.mask import Mask
from pyattn.adapters.transformers.masks import can_read
from pyattn.locks import Lock
from pyattn.masks import KeyRanges
from pyattn.masks.key_ranges import by_interval

FILLED = "the cache holds positions from before"

_lock = Lock()
MIXED: Counter[str] = Counter()
"""How many calls of attention let packed documents see each other, by reason."""

_without_positions: weakref.WeakSet[type] = weakref.WeakSet()
"""Classes of modules that call causal attention without position ids."""


def by_lengths(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, seqlen_q: int) -> Tensor:
    """key_ranges (1, Sq, 2) of documents given by their starts; queries after the last document see nothing."""
    at = torch.arange(seqlen_q, device=cu_seqlens_q.device)
    document = torch.searchsorted(cu_seqlens_q[1:].contiguous(), at, right=True)
    end = torch.nn.functional.pad(cu_seqlens_k, (0, 1), value=int(cu_seqlens_k[-1]))
    return torch.stack([end[document], end[document + 1]], -1)[None]


def by_positions(position_ids: Tensor, mask: Mask | None, seqlen_k: int) -> Tensor | None:
    """key_ranges (B or 1, Sq, 2), the document of each query of causal attention; None if every row has one document.

    Position ids 0 1 2 0 1 are two documents; the causal mask is not part of these ranges::

        1 1 1 0 0
        1 1 1 0 0
        1 1 1 0 0
        0 0 0 1 1
        0 0 0 1 1

    Args:
        position_ids: (B or 1, Sq) integers. A document begins at each that is not above the previous one.
        mask: the result of :func:`transformers_masks.mask_function`, not causal from the upper left.
        seqlen_k: number of keys. Queries that see keys after their own place follow positions in a cache: their
            documents are not separated, and counted in :data:`MIXED`.
    """
    restarts = torch.nn.functional.pad(position_ids.diff() <= 0, (1, 0))
    readable = can_read(restarts)
    if readable and not restarts.any():
        return None
    document = restarts.cumsum(-1)
    ranges = torch.stack([torch.searchsorted(document, document, right=end) for end in (False, True)], -1)
    if mask is None or restarts.shape[1] == seqlen_k:
        return ranges
    tokens, later = _rows(mask)
    if not readable:
        return torch.where(later.any(), torch.tensor([0, seqlen_k], device=ranges.device), ranges)
    if not later.any():
        return ranges
    if (restarts[:, 1:] & tokens[:, 1:] & tokens[:, :-1]).any():
        _count(FILLED)
    return None


def _rows(mask: Mask) -> tuple[Tensor, Tensor]:
    """Whether each query sees any key (padding before the first token sees none), and a key after its own place."""
    if mask.pairs is not None:
        return mask.pairs[:, 0].any(-1), mask.pairs[:, 0].triu(1).any(-1)
    assert mask.ranges is not None
    begin, end = by_interval(mask.ranges).unbind(-1)
    later = end > torch.arange(1, begin.shape[1] + 1, device=begin.device)[:, None]
    return (begin < end).any(-1), ((begin < end) & later).any(-1)


def within(ranges: KeyRanges, documents: Tensor) -> Tensor:
    """Intersects the ranges of a mask, (B or 1, Sq, 2) or (B or 1, Sq, n, 2), and of documents, (B or 1, Sq, 2).

    Chunks, which a mask counts from the first token of its row, restart with each document.
    """
    if ranges.dim() == 4:
        return masks.within(ranges, documents)
    begin, end = ranges.unbind(-1)
    size = int((begin[:1] == 0).sum()) if can_read(begin) else 0
    at = torch.arange(ranges.shape[1], device=begin.device)
    if size and (begin == at // size * size).all():
        first = documents[..., 0]
        begin = first + (at - first) // size * size
        ranges = KeyRanges(torch.stack([begin, end.expand_as(begin)], -1), whole=True)
    return masks.within(ranges, documents)


def remember(module: nn.Module) -> None:
    """Records a layer that calls causal attention of several queries without position ids."""
    if not torch.compiler.is_compiling():
        _without_positions.add(type(module))


def fallbacks(model: nn.Module | None) -> list[str]:
    """The lines of :func:`pyattn.adapters.transformers.fallbacks` on packed documents."""
    lines = [f"{n} calls with packed documents that see each other: {why}" for why, n in sorted(MIXED.items())]
    if model is None or "position_ids" not in inspect.signature(model.forward).parameters:
        return lines
    kinds = {type(part): name for name, part in reversed([*model.named_modules()]) if type(part) in _without_positions}
    rule = "it gets no position_ids, so packed documents need use_cache=False and no attention_mask"
    return lines + [f"{name} ({kind.__name__}): {rule}" for kind, name in kinds.items()]


def _count(why: str) -> None:
    with _lock:
        MIXED[why] += 1
        first = MIXED[why] == 1
    if first:
        warnings.warn(f"pyattn: packed documents see each other: {why}", stacklevel=2)
