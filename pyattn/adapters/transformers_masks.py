"""Masks of transformers as ``key_ranges``, made without a tensor of queries x keys.

transformers describes a mask by a function of (batch, head, query, key) and asks for a tensor, which every layer gets.
This one gives int32 (B or 1, 1, Sq, 2): query ``i`` sees the keys ``begin <= j < end`` of its pair. A plain tensor of
four dimensions passes through ``generate``, checkpoints and caches as a mask of queries x keys does; a model that reads
or changes masks by itself meets shapes that don't broadcast, so an error. A mask of queries x keys is int8 where it is
made here for attention alone, and so is told from a user's, which says all about packed documents.
"""

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from pyattn import masks
from pyattn.adapters import transformers_models, transformers_rules
from pyattn.arguments import has_values

MOST_KEYS_OF_A_MASK = 2
"""With so few keys, ranges and a mask have the same shape: then it is a mask."""

CHUNK = 1 << 18
"""Elements of a mask evaluated at once: they stay in a core's cache, with what a mask function makes of them."""

HOLES = "a row of the mask has holes"
TRACED = "made while tracing or compiling, where values cannot be read"
WANTED = "the model works with the mask itself"

Dense = Callable[[int, int, Tensor | None], Tensor]
"""``dense(first, rows, padding)``: some rows of a mask, bool (B, 1, rows, Sk), with the padding that is given."""

DENSE: Counter[str] = Counter()
"""How many masks of queries x keys were made, by reason."""


def are_ranges(mask: Tensor, seqlen_k: int) -> bool:
    """Whether a tensor is what :func:`mask_function` makes of a mask whose rows have no holes."""
    return mask.dtype == torch.int32 and seqlen_k > MOST_KEYS_OF_A_MASK and mask.shape[-1] == 2 and mask.shape[1] == 1


def are_pairs(mask: Tensor) -> bool:
    """Whether a tensor is what :func:`mask_function` makes of other masks, for several queries."""
    return mask.dtype == torch.int8


def seen_pairs(mask: Tensor) -> Tensor:
    """Such a mask as bool. A view where it may be one: each layer keeps what it is given for backward."""
    return mask.view(torch.bool) if can_read(mask) else mask.to(torch.bool)


def mask_function(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: object = None,
    **named: object,
) -> Tensor | None:
    """What transformers' ``AttentionMaskInterface`` calls for a mask, with the arguments of its ``sdpa_mask``.

    Args:
        batch_size, q_length, kv_length: the mask's sizes.
        q_offset, kv_offset: positions of the first query and of the first key.
        mask_function: of (batch, head, query, key), all four tensors of positions; default: causal.
        attention_mask: bool (B, keys so far), False = padding.
        local_size: how long the window or chunk is that mask_function has.
        allow_is_causal_skip: whether None may stand for a causal mask.
        allow_is_bidirectional_skip: whether None may stand for a mask that hides nothing.
        use_vmap: whether mask_function takes one position at a time.
        device: where the mask is wanted.
        config: the model's; a model that has attention of its own is refused, for it would read None as no mask.
        named: dtype, which is other implementations' concern.

    Raises:
        NotImplementedError: a model with attention of its own, which never calls ours.

    Returns:
        None where attention needs no mask; else int32 ranges (B or 1, 1, Sq, 2); or a bool mask (B, 1, Sq, Sk) for
        a single query or up to 2 keys, where it is as small, and for the reasons that ``fallbacks()`` counts: rows
        with holes and tracing, with several queries as int8, and bool for a model that asks for a mask to work with.
    """
    from transformers import masking_utils

    if not transformers_models.asks_for_attention(type(config)):
        raise NotImplementedError(
            f'pyattn: attn_implementation must be "eager", for the model has attention of its own, got a '
            f"{type(config).__name__}"
        )
    rule = masking_utils.causal_mask_function if mask_function is None else mask_function
    described = {"kv_length": kv_length, "kv_offset": kv_offset, "mask_function": rule, "use_vmap": use_vmap}
    described |= {"device": device, "allow_is_causal_skip": False}

    def dense(first: int, rows: int, padding: Tensor | None) -> Tensor:
        place = {"q_length": rows, "q_offset": q_offset + first}
        mask: Tensor = masking_utils.sdpa_mask(batch_size, attention_mask=padding, **place, **described)
        return mask

    def pairs(why: str, padding: Tensor | None) -> Tensor:
        mask = _counted(why, dense(0, q_length, padding))
        asked = not (allow_is_causal_skip or allow_is_bidirectional_skip or use_vmap)
        return mask if asked or q_length <= 1 else mask.to(torch.int8)

    traced = not can_read(torch.empty(0) if attention_mask is None else attention_mask)
    if traced and not (attention_mask is None and isinstance(q_offset, int)):
        return pairs(TRACED, attention_mask)
    q_offset = int(q_offset)
    seen = None if attention_mask is None else _seen(attention_mask, kv_length, kv_offset)
    causal, full = rule is masking_utils.causal_mask_function, rule is masking_utils.bidirectional_mask_function
    last = q_offset + q_length
    if allow_is_causal_skip and (causal or local_size is not None) and last <= (local_size or last):
        if q_length == 1 and kv_offset + kv_length <= last and (seen is None or seen.all()):
            return None
        if q_length > 1 and q_offset == kv_offset and (seen is None or seen[:, :q_length].all()):
            return None
    last = max(last, kv_offset + kv_length)
    unbound = (full or local_size is not None) and last <= (local_size or last)
    if allow_is_bidirectional_skip and unbound and (seen is None or seen.all()):
        return None
    if traced:
        return pairs(TRACED, None)

    if q_length <= 1 or batch_size == 0 or kv_length <= MOST_KEYS_OF_A_MASK:
        return dense(0, q_length, attention_mask)
    if not (allow_is_causal_skip or allow_is_bidirectional_skip or use_vmap or _packs(rule)):
        return _counted(WANTED, dense(0, q_length, attention_mask))
    unpadded = None if seen is None else masks.from_bool(seen[:, None, None])
    holes = seen is not None and unpadded is None
    if seen is not None and full and holes:
        return seen[:, None, None]
    found = None if holes else _known(rule, dense, q_length, kv_length, q_offset, kv_offset, device)
    if found is None:
        found = _evaluated(dense, batch_size, q_length, kv_length, attention_mask if holes else None, device)
    if found is None:
        return pairs(HOLES, attention_mask)
    return (found if unpadded is None else masks.within(found, unpadded))[:, None].to(torch.int32)


def _counted(why: str, mask: Tensor) -> Tensor:
    """The mask, counted but while compiling, which would take the count for a constant."""
    if not torch.compiler.is_compiling():
        DENSE[why] += 1
    return mask


def can_read(tensor: Tensor) -> bool:
    """Whether Python may branch on the tensor's values, and a tracer would not take the branch for the only one."""
    return has_values(tensor) and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]


def _seen(attention_mask: Tensor, kv_length: int, kv_offset: int) -> Tensor:
    """A key is seen unless it is padding: bool (B, kv_length); places behind the mask are padding."""
    tokens = attention_mask[:, kv_offset : kv_offset + kv_length].to(torch.bool)
    return torch.nn.functional.pad(tokens, (0, kv_length - tokens.shape[1]))


def _known(
    rule: Callable[..., Tensor],
    dense: Dense,
    q_length: int,
    kv_length: int,
    q_offset: int,
    kv_offset: int,
    device: torch.device | str,
) -> Tensor | None:
    """(B or 1, Sq, 2) by the names of transformers' own rules; None if one is not known, or a row seen differs."""
    interval = transformers_rules.interval(rule, torch.arange(q_length, device=device) + q_offset)
    if interval is None:
        return None
    ranges = (torch.stack(interval, -1) - kv_offset).clamp(0, kv_length)
    keys = torch.arange(kv_length, device=device)
    for row in {0, q_length // 2, q_length - 1}:
        begin, end = ranges[:, row, :1], ranges[:, row, 1:]
        if ((begin <= keys) & (keys < end) != dense(row, 1, None)[:, 0, 0]).any():
            return None
    return ranges


def _evaluated(
    dense: Dense, batch: int, q_length: int, kv_length: int, padding: Tensor | None, device: torch.device | str
) -> Tensor | None:
    """(B or 1, Sq, 2), from a mask evaluated some rows at a time; None where a row has holes."""
    shared = dense(0, 1, padding).stride(0) == 0  # most rules are the same for every sequence
    rows = max(1, CHUNK // (batch * kv_length))
    # One tensor, for parts that are kept would pin the heap between the masks that are freed.
    ranges = torch.empty(1 if shared else batch, q_length, 2, dtype=torch.int64, device=device)
    for first in range(0, q_length, rows):
        mask = dense(first, min(rows, q_length - first), padding)
        part = masks.from_bool(mask[:1] if shared else mask)
        if part is None:
            return None
        ranges[:, first : first + rows] = part
    return ranges


def _packs(rule: object) -> bool:
    """Whether transformers itself forbade to leave the mask out, for packed sequences or blocks of tokens.

    The argument that says so is also how a model asks for a mask to work with.
    """
    names = {name for name, _ in transformers_rules.rules(rule)}
    return not names.isdisjoint({"packed_sequence_mask_function", "blockwise_overlay"})
