"""The operators that change a KV cache in place.

They are registered, with what they mutate declared, so that ``torch.compile`` keeps a decoding loop in one graph: how
far each sequence has come is read inside them, on the CPU, where the compiler does not look.

``keys`` (B, Hkv, slots, D) and ``values`` (B, Hkv, slots, Dv) hold position ``p`` of sequence ``b`` in slot
``p - starts[b]``, up to position ``lengths[b]``. A ring has more slots than ``max_seqlen`` and keeps the last
``max_seqlen`` positions at least; any other cache has as many, and ``starts`` stays 0.
"""

from itertools import groupby

import torch
from torch import Tensor

_library = torch.library.Library("pyattn", "FRAGMENT")
_library.define(
    "cache_append(Tensor(a!) keys, Tensor(b!) values, Tensor(c!) lengths, Tensor(d!) starts, Tensor k, Tensor v, "
    "Tensor? new_lengths, SymInt max_seqlen) -> ()"
)
_library.define(
    "cache_reorder(Tensor(a!) keys, Tensor(b!) values, Tensor(c!) lengths, Tensor(d!) starts, Tensor idx) -> ()"
)
_library.define(
    "cache_slots(Tensor lengths, Tensor starts, Tensor q_offset, SymInt window, SymInt max_seqlen) -> Tensor"
)


def _check(name: str, tensor: Tensor, like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """TypeError or ValueError unless ``tensor`` fits the cache, in which ``like`` lies."""
    if tensor.dtype != dtype:
        raise TypeError(f"pyattn: {name} must have the cache's dtype {dtype}, got {tensor.dtype}")
    if tensor.device != like.device:
        raise ValueError(f"pyattn: {name} must be on the cache's device, got {tensor.device} and {like.device}")
    if tensor.shape != shape:
        raise ValueError(f"pyattn: {name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}")


def _check_indices(name: str, tensor: Tensor, like: Tensor) -> None:
    """Likewise an int64 for each sequence."""
    if tensor.dtype != torch.int64:
        raise TypeError(f"pyattn: {name} must be int64, got {tensor.dtype}")
    _check(name, tensor, like, like.shape, torch.int64)


def _check_new(
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    starts: Tensor,
    k: Tensor,
    v: Tensor,
    new_lengths: Tensor | None,
    max_seqlen: int,
) -> None:
    """What can be checked without reading values: the whole of ``cache_append`` on fake and meta tensors."""
    if k.dim() != 4:
        raise ValueError(f"pyattn: k must have 4 dimensions (batch, num_heads, new, head_dim), got {tuple(k.shape)}")
    for name, new, storage in (("k", k, keys), ("v", v, values)):
        batch, heads, _, dim = storage.shape
        _check(name, new, storage, (batch, heads, k.shape[2], dim), storage.dtype)
    if new_lengths is not None:
        _check_indices("lengths", new_lengths, lengths)


def _append(
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    starts: Tensor,
    k: Tensor,
    v: Tensor,
    new_lengths: Tensor | None,
    max_seqlen: int,
) -> None:
    """Writes position ``lengths[b] + i`` for the first ``new_lengths[b]`` of the new ones; everything is checked first.

    Where a ring's slots end, what it still needs moves to its first slots.
    """
    _check_new(keys, values, lengths, starts, k, v, new_lengths, max_seqlen)
    batch, _, slots, _ = keys.shape
    new = k.shape[2]
    counts = [new] * batch if new_lengths is None else new_lengths.tolist()
    states = list(zip(lengths.tolist(), starts.tolist(), counts, strict=True))
    for b, (length, start, count) in enumerate(states):
        if not 0 <= length - start <= slots:
            raise ValueError(
                f"pyattn: each of the cache's lengths must be between its start and {slots} more, got {length} and "
                f"{start} at {b}"
            )
        if not 0 <= count <= new:
            raise ValueError(f"pyattn: each of lengths must be between 0 and {new}, got {count} at {b}")
        if slots == max_seqlen and length + count > max_seqlen:
            raise ValueError(
                f"pyattn: a sequence must not outgrow the cache's max_seqlen of {max_seqlen}, got {length} + {count} "
                f"positions of sequence {b}"
            )
    for (length, start, count), group in groupby(range(batch), key=states.__getitem__):
        sequences = list(group)
        rows = slice(sequences[0], sequences[-1] + 1)
        end, skipped = length - start, 0
        if end + count > slots:
            skipped = max(count - max_seqlen, 0)
            kept = min(end, max_seqlen - count + skipped)
            for storage in (keys, values):
                storage[rows, :, :kept] = storage[rows, :, end - kept : end].clone()  # they may overlap
            starts[rows] = length - kept + skipped
            end = kept
        for storage, added in ((keys, k), (values, v)):
            storage[rows, :, end : end + count - skipped] = added[rows, :, skipped:count]
    lengths.add_(new if new_lengths is None else new_lengths)


def _reorder(keys: Tensor, values: Tensor, lengths: Tensor, starts: Tensor, idx: Tensor) -> None:
    """Sequence ``b`` becomes a copy of sequence ``idx[b]``; slots that no sequence uses are left as they are."""
    _check_indices("idx", idx, lengths)
    batch = len(idx)
    for b, index in enumerate(idx.tolist()):
        if not 0 <= index < batch:
            raise ValueError(f"pyattn: each of idx must be between 0 and {batch - 1}, got {index} at {b}")
    used = max(0, int((lengths - starts).max())) if batch else 0
    for storage in (keys[:, :, :used], values[:, :, :used], lengths, starts):
        storage.copy_(storage.index_select(0, idx))


def _slots(lengths: Tensor, starts: Tensor, q_offset: Tensor, window: int, max_seqlen: int) -> Tensor:
    """``q_offset`` in slots: ValueError where query 0 would see keys that the ring may have dropped."""
    _check_indices("q_offset", q_offset, lengths)
    oldest = (lengths - max_seqlen).clamp(min=0)
    for b, (offset, position) in enumerate(zip(q_offset.tolist(), oldest.tolist(), strict=True)):
        if position and offset - window + 1 < position:
            raise ValueError(
                f"pyattn: q_offset must be at least {position + window - 1}, where a window of {window} begins with "
                f"the oldest key that the cache keeps, got {offset} for sequence {b}"
            )
    return q_offset - starts


for _device in ("CPU", "CUDA"):
    _library.impl("cache_append", _append, _device)
    _library.impl("cache_reorder", _reorder, _device)
    _library.impl("cache_slots", _slots, _device)


def _reorder_fake(keys: Tensor, values: Tensor, lengths: Tensor, starts: Tensor, idx: Tensor) -> None:
    _check_indices("idx", idx, lengths)


def _slots_fake(lengths: Tensor, starts: Tensor, q_offset: Tensor, window: int, max_seqlen: int) -> Tensor:
    _check_indices("q_offset", q_offset, lengths)
    return torch.empty_like(q_offset)


torch.library.register_fake("pyattn::cache_append", _check_new, lib=_library)
torch.library.register_fake("pyattn::cache_reorder", _reorder_fake, lib=_library)
torch.library.register_fake("pyattn::cache_slots", _slots_fake, lib=_library)

append = torch.ops.pyattn.cache_append.default
reorder = torch.ops.pyattn.cache_reorder.default
slots = torch.ops.pyattn.cache_slots.default
