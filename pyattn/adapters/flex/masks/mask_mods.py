"""The mask_mods of FlexAttention's examples, most of them one interval of keys per query.

Every function here returns a plain Python function that torch's own ``create_block_mask`` and ``flex_attention`` take,
and that carries its native meaning, if it has one: then no pair is evaluated. In the drawings, query ``i`` goes down,
key ``j`` across, 1 = takes part.
"""

import operator
from collections.abc import Callable

import torch
from torch import Tensor

from pyattn.adapters.flex.native_forms import (
    Mask,
    MaskMod,
    check_integers,
    check_offset,
    column,
    intersection,
    is_same,
    key_ranges_of,
    known,
    makes_mods,
    mask_of,
    of_sequence,
    tensors_of,
)
from pyattn.masks import union
from pyattn.masks.key_ranges import MOST_RANGES
from pyattn.options.checks import check_size, check_window, has_values


@makes_mods
def causal(offset: int | Tensor = 0) -> MaskMod:
    """``q_idx + offset >= kv_idx``: upper-left for ``offset=0``, as in FlexAttention's examples.

    ::

        offset 0     1 0 0 0      offset 2     1 1 1 0
                     1 1 0 0                   1 1 1 1

    Args:
        offset: key position of query 0, an int, or an int32 or int64 tensor of shape () or (B,). Each call reads it,
            and refuses a block_mask whose blocks leave out what is visible now.

    Raises:
        ValueError: an int past 64 bits, a tensor of another shape.
        TypeError: other types.
    """
    return _band("causal", (-1, 0), offset)


@makes_mods
def sliding_window(left: int, right: int = 0, offset: int | Tensor = 0) -> MaskMod:
    """``-right <= q_idx + offset - kv_idx <= left``: a query sees itself, ``left`` keys before it, ``right`` after it.

    ::

        left 1     1 0 0 0      left 1, right 1     1 1 0 0
                   1 1 0 0                          1 1 1 0
                   0 1 1 0                          0 1 1 1

    Args:
        left: keys before the query's own position; -1: all of them.
        right: keys after it; 0: causal; -1: all of them.
        offset: as in :func:`causal`.

    Raises:
        ValueError: a bound below -1, an int past 64 bits, an offset of another shape.
        TypeError: other types.
    """
    check_window((left, right))
    return _band("sliding_window", (left, right), offset)


@makes_mods
def document(ids: Tensor) -> MaskMod:
    """``ids[q_idx] == ids[kv_idx]``: packed documents, hidden from each other.

    ::

        ids 0 0 1 1 1     1 1 0 0 0
                          1 1 0 0 0
                          0 0 1 1 1
                          0 0 1 1 1
                          0 0 1 1 1

    Args:
        ids: the document of each position, integers (S,) or (B, S), S at least the number of queries and of keys. They
            are copied, so later changes don't affect the mask.

    Raises:
        ValueError: another number of dimensions; at the call, more queries or keys than ids.
        TypeError: another type.
        NotImplementedError: on a CPU, a call while compiling, where ids can't be read.
    """
    check_integers("ids", ids, (1, 2))
    ids = ids.clone()
    on_cpu = ids.device.type == "cpu"
    runs = _runs(ids.reshape(-1, ids.shape[-1])) if on_cpu else None

    def ranges(seqlen_q: int, seqlen_k: int, device: torch.device) -> Tensor:
        if runs is None:
            raise ValueError(f"pyattn: ids of document must be on query's device {device}, got {ids.device}")
        if max(seqlen_q, seqlen_k) > ids.shape[-1]:
            raise ValueError(
                f"pyattn: ids of document must be as many as queries and keys, {seqlen_q} and {seqlen_k}, "
                f"got shape {tuple(ids.shape)}"
            )
        own = runs[:, :seqlen_q]
        return own if seqlen_k == ids.shape[-1] else own.clamp(max=seqlen_k)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if ids.dim() == 2:
            return ids[b, q_idx] == ids[b, kv_idx]
        return ids[q_idx] == ids[kv_idx]

    return known("document", mask_mod, None if on_cpu and runs is None else Mask(ranges=(ranges,)))


@makes_mods
def prefix_lm(prefix: int | Tensor) -> MaskMod:
    """``kv_idx < prefix or q_idx >= kv_idx``: a prefix that is visible to all queries, then causal text.

    ::

        prefix 2     1 1 0 0
                     1 1 0 0
                     1 1 1 0
                     1 1 1 1

    Args:
        prefix: its length, an int, or an int32 or int64 tensor of shape () or (B,), read as in :func:`causal`.

    Raises:
        ValueError: an int below 0, a tensor of another shape.
        TypeError: other types.
    """
    if isinstance(prefix, Tensor):
        check_integers("prefix", prefix, (0, 1))
    else:
        check_size("prefix", prefix)

    def ranges(seqlen_q: int, seqlen_k: int, device: torch.device) -> Tensor:
        end = torch.maximum(torch.arange(1, seqlen_q + 1, device=device), column(prefix)).clamp(max=seqlen_k)
        return torch.stack([torch.zeros_like(end), end], -1)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx < of_sequence(prefix, b)) | (q_idx >= kv_idx)

    return known("prefix_lm", mask_mod, Mask(ranges=(ranges,), reads=tensors_of(prefix)))


@makes_mods
def and_masks(*mask_mods: MaskMod) -> MaskMod:
    """The intersection of these masks; with no masks, every key is visible."""
    masks = [mask_of(mask_mod) for mask_mod in mask_mods]
    known_masks = [mask for mask in masks if mask is not None]
    meaning = intersection(known_masks) if len(known_masks) == len(masks) else None
    meaning = None if meaning is not None and meaning.intervals > MOST_RANGES else meaning
    return _joined("and_masks", mask_mods, operator.and_, True, meaning)


@makes_mods
def or_masks(*mask_mods: MaskMod) -> MaskMod:
    """The union of these masks; with no masks, no key is visible."""
    masks = [mask_of(mask_mod) for mask_mod in mask_mods]
    known_masks = [mask for mask in masks if mask is not None]
    meaning = _union(known_masks) if masks and len(known_masks) == len(masks) else None
    return _joined("or_masks", mask_mods, operator.or_, False, meaning)


def _union(masks: list[Mask]) -> Mask | None:
    windows = [mask for mask in masks if not mask.ranges]
    if windows and all(is_same(mask.offset, windows[0].offset) for mask in windows):
        # At one offset all windows contain the query's own position, so their union is a window.
        sides = zip(*(mask.window for mask in windows), strict=True)
        left, right = (-1 if -1 in side else max(side) for side in sides)
        windows = [windows[0]._replace(window=(left, right))]
    parts = [*windows, *(mask for mask in masks if mask.ranges)]
    if len(parts) == 1:
        return parts[0]
    count = sum(part.intervals for part in parts)

    def ranges(seqlen_q: int, seqlen_k: int, device: torch.device) -> Tensor:
        return union(*(key_ranges_of(part, seqlen_q, seqlen_k, device) for part in parts))

    reads = tuple(x for part in parts for x in part.reads)
    return Mask(ranges=(ranges,), intervals=count, reads=reads) if count <= MOST_RANGES else None


def _joined(
    name: str,
    mask_mods: tuple[MaskMod, ...],
    join: Callable[[Tensor, Tensor], Tensor],
    of_none: bool,
    mask: Mask | None,
) -> MaskMod:
    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        visible = b.new_full((), of_none, dtype=torch.bool)
        for part in mask_mods:
            visible = join(visible, part(b, h, q_idx, kv_idx))
        return visible

    return known(name, mask_mod, mask)


def _band(name: str, window: tuple[int, int], offset: int | Tensor) -> MaskMod:
    check_offset(offset)
    left, right = window

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        at, distance = of_sequence(offset, b), kv_idx - q_idx
        visible = b.new_ones((), dtype=torch.bool)
        if left >= 0:
            visible = visible & (distance >= _saturated(at - left))
        return visible & (distance <= _saturated(at + right)) if right >= 0 else visible

    return known(name, mask_mod, Mask(window, offset, reads=tensors_of(offset)))


def _saturated(bound: int | Tensor) -> int | Tensor:
    """``bound`` clamped to int64, which holds every distance between positions."""
    return bound if isinstance(bound, Tensor) else min(max(bound, -(2**63)), 2**63 - 1)


def _runs(ids: Tensor) -> Tensor | None:
    """(B, S, 2), the run of equal ids (B, S) around each position; None if an id has two runs."""
    if not has_values(ids):
        raise NotImplementedError(
            f"pyattn: document must be called outside of torch.compile and transforms, got ids of type {type(ids)}"
        )
    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    ordered = ids.sort(-1).values
    distinct = (ordered[:, 1:] != ordered[:, :-1]).sum(-1) + 1
    if ids.shape[1] and (starts.sum(-1) != distinct).any():
        return None
    run = starts.cumsum(-1)
    return torch.stack([torch.searchsorted(run, run), torch.searchsorted(run, run, right=True)], -1)
