"""The arguments of transformers' attention function as options of :func:`pyattn.attention`."""

import torch
from torch import Tensor, nn

from pyattn import AttentionOptions
from pyattn.adapters.transformers import packed
from pyattn.adapters.transformers.mask import Mask
from pyattn.masks import KeyRanges
from pyattn.options import UNBOUNDED
from pyattn.options.checks import check_size, check_tensor


def mask_of(attention_mask: Tensor | KeyRanges | Mask | None, query: Tensor, key: Tensor) -> Tensor | Mask | None:
    """The mask of a call: a bool or float tensor (B, H, Sq, Sk), a Mask for these queries and keys, or None."""
    sizes = query.shape[2], key.shape[2]
    if isinstance(attention_mask, KeyRanges):
        return Mask((len(attention_mask), 1, *sizes), attention_mask)
    if isinstance(attention_mask, Mask):
        if attention_mask.shape[2:] != sizes:
            raise ValueError(
                f"pyattn: attention_mask must be made for {sizes[0]} queries and {sizes[1]} keys, the call's, got one "
                f"for {attention_mask.shape[2]} and {attention_mask.shape[3]}"
            )
        return attention_mask.of_rows(query.device)
    if attention_mask is not None:
        check_tensor("attention_mask", attention_mask)
        if attention_mask.dim() != 4:
            raise ValueError(f"pyattn: attention_mask must have 4 dimensions, got shape {tuple(attention_mask.shape)}")
    return attention_mask


def window(sliding_window: int, decoder: bool, seqlen_k: int) -> tuple[int, int]:
    """The window for attention without a mask; ValueError if only a mask could express it."""
    check_size("sliding_window", sliding_window, least=1)
    if decoder:
        return sliding_window - 1, -1
    if sliding_window < seqlen_k:
        raise ValueError(
            f"pyattn: sliding_window must be at least the number of keys where attention is neither causal nor masked, "
            f"got {sliding_window} and {seqlen_k}"
        )
    return UNBOUNDED


def documents(
    module: nn.Module, position_ids: Tensor | None, query: Tensor, key: Tensor, mask: Tensor | Mask | None
) -> Tensor | None:
    """The keys of each query's document as key_ranges; None if positions show one document, or the mask is whole."""
    batch, _, seqlen_q, _ = query.shape
    if isinstance(mask, Tensor):
        return None
    if position_ids is None:
        if seqlen_q == key.shape[2]:
            packed.remember(module)
        return None
    if position_ids.shape not in ((1, seqlen_q), (batch, seqlen_q)):
        return None
    return packed.by_positions(position_ids, mask, key.shape[2])


def masked(
    attention_mask: Tensor | Mask | None, position_bias: Tensor | None, key_ranges: Tensor | None
) -> AttentionOptions:
    """A mask and a position bias as options; the mask's ranges are intersected with ``key_ranges``, if given."""
    mask, bias = attention_mask, position_bias
    if isinstance(mask, Mask):
        if mask.ranges is not None:
            key_ranges = mask.ranges if key_ranges is None else packed.within(mask.ranges, key_ranges)
        mask = mask.pairs
    elif mask is not None and mask.is_floating_point():
        bias = mask if bias is None else bias + mask
        mask = None
    elif mask is not None and mask.dtype != torch.bool:
        raise TypeError(f"pyattn: attention_mask must be bool or float, got {mask.dtype}")
    return {"key_ranges": key_ranges, "mask": mask, "bias": bias}


def select(options: AttentionOptions, listed: Tensor) -> None:
    """Adds listed keys, bool, to the mask of ``options``: a key is visible if both show it."""
    mask = options.get("mask")
    options["mask"] = listed if mask is None else mask & listed
