"""The native meaning of mask_mods and score_mods, and how this adapter's functions carry theirs."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar
from weakref import ref

import torch
from torch import Tensor

from pyattn.adapters.flex.masks.dense_mask import Holes
from pyattn.masks import within
from pyattn.options import UNBOUNDED, Options
from pyattn.options.checks import check_64_bits, check_names, check_tensor, check_type

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""``mask_mod(b, h, q_idx, kv_idx)``: whether the key takes part, for index tensors without dimensions."""

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""``score_mod(score, b, h, q_idx, kv_idx)``: the changed score."""

Mod = TypeVar("Mod", MaskMod, ScoreMod)

Factory = TypeVar("Factory", bound=Callable[..., object])

Ranges = Callable[[int, int, torch.device], Tensor]
"""``ranges(seqlen_q, seqlen_k, device)``: key_ranges, (B or 1, Sq, 2) or (B or 1, Sq, n, 2)."""


INT64_MAX = 2**63 - 1


class Mask(NamedTuple):
    """An intersection: the keys inside a query's window, its ranges and its masks with holes are visible to it.

    Attributes:
        window: how many keys before and after its position are visible to a query; -1: all.
        offset: key position of query 0, an int, or an integer tensor of shape () or (B,).
        ranges: further intervals of keys.
        holes: masks whose rows are more intervals.
        intervals: how many intervals a query has at most, apart from holes.
        reads: the tensors of window and ranges, which each call reads again.
    """

    window: tuple[int, int] = UNBOUNDED
    offset: int | Tensor = 0
    ranges: tuple[Ranges, ...] = ()
    holes: tuple[Holes, ...] = ()
    intervals: int = 1
    reads: tuple[Tensor, ...] = ()


class Score(NamedTuple):
    """A score_mod as options of :func:`pyattn.attention`.

    ``offset`` belongs to the distances of ALiBi and of relative_bias, ``factor`` to softmax_scale.
    """

    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    offset: int | Tensor = 0
    factor: float = 1.0
    bias: Tensor | None = None
    relative_bias: Tensor | None = None


class Native(NamedTuple):
    """The meaning, valid for this function only: ``functools.wraps`` copies attributes to others."""

    function: ref[Callable[..., Tensor]]
    meaning: Mask | Score


def makes_mods(function: Factory) -> Factory:
    """Marks ``function`` as one that returns mods, so errors can tell it from its result."""
    checked = check_names(function)
    checked.makes_mods = True  # type: ignore[attr-defined]
    return checked


def check_made(what: str, function: object) -> None:
    """TypeError if ``function`` is one that returns mods, where its result belongs."""
    if getattr(function, "makes_mods", False):
        name = getattr(function, "__name__", "")
        raise TypeError(f"pyattn: {what} must be what {name}(...) returns, got the function {name} itself")


def known(name: str, function: Mod, meaning: Mask | Score | None) -> Mod:
    """``function`` under this name, with its native meaning attached if it has one."""
    function.__name__ = function.__qualname__ = name  # torch and errors show these
    if meaning is not None:
        function.native = Native(ref(function), meaning)  # type: ignore[attr-defined]
    return function


def check_integers(name: str, tensor: object, dims: tuple[int, int]) -> None:
    """TypeError or ValueError unless ``tensor`` is int32 or int64 and its number of dimensions is in ``dims``."""
    check_tensor(name, tensor)
    assert isinstance(tensor, Tensor)
    if tensor.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"pyattn: {name} must be int32 or int64, got {tensor.dtype}")
    if tensor.dim() not in dims:
        raise ValueError(f"pyattn: {name} must have {dims[0]} or {dims[1]} dimensions, got shape {tuple(tensor.shape)}")


def check_offset(offset: int | Tensor) -> None:
    """TypeError or ValueError unless ``offset`` is an int or an integer tensor of shape () or (B,)."""
    if isinstance(offset, Tensor):
        check_integers("offset", offset, (0, 1))
    else:
        check_type("offset", offset, int, Tensor)
        check_64_bits("offset", offset)


def mask_of(mask_mod: object) -> Mask | None:
    """The native meaning of a mask_mod, None if it must be evaluated; TypeError if it is no function."""
    meaning = _meaning("mask_mod", mask_mod)
    return meaning if isinstance(meaning, Mask) else None


def score_of(score_mod: object) -> Score | None:
    """The native meaning of a score_mod, None if it must be evaluated; TypeError if it is no function."""
    meaning = _meaning("score_mod", score_mod)
    return meaning if isinstance(meaning, Score) else None


def is_same(offset: int | Tensor, other: int | Tensor) -> bool:
    """Whether two offsets are known to be equal; tensors are not read."""
    return offset is other or (isinstance(offset, int) and isinstance(other, int) and offset == other)


def intersection(masks: Sequence[Mask]) -> Mask:
    """The keys that are visible by all of these masks; each end of one's interval may begin another of both."""
    window, offset, ranges, holes, *_ = Mask()
    for mask in masks:
        if window == UNBOUNDED:
            window, offset = mask.window, mask.offset
        elif mask.window != UNBOUNDED and is_same(mask.offset, offset):
            left, right = (max(pair) if -1 in pair else min(pair) for pair in zip(window, mask.window, strict=True))
            window = left, right
        elif mask.window != UNBOUNDED:
            ranges += (ranges_of_band(mask.window, mask.offset),)
        ranges, holes = ranges + mask.ranges, holes + mask.holes
    reads = tuple(x for mask in masks for x in mask.reads)
    return Mask(window, offset, ranges, holes, 1 + sum(mask.intervals - 1 for mask in masks), reads)


def native_options(score: Score, mask: Mask, query: Tensor, key: Tensor, scale: float | None) -> dict[str, Any]:
    """The arguments of :func:`pyattn.attention` after query, key and value."""
    if score.factor != 1:
        scale = Options(softmax_scale=scale).scale_for(query.shape[3]) * score.factor
    of_distances = score.alibi_slopes is not None or score.relative_bias is not None
    return {
        **_mask_options(mask, score.offset if of_distances else None, query, key.shape[2]),
        "softmax_scale": scale,
        "softcap": score.softcap,
        "alibi_slopes": None if score.alibi_slopes is None else score.alibi_slopes.clone(),  # backward reads these
        "bias": score.bias,
        "relative_bias": score.relative_bias,
    }


def _mask_options(mask: Mask, offset: int | Tensor | None, query: Tensor, seqlen_k: int) -> dict[str, Any]:
    """``mask`` as arguments of :func:`pyattn.attention`, for ``query`` (B, Hq, Sq, D).

    ``offset`` belongs to ALiBi's distances. attention has one offset for both,
    so a window at another offset becomes key_ranges.
    """
    batch, _, seqlen_q, _ = query.shape
    window, own, ranges, holes, *_ = mask
    if offset is None or is_same(offset, own):
        offset = own
    elif window != UNBOUNDED:
        window, ranges = UNBOUNDED, (*ranges, ranges_of_band(window, own))
    if isinstance(offset, Tensor):
        every = offset.to(torch.int64).expand(batch)
        q_offset: int | Tensor | None = every.clone(memory_format=torch.contiguous_format)  # backward reads this one
    else:
        q_offset = None if offset == 0 and seqlen_q == seqlen_k else offset
    left, right = window
    bits = [x.bits() for x in holes]
    ranges += tuple(lambda *_, found=found: found for found in (x.hulls() for x in holes) if found is not None)
    return {
        "causal": right == 0,
        "window": UNBOUNDED if left == -1 and right <= 0 else (left, right),
        "q_offset": q_offset,
        "key_ranges": ranges_for(query, Mask(ranges=ranges), seqlen_k) if ranges else None,
        "mask": functools.reduce(torch.logical_and, bits) if bits else None,
    }


def ranges_for(query: Tensor, mask: Mask, seqlen_k: int) -> Tensor:
    """``mask`` as key_ranges for ``query`` (B, Hq, Sq, D); ValueError if it is for another B."""
    key_ranges = key_ranges_of(mask, query.shape[2], seqlen_k, query.device)
    if key_ranges.shape[0] not in (1, query.shape[0]):
        raise ValueError(
            f"pyattn: block_mask must be made of ids or lengths for 1 or {query.shape[0]} sequences, "
            f"got {key_ranges.shape[0]}"
        )
    return key_ranges


def key_ranges_of(mask: Mask, seqlen_q: int, seqlen_k: int, device: torch.device) -> Tensor:
    """``mask`` as key_ranges, (B or 1, Sq, 2) or (B or 1, Sq, n, 2)."""
    parts = mask.ranges if mask.window == UNBOUNDED else (*mask.ranges, ranges_of_band(mask.window, mask.offset))
    if not parts:
        return torch.tensor([0, seqlen_k], device=device).repeat(1, seqlen_q, 1)
    return functools.reduce(within, [ranges(seqlen_q, seqlen_k, device) for ranges in parts])


def ranges_of_band(window: tuple[int, int], offset: int | Tensor) -> Ranges:
    """The ranges of a window around positions that start at ``offset``."""

    left, right = window

    def ranges(seqlen_q: int, seqlen_k: int, device: torch.device) -> Tensor:
        rows = torch.arange(seqlen_q, device=device)
        first = torch.as_tensor(offset, device=device).to(torch.int64).reshape(-1, 1)
        around = -seqlen_q - 1, seqlen_k  # beyond these, the offset of query 0 changes nothing
        begin, end = torch.zeros_like(first + rows), torch.full_like(first + rows, seqlen_k)
        if left >= 0:
            begin = (rows + (first.clamp(min=left - INT64_MAX) - left).clamp(*around)).clamp(0, seqlen_k)
        if right >= 0:
            end = (rows + (first.clamp(max=INT64_MAX - right) + right).clamp(*around) + 1).clamp(0, seqlen_k)
        return torch.stack([begin, torch.maximum(begin, end)], -1)

    return ranges


def of_sequence(value: int | Tensor, b: Tensor) -> int | Tensor:
    """The number for sequence ``b``, if ``value`` has one for each."""
    return value[b] if isinstance(value, Tensor) and value.dim() else value


def tensors_of(value: int | Tensor) -> tuple[Tensor, ...]:
    """The tensor, if ``value`` is one."""
    return (value,) if isinstance(value, Tensor) else ()


def column(value: int | Tensor) -> Tensor:
    """One number per sequence as (B or 1, 1)."""
    return value.to(torch.int64).reshape(-1, 1) if isinstance(value, Tensor) else torch.tensor([[value]])


def _meaning(what: str, function: object) -> Mask | Score | None:
    check_made(what, function)
    if not callable(function):
        raise TypeError(f"pyattn: {what} must be a function, got {function!r}")
    native = getattr(function, "native", None)
    if isinstance(native, Native) and native.function() is function:
        return native.meaning
    return None
