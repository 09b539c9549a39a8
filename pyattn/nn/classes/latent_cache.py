"""Caches of latent vectors, and errors that tell the two classes of latent attention apart."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from pyattn.cache import KVCache
from pyattn.cache.call_gradients import appended
from pyattn.cache.slots import first_keys, masks_in_first_slots
from pyattn.options.attention_options import AttentionOptions
from pyattn.options.checks import has_values

Function = TypeVar("Function", bound=Callable[..., Any])

DEEPSEEK = (
    "pyattn.nn.MultiHeadLatentAttention",
    7,
    (
        *("hidden_size", "num_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"),
        *("v_head_dim", "dropout", "attention_bias", "rope_theta", "rope_interleave", "softmax_scale", "dtype"),
    ),
)
"""The class of DeepSeek's models: its name, how many arguments it needs, and their names."""

BOOK = (
    "pyattn.nn.book.MultiHeadLatentAttention",
    4,
    ("d_in", "d_out", "dropout", "num_heads", "qkv_bias", "latent_dim"),
)
"""The class of the book."""


def unlike(other: tuple[str, int, tuple[str, ...]]) -> Callable[[Function], Function]:
    """Decorator of a constructor: TypeError that names the ``other`` class for arguments which fit that one alone."""
    name, required, theirs = other

    def decorated(function: Function) -> Function:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def checked(*positional: Any, **named: Any) -> object:
            try:
                signature.bind(*positional, **named)
            except TypeError:
                first = theirs[: len(positional) - 1]
                fits = (
                    len(positional) - 1 <= len(theirs) and not set(named) - set(theirs) and not set(first) & set(named)
                )
                if fits and {*first, *named}.issuperset(theirs[:required]):
                    own = ", ".join([n for n in signature.parameters if n != "self"])
                    raise TypeError(
                        f"pyattn: {type(positional[0]).__name__} takes {own}; {name} takes {', '.join(theirs)}: use "
                        f"that one for these arguments, got {len(first)} by position and {', '.join(named) or 'none'} "
                        "by name"
                    ) from None
            return function(*positional, **named)

        return checked  # type: ignore[return-value]

    return decorated


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
