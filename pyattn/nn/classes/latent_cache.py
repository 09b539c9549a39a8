"""Caches of latent vectors: which form of latent attention a call over one takes, and its rows as keys."""

from typing import Any

from torch import Tensor

from pyattn.cache import KVCache
from pyattn.cache.call_gradients import appended
from pyattn.cache.slots import first_keys, masks_in_first_slots
from pyattn.options.attention_options import AttentionOptions
from pyattn.options.checks import has_values


def expands(kv_cache: KVCache, seqlen: int, rank: int, columns: int) -> bool:
    """Whether ``seqlen`` new tokens take fewer operations with the keys of all heads than with absorption.

    ``rank`` columns of a latent vector become ``columns`` of a head's key without position and its value. A head with T
    queries over S keys takes T S (2 rank + r) + T U multiply-adds if it absorbs, and T S (columns + r) + S U if it
    expands, with U = rank columns, and r columns with positions: prompts expand, single tokens absorb. Where lengths
    cannot be read without waiting, and in a ring buffer, whose slots are not positions, all tokens absorb.
    """
    lengths = kv_cache.lengths
    if seqlen <= 1 or kv_cache.window is not None or lengths.is_cuda or not has_values(lengths) or not len(lengths):
        return False
    before = int(lengths.max())
    saved = seqlen * (before + seqlen) * (2 * rank - columns)
    return before * rank * columns < saved


def appended_latents(cache: KVCache, rows: Tensor, options: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """All rows in use of a cache, (B, S, 1, D), after those of this call, and the options over them."""
    view = appended(cache, rows.transpose(1, 2), None, options.get("lengths"))
    slots = int(cache.lengths.max())
    masks: AttentionOptions = {"key_ranges": options["key_ranges"]}
    masks |= {"mask": options.get("mask"), "bias": options.get("bias")}
    known = options | masks_in_first_slots(cache, slots, rows.shape[1], masks)
    return first_keys(view, slots).transpose(1, 2), known | {"kv_cache": None, "lengths": None}
