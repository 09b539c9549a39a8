"""Masks over the slots of a cache: a cache's keys lie in slots, callers count positions."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from pyattn import ops
from pyattn.cache.eight_bits import bytes_of, dequantized
from pyattn.cache.kv_cache import KVCache
from pyattn.cache.ring_buffer import in_slots, narrowed
from pyattn.masks.draft_trees import behind_cache
from pyattn.masks.key_ranges import are_ranges, check_ranges, plain
from pyattn.ops.row_invariance import refuse_row_invariance
from pyattn.options.attention_options import AttentionOptions
from pyattn.options.axes import AXES, having, part
from pyattn.options.checks import check_64_bits, check_tensor, check_type, check_window, int64_of, integers_of
from pyattn.options.schema import UNBOUNDED
from pyattn.options.selected_keys import in_first_keys

_COUNTING_KEYS = [name for name in having("k", "n") if name != "mask"]
"""Options that number keys by position; a mask may be one over the queries' own keys."""


def check_ring(window: tuple[int, int] | None, max_seqlen: int, seqlen_q: int, options: Mapping[str, object]) -> None:
    """NotImplementedError or ValueError for options and queries that a ring buffer can't take."""
    if window is None:
        return
    refuse_row_invariance("attention over a ring buffer")  # whose keys move to other places of blocks
    for wrong in _COUNTING_KEYS:
        if options.get(wrong) is not None:
            raise NotImplementedError(f"pyattn: a cache with a window takes no {wrong}, got window={window}")
    mask = options.get("mask")
    if isinstance(mask, Tensor) and mask.dim() and mask.shape[-1] not in (1, seqlen_q):
        raise NotImplementedError(
            f"pyattn: over a cache with a window, a mask has the keys of the {seqlen_q} queries alone, got shape "
            f"{tuple(mask.shape)} and window={window}"
        )
    narrowed(UNBOUNDED, window, max_seqlen, seqlen_q)


def masks_in_slots(cache: KVCache, seqlen_q: int, options: AttentionOptions) -> AttentionOptions:
    """Converts causal, q_offset, window, key_ranges and mask from positions to the cache's slots."""
    if not options and cache.window is None and cache.last_append is None:
        return {"q_offset": _newest_query(cache, seqlen_q)}
    causal, window, position = options.get("causal", True), options.get("window"), options.get("q_offset")
    check_type("causal", causal, bool)
    if window is not None:
        check_window(window)
    if cache.window is not None:
        window = narrowed(UNBOUNDED if window is None else window, cache.window, cache.max_seqlen, seqlen_q)
    left = UNBOUNDED[0] if window is None else window[0]
    last_append = cache.last_append if position is None else None
    padding = None if last_append is None else _padding(last_append, cache.lengths, seqlen_q)
    hidden = causal and position is None and padding is None  # the causal mask itself hides unused slots
    used = None if hidden else _newest(cache)
    q_offset = _first_slot(cache, seqlen_q, left, position, padding)
    key_ranges = plain(options.get("key_ranges"), causal)
    if used is not None:
        key_ranges = _in_use(key_ranges, used, padding, seqlen_q, cache.max_seqlen)
    mask = options.get("mask")
    own_keys = isinstance(mask, Tensor) and mask.shape[-1:] == (seqlen_q,) and seqlen_q > 1
    if mask is not None and own_keys and (cache.window is not None or seqlen_q != cache.max_seqlen):
        mask = over_slots(mask, q_offset, cache)
    return {"causal": causal, "q_offset": q_offset, "window": window, "key_ranges": key_ranges, "mask": mask}


def _first_slot(
    cache: KVCache, seqlen_q: int, left: int, position: int | Tensor | None, padding: Tensor | None
) -> int | Tensor:
    """The slot of query 0: at a given position, before the padding of the last append, or of the newest queries."""
    if position is None and padding is None:
        return _newest(cache, seqlen_q, left)
    if padding is not None:
        position = cache.lengths - seqlen_q + padding
    assert position is not None
    position = int64_of(position) if isinstance(position, Tensor) else position
    if cache.window is None:
        return position
    return in_slots(position, cache.lengths, cache.starts, left, cache.max_seqlen)


def over_slots(mask: Tensor, q_offset: int | Tensor, cache: KVCache) -> Tensor:
    """A mask over the queries' own keys as one over the cache's slots; as it is if it fits neither."""
    check_type("q_offset", q_offset, int, torch.SymInt, Tensor)
    check_64_bits("q_offset", q_offset)
    lengths, slots = cache.lengths, cache.max_seqlen if cache.window is None else cache.k.shape[2]
    first = q_offset if isinstance(q_offset, Tensor) else torch.full_like(lengths, q_offset)
    own_batch = mask.dim() < 4 or (mask.dim() == 4 and mask.shape[0] in (1, len(lengths)))
    fits = own_batch and first.shape == lengths.shape and first.dtype == torch.int64
    return behind_cache(mask, first, slots) if fits else mask


def _newest_query(cache: KVCache, seqlen_q: int) -> int | Tensor:
    """The slot of the first of the newest queries, without a ring buffer; an int, which costs less, if all agree."""
    lengths = integers_of(cache.lengths)
    if not lengths or lengths.count(lengths[0]) != len(lengths) or not 0 <= lengths[0] <= cache.max_seqlen:
        return _newest(cache, seqlen_q)
    rows = cache.k if cache.block_table is None else cache.block_table
    fits = len(lengths) == rows.shape[0] and cache.lengths.dtype == torch.int64
    return lengths[0] - seqlen_q if fits else _newest(cache, seqlen_q)


def _newest(cache: KVCache, seqlen_q: int = 0, left: int = 0) -> Tensor:
    """(B,): the slot of the first of the ``seqlen_q`` newest queries; it sees ``left`` keys before its own.

    With seqlen_q 0, the result is the end of the slots in use.
    """
    if cache.window is None:
        first: Tensor = ops.cache_newest(cache.lengths, None, seqlen_q, 0, cache.max_seqlen)
    else:
        first = ops.cache_newest(cache.lengths, cache.starts, seqlen_q, left, cache.k.shape[2])
    return first


def _padding(last_append: Tensor, lengths: Tensor, seqlen_q: int) -> Tensor:
    """(B,): how many of a sequence's last queries are padding of the last append.

    The number is 0 if that append had more rows than there are queries, or if the sequence's length has changed since.
    """
    new, before, after = last_append.unbind(0)
    return torch.where((new <= seqlen_q) & (after == lengths), new - (after - before), 0)


def _in_use(key_ranges: Tensor | None, used: Tensor, padding: Tensor | None, seqlen_q: int, max_seqlen: int) -> Tensor:
    """``key_ranges`` of B sequences, cut to the slots in use, [0, used), and empty for the last ``padding`` queries."""
    end = used.unsqueeze(1).expand(-1, seqlen_q)
    if padding is not None:
        rows = torch.arange(seqlen_q, device=used.device)
        end = torch.where(rows < (seqlen_q - padding).unsqueeze(1), end, 0)
    if key_ranges is None:
        return torch.stack([torch.zeros_like(end), end], -1)
    check_tensor("key_ranges", key_ranges)
    if not are_ranges(key_ranges, *end.shape) or key_ranges.dtype not in (torch.int32, torch.int64):
        return key_ranges  # attention refuses them
    if not key_ranges.is_cuda:  # on a GPU they are not read on the host: kernels clamp them
        check_ranges(key_ranges, max_seqlen)
    first, after_last = key_ranges.unbind(-1)
    end = torch.minimum(after_last, end if first.dim() == 2 else end.unsqueeze(-1))
    return torch.stack([torch.minimum(first, end), end], -1)


def masks_in_first_slots(cache: KVCache, slots: int, seqlen_q: int, options: AttentionOptions) -> AttentionOptions:
    """The options for attention over the keys in the first ``slots`` slots, all that are in use."""
    options = options | masks_in_slots(cache, seqlen_q, options)
    if (key_ranges := options.get("key_ranges")) is not None:
        options["key_ranges"] = key_ranges.clamp(max=slots)
    first: dict[str, Any] = {**options}
    for name in having("k"):
        if first.get(name) is not None:
            first[name] = part(AXES[name], first[name], {"k": slice(slots)})
    if (selected := options.get("selected")) is not None:
        first["selected"] = in_first_keys(selected, options.get("selected_block") or 1, slots, cache.max_seqlen)
    return cast(AttentionOptions, first)


def first_keys(cache: KVCache, slots: int) -> Tensor:
    """(B, Hkv, slots, D): the keys in the first slots of every sequence, copied if they lie in pages or have 8 bits."""
    if cache.kv_dtype is None:
        return _first_rows(cache.k, cache, slots)
    assert cache.k_scale is not None
    values = _first_rows(bytes_of(cache.k), cache, slots).view(cache.kv_dtype)
    return dequantized(values, _first_rows(cache.k_scale, cache, slots), cache.rotation, cache.dtype)


def _first_rows(storage: Tensor, cache: KVCache, slots: int) -> Tensor:
    if cache.block_table is None:
        return storage[:, :, :slots]
    pages = cache.block_table[:, : -(-slots // storage.shape[1])]
    return storage[pages].flatten(1, 2).transpose(1, 2)[:, :, :slots]
