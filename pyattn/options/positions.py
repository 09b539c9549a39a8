"""Positions of queries and keys in part of a call, and the arithmetic of intervals between them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pyattn.options.schema import Options
from pyattn.options.selected_keys import keys_of

INT64 = torch.iinfo(torch.int64)

Count = int | Tensor
"""One number for all sequences, or int64 (B,), one for each."""


def explicit(options: Options, batch: int, num_heads_q: int, last_offset: Count, device: torch.device) -> Options:
    """The options of a whole call with its positions filled in, and its origins under dropout, where left to defaults.

    ``last_offset`` is the default of q_offset, ``seqlen_k - seqlen_q``, in packed calls one for each sequence.
    """
    if isinstance(last_offset, Tensor) and options.q_offsets is None:
        given = last_offset if options.q_offset is None else torch.full_like(last_offset, options.q_offset)
        options = options._replace(q_offset=None, q_offsets=given)
    elif options.q_offsets is None and options.q_offset is None:
        options = options._replace(q_offset=last_offset)
    if options.dropout_p:
        options = options._replace(dropout_origins=options.origins_for(batch, num_heads_q, device))
    return options


def shift(options: Options, queries: Count, keys: Count, num_keys: Count, tokens: Tensor | None = None) -> Options:
    """The options of a part of a call as those of a separate call, whose queries and keys are counted from 0.

    ::

        q_offset + queries - keys        key_ranges - keys, within [0, num_keys]        origins + (queries, keys)
        selected - keys, -1 for none outside of [0, num_keys)

    Args:
        options: :func:`explicit` ones, of the part's rows and columns: see :func:`pyattn.options.axes.take`.
        queries, keys: the numbers of the part's first query and first key in the whole.
        num_keys: how many keys the part has.
        tokens: of packed sequences (B,), how many queries each has; those after the last sequence see what they saw.
    """
    changed: dict[str, object] = {}
    ahead = queries - keys
    if options.q_offsets is not None:
        changed["q_offsets"] = moved(options.q_offsets, ahead)
    elif isinstance(ahead, Tensor):
        changed = {"q_offset": None, "q_offsets": moved(torch.full_like(ahead, options.q_offset), ahead)}
    else:
        changed["q_offset"] = max(INT64.min, min(INT64.max, options.q_offset + ahead))
    if options.key_ranges is not None:
        changed["key_ranges"] = moved_ranges(options.key_ranges, keys, num_keys, tokens)
    if options.dropout_p:
        changed["dropout_origins"] = moved_origins(options.dropout_origins, queries=queries, keys=keys)
    if options.selected is not None:
        changed |= _moved_lists(options, keys, num_keys)
    return options._replace(**changed)


def moved(offset: Tensor, by: Count) -> Tensor:
    """``offset + by``, or the ends of int64 beyond which that lies."""
    by = by if isinstance(by, Tensor) else torch.full_like(offset, by)
    return offset.clamp(INT64.min - by.clamp(max=0), INT64.max - by.clamp(min=0)) + by


def moved_ranges(ranges: Tensor, keys: Count, num_keys: Count, tokens: Tensor | None = None) -> Tensor:
    """Key ranges counted from key number ``keys`` on, within ``num_keys``; ``tokens`` as for :func:`shift`."""
    if tokens is None:
        first, most = (n if isinstance(n, int) else n.view(-1, *(1,) * (ranges.dim() - 1)) for n in (keys, num_keys))
        return (ranges - first).clamp(min=0).clamp(max=most)
    first, most = (
        n if isinstance(n, int) else n.repeat_interleave(tokens).view(-1, *(1,) * (ranges.dim() - 1))
        for n in (keys, num_keys)
    )
    held = int(tokens.sum())
    own = (ranges[:held] - first).clamp(min=0).clamp(max=most)
    return torch.cat([own, ranges[held:].to(own.dtype)])


def _moved_lists(options: Options, keys: Count, num_keys: Count) -> dict[str, object]:
    """``selected`` counted from key number ``keys`` on, within ``num_keys``; of single keys if that cuts a block."""
    entries, block = options.selected, options.selected_block
    if block > 1 and (isinstance(keys, Tensor) or keys % block):
        entries, block = keys_of(entries, block), 1
    first, most = (n.view(-1, 1, 1, 1) if isinstance(n, Tensor) else n for n in (keys, num_keys))
    entries = entries - first // block
    here = (entries >= 0) & (entries * block < most)
    return {"selected": torch.where(here, entries, -1), "selected_block": block}


def moved_origins(origins: Tensor, *, heads: Count = 0, queries: Count = 0, keys: Count = 0) -> Tensor:
    """``dropout_origins`` of a part that begins with these of the whole's heads, queries and keys."""
    begins = [torch.as_tensor(n, device=origins.device).expand(len(origins)) for n in (0, 0, heads, queries, keys)]
    return origins + torch.stack(begins, -1)


def span(offset: Count) -> tuple[int, int]:
    """The least and the largest of the sequences' offsets."""
    if isinstance(offset, Tensor):
        low, high = offset.aminmax() if len(offset) else (0, 0)
        return int(low), int(high)
    return offset, offset


def visible_keys(queries: range, keys: range, offsets: tuple[int, int], causal: bool, window: Sequence[int]) -> range:
    """The keys from the first to the last that causal and window let any of these queries see.

    ``offsets`` are the least and the largest of the sequences' key positions of query 0.
    """
    if not (queries and keys):
        return range(0)
    left, right = window
    first, last = queries[0] + offsets[0], queries[-1] + offsets[1]
    ends = [last + most + 1 for most, bounded in ((0, causal), (right, right >= 0)) if bounded]
    begin = keys.start if left < 0 else max(keys.start, first - left)
    return range(begin, max(begin, min([keys.stop, *ends])))
