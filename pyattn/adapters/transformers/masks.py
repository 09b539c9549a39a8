"""Masks of transformers as ``key_ranges``, computed without a tensor of queries x keys.

transformers describes a mask by a function of (batch, head, query, key) and requests a tensor, which every layer gets.
This module returns a :class:`~pyattn.adapters.transformers.mask.Mask` instead.
"""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from pyattn import masks
from pyattn.adapters.transformers import models, rules
from pyattn.adapters.transformers.mask import EAGER, Mask
from pyattn.locks import Lock
from pyattn.masks import KeyRanges
from pyattn.masks.algebra import from_blocks
from pyattn.masks.key_ranges import MOST_RANGES
from pyattn.options.checks import has_values

CHUNK = 1 << 18
"""Elements of a mask to evaluate at once: with a mask function's intermediates, they fit a core's cache."""

HOLES = f"a row of the mask has more than {MOST_RANGES} intervals of keys"
TRACED = "made while tracing or compiling, where values cannot be read"
WANTED = "the model works with the mask itself"

Dense = Callable[[int, int, Tensor | None], Tensor]
"""``dense(first, rows, padding)``: some rows of a mask, bool (B, 1, rows, Sk), with the given padding."""

computes_attention_itself: Callable[[type], bool] = torch.compiler.assume_constant_result(
    models.computes_attention_itself
)
"""The decorator imports all of torch.compile, so ``pyattn info`` does without it."""

extends_masks: Callable[[type], bool] = torch.compiler.assume_constant_result(models.extends_masks)

reads_masks: Callable[[type], bool] = torch.compiler.assume_constant_result(models.reads_masks)

repeats_masks: Callable[[type], bool] = torch.compiler.assume_constant_result(models.repeats_masks)

_lock = Lock()
DENSE: Counter[str] = Counter()
"""How many masks of queries x keys were made, by reason."""


def mask_function(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] | None = None,
    attention_mask: Tensor | Mask | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: object = None,
    **named: object,
) -> Tensor | Mask | None:
    """Makes a mask, as transformers' ``AttentionMaskInterface`` calls it: with the arguments of its ``sdpa_mask``.

    Args:
        batch_size, q_length, kv_length: the mask's sizes.
        q_offset, kv_offset: positions of the first query and the first key.
        mask_function: of (batch, head, query, key), each a tensor of positions; default: causal.
        attention_mask: bool (B, keys so far), False = padding; or an earlier result of this function.
        local_size: length of the window or chunk in mask_function.
        allow_is_causal_skip: whether None may stand for a causal mask.
        allow_is_bidirectional_skip: whether None may stand for a mask that hides nothing.
        use_vmap: whether mask_function takes one position at a time.
        device: where the mask is wanted.
        config: the model's.
        named: dtype, that of a float mask.

    Returns:
        None if nothing is hidden. A bool mask (B, 1, Sq, Sk) for a model that works with the mask itself, and for a
        compiled decoding step; a float one for DeepSeek V4, whose layers append columns. Else a :class:`Mask`: with
        pairs for a single query, where they are as small as ranges, and for the reasons that ``fallbacks()`` counts,
        rows of many intervals and tracing; otherwise with ranges.

    Raises:
        NotImplementedError: a model with its own attention, which would not call this one.
    """
    from transformers import masking_utils

    if computes_attention_itself(type(config)):
        raise NotImplementedError(f"{EAGER}, got a {type(config).__name__}")
    if isinstance(attention_mask, Mask):
        return attention_mask
    rule = masking_utils.causal_mask_function if mask_function is None else mask_function
    described = {"kv_length": kv_length, "kv_offset": kv_offset, "mask_function": rule, "use_vmap": use_vmap}
    described |= {"device": device, "allow_is_causal_skip": False}
    shape = batch_size, 1, q_length, kv_length
    if extends_masks(type(config)):
        place = {"attention_mask": attention_mask, "q_offset": q_offset, **named}
        extended: Tensor = masking_utils.eager_mask(batch_size, q_length, **place, **described)
        return _counted(WANTED, extended)

    def dense(first: int, rows: int, padding: Tensor | None) -> Tensor:
        place = {"q_length": rows, "q_offset": q_offset + first}
        mask: Tensor = masking_utils.sdpa_mask(batch_size, attention_mask=padding, **place, **described)
        return mask

    asked = not (allow_is_causal_skip or allow_is_bidirectional_skip or use_vmap)
    reads = reads_masks(type(config)) or (repeats_masks(type(config)) and q_length == 1)

    def pairs(padding: Tensor | None) -> Tensor | Mask:
        mask = dense(0, q_length, padding)
        return mask if asked or reads else Mask(shape, pairs=mask)

    traced = not can_read(torch.empty(0) if attention_mask is None else attention_mask)
    if traced and not (attention_mask is None and isinstance(q_offset, int)):
        return _counted(TRACED, pairs(attention_mask))
    q_offset = int(q_offset)
    tokens = None if attention_mask is None else _tokens(attention_mask, kv_length, kv_offset)
    causal, full = rule is masking_utils.causal_mask_function, rule is masking_utils.bidirectional_mask_function
    last = q_offset + q_length
    if allow_is_causal_skip and (causal or local_size is not None) and last <= (local_size or last):
        if q_length == 1 and kv_offset + kv_length <= last and (tokens is None or tokens.all()):
            return None
        if q_length > 1 and q_offset == kv_offset and (tokens is None or tokens[:, :q_length].all()):
            return Mask(shape)
    last = max(last, kv_offset + kv_length)
    unbound = (full or local_size is not None) and last <= (local_size or last)
    if allow_is_bidirectional_skip and unbound and (tokens is None or tokens.all()):
        return None
    if traced:
        return _counted(TRACED, pairs(None))

    if q_length <= 1 or batch_size == 0 or kv_length == 0:
        return pairs(attention_mask)
    if reads or (asked and not rules.packs(rule)):
        return _counted(WANTED, pairs(attention_mask))
    unpadded = None if tokens is None else masks.from_bool(tokens[:, None, None], intervals=MOST_RANGES)
    if tokens is not None and unpadded is None and full:
        return Mask(shape, pairs=tokens[:, None, None])
    sizes = _Sizes(batch_size, q_length, kv_length, q_offset, kv_offset, device)
    found = _known(rule, dense, sizes) if tokens is None or unpadded is not None else None
    if found is None:  # padding of several intervals could make more than MOST_RANGES of the rule's own
        padding = None if unpadded is not None and unpadded.dim() == 3 else attention_mask
        found = _evaluated(dense, sizes, padding)
    if found is None:
        return _counted(HOLES, Mask(shape, pairs=dense(0, q_length, attention_mask)))
    found = found if unpadded is None else masks.within(found, unpadded)
    return Mask(shape, ranges=KeyRanges(found.to(torch.int32), whole=True))


class _Sizes(NamedTuple):
    """The sizes of a mask, the positions of its first query and first key, and where it is wanted."""

    batch: int
    q_length: int
    kv_length: int
    q_offset: int
    kv_offset: int
    device: torch.device | str


Made = TypeVar("Made", Tensor, Mask, Tensor | Mask)


def _counted(why: str, mask: Made) -> Made:
    """The mask, counted unless compiling, when the count would become a constant."""
    if not torch.compiler.is_compiling():
        with _lock:
            DENSE[why] += 1
    return mask


def can_read(tensor: Tensor) -> bool:
    """Whether Python may branch on the tensor's values, and no tracer would record one branch as the only one."""
    return has_values(tensor) and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]


def _tokens(attention_mask: Tensor, kv_length: int, kv_offset: int) -> Tensor:
    """bool (B, kv_length), True = a token, not padding; places after the end of the mask are padding."""
    given = attention_mask[:, kv_offset : kv_offset + kv_length].to(torch.bool)
    return torch.nn.functional.pad(given, (0, kv_length - given.shape[1]))


def _known(rule: Callable[..., Tensor], dense: Dense, sizes: _Sizes) -> Tensor | None:
    """(B or 1, Sq, 2) by the names of transformers' own rules; None if one is unknown, or a row compared differs."""
    _, q_length, kv_length, q_offset, kv_offset, device = sizes
    interval = rules.interval(rule, torch.arange(q_length, device=device) + q_offset)
    if interval is None:
        return None
    ranges = (torch.stack(interval, -1) - kv_offset).clamp(0, kv_length)
    keys = torch.arange(kv_length, device=device)
    for row in {0, q_length // 2, q_length - 1}:
        begin, end = ranges[:, row, :1], ranges[:, row, 1:]
        if ((begin <= keys) & (keys < end) != dense(row, 1, None)[:, 0, 0]).any():
            return None
    return ranges


def _evaluated(dense: Dense, sizes: _Sizes, padding: Tensor | None) -> Tensor | None:
    """(B or 1, Sq, 2) or (B or 1, Sq, n, 2) from a mask evaluated a few rows at a time; None beyond MOST_RANGES."""
    batch, q_length, kv_length, _, _, device = sizes
    sequences = 1 if dense(0, 1, padding).stride(0) == 0 else batch  # most rules are the same for every sequence
    rows = max(1, CHUNK // (batch * kv_length))
    blocks = (dense(at, min(rows, q_length - at), padding)[:sequences] for at in range(0, q_length, rows))
    return from_blocks(blocks, sequences, q_length, device)
