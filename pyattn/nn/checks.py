"""Checks of the modules' arguments."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nested._internal.nested_tensor import NestedTensor

from pyattn.cache import KVCache
from pyattn.cache.slots import check_ring
from pyattn.jagged.layout import check_jagged, check_no_holes, longest
from pyattn.masks.key_ranges import MOST_RANGES, are_ranges, check_ranges
from pyattn.options.autocast import cast
from pyattn.options.checks import check_sizes, check_tensor, check_type, has_values, shown

Lengths = Sequence[int] | Tensor


def check_input(
    x: Tensor,
    d_in: int | None = None,
    projection: Tensor | nn.Module | None = None,
    *,
    unbatched: bool = False,
    context_length: int | None = None,
) -> None:
    """TypeError or ValueError unless ``x`` fits: d_in columns, the dtype of the weights, a length within the context.

    Jagged tensors (batch, j, d_in) fit too, unless they have holes: NotImplementedError.

    ``projection`` is the parameter or module that multiplies ``x``; the dtype of a module without a ``weight``, such as
    LoRA's, is not checked. ``unbatched``: (seqlen, d_in) is accepted too.
    """
    if isinstance(x, NestedTensor):
        check_jagged("x", x, 3, 1, "(batch, j, d_in)")
        check_no_holes("x", x)
    else:
        check_tensor("x", x)
    dtype = getattr(getattr(projection, "weight", projection), "dtype", x.dtype)
    if not x.is_floating_point():
        raise TypeError(f"pyattn: x must be a floating-point tensor, got {x.dtype}")
    if dtype != x.dtype and dtype.is_floating_point and (x.is_meta or not torch.is_autocast_enabled(x.device.type)):
        raise TypeError(f"pyattn: x must have the dtype of the weights, got {x.dtype} and {dtype}")
    if x.dim() != 3 and not (unbatched and x.dim() == 2):
        also = " or (seqlen, d_in)" if unbatched else ""
        raise ValueError(f"pyattn: x must be (batch, seqlen, d_in){also}, got shape {tuple(x.shape)}")
    if d_in is not None and x.shape[-1] != d_in:
        raise ValueError(f"pyattn: the last dimension of x must be {d_in}, got shape {tuple(x.shape)}")
    if context_length is not None:
        seqlen = _longest(x) if isinstance(x, NestedTensor) else x.shape[1]
        if seqlen > context_length:
            raise ValueError(f"pyattn: seqlen must not exceed context_length, got {seqlen} and {context_length}")


def _longest(x: Any) -> int:
    """The length of the longest sequence; 0 if ``x`` does not know it in a compiled graph, which cannot read it."""
    return 0 if torch.compiler.is_compiling() and x._maybe_max_seqlen is None else longest(x)


def check_alone(x: Tensor, **others: object) -> None:
    """NotImplementedError if a jagged ``x`` comes with one of ``others``; None and False stand for nothing."""
    if not isinstance(x, NestedTensor):
        return
    for name, given in others.items():
        if given is not None and given is not False:
            raise NotImplementedError(f"pyattn: {name} is not supported with a jagged x, got {name}={shown(given)}")


def check_cache(module: nn.Module, options: Mapping[str, Any], context_length: int | None = None) -> KVCache | None:
    """``kv_cache``, TypeError or ValueError unless ``module`` can continue from it; None needs no ``lengths``."""
    kv_cache, lengths = options.get("kv_cache"), options.get("lengths")
    if kv_cache is None:
        if lengths is not None:
            raise ValueError(
                f"pyattn: lengths must come with a kv_cache, got {shown(lengths)} alone; "
                "key_ranges=pyattn.masks.padding(lengths, seqlen) needs none"
            )
        return None
    check_type("kv_cache", kv_cache, KVCache)
    if context_length is not None and kv_cache.max_seqlen > context_length:
        raise ValueError(
            f"pyattn: kv_cache.max_seqlen must not exceed context_length, got {kv_cache.max_seqlen} and "
            f"{context_length}"
        )
    cache: KVCache = kv_cache
    if not torch.compiler.is_compiling():
        _check_user(cache, module)
    return cache


def _check_user(cache: KVCache, module: nn.Module) -> None:
    """ValueError if ``cache`` holds tokens of another module, unless that one is gone or has the same parameters."""
    user = None if cache.user is None else cache.user()
    if user is module:
        return
    if user is not None and has_values(cache.lengths) and not _alike(user, module) and bool(cache.lengths.any()):
        raise ValueError(
            f"pyattn: kv_cache must be of one module alone, one for each layer of a model, got {cache!r} with tokens "
            f"of another {type(user).__name__}; cache.reset() empties it for a new one"
        )
    cache.user = weakref.ref(module)


def _alike(user: nn.Module, module: nn.Module) -> bool:
    """Whether two modules compute the same keys, by value: a copy may continue a cache."""
    pairs = dict(user.named_parameters()), dict(module.named_parameters())
    if type(user) is not type(module) or pairs[0].keys() != pairs[1].keys():
        return False
    return all(
        p is q or (p.shape == q.shape and p.device == q.device and torch.equal(p, q))
        for p, q in zip(*(d.values() for d in pairs), strict=True)
    )


def check_added(mask: Tensor | None, bias: Tensor | None, shape: tuple[int, int, int, int]) -> None:
    """TypeError or ValueError unless a bool ``mask`` and a float ``bias`` broadcast to ``shape``, that of the scores.

    If one is given in place of the other, the message says so.
    """
    for name, given in (("mask", mask), ("bias", bias)):
        if given is None:
            continue
        check_tensor(name, given)
        if name == "mask" and given.dtype != torch.bool:
            raise TypeError(
                "pyattn: mask must be bool, True = takes part (numbers to add to the scores are bias), got "
                f"{given.dtype}"
            )
        if name == "bias" and not given.is_floating_point():
            raise TypeError(
                "pyattn: bias must be floating-point, added to the scores (a bool tensor, True = takes part, is mask), "
                f"got {given.dtype}"
            )
        full = shape[4 - given.dim() :]
        if not 1 <= given.dim() <= 4 or any(n not in (1, size) for n, size in zip(given.shape, full, strict=True)):
            raise ValueError(
                f"pyattn: {name} must broadcast to (batch, num_heads, seqlen, keys) = {shape}, got shape "
                f"{tuple(given.shape)}"
            )
        if name == "mask":
            _check_clear(given, shape)


def _check_clear(mask: Tensor, shape: tuple[int, int, int, int]) -> None:
    """ValueError for a mask whose first dimension may be sequences, or the queries or heads that it is taken for."""
    batch, heads, seqlen, _ = shape
    size, name = (seqlen, "seqlen") if mask.dim() == 2 else (heads, "num_heads")
    if mask.dim() in (2, 3) and mask.shape[0] == size == batch > 1:
        last = "seqlen, keys"
        either = (
            f"(1, 1, {last}) or (batch, 1, 1, keys)"
            if mask.dim() == 2
            else f"(1, num_heads, {last}) or (batch, 1, {last})"
        )
        raise ValueError(
            f"pyattn: mask must be {either} where batch and {name} are both {batch}, got shape {tuple(mask.shape)}, "
            "which may mean either"
        )


def keys_of(mask: Tensor | None, kv_cache: KVCache | None, new: int) -> int:
    """How many keys ``mask`` must have: max_seqlen over a cache, unless it has the ``new`` ones alone."""
    own = isinstance(mask, Tensor) and mask.shape[-1:] == (new,)
    return new if kv_cache is None or own else kv_cache.max_seqlen


def check_pairs(mask: Tensor | None, bias: Tensor | None, q: Tensor, k: Tensor, kv_cache: KVCache | None) -> None:
    """:func:`check_added` for queries ``q`` (B, T, H, D) and keys ``k``, which follow those of ``kv_cache``, if any."""
    batch, seqlen, heads, _ = q.shape
    check_added(mask, None, (batch, heads, seqlen, keys_of(mask, kv_cache, k.shape[1])))
    check_added(None, bias, (batch, heads, seqlen, keys_of(None, kv_cache, k.shape[1])))


def check_append(
    kv_cache: KVCache,
    k: Tensor,
    key_ranges: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
    shared_values: int | None = None,
) -> None:
    """TypeError, ValueError or NotImplementedError if ``kv_cache`` cannot take these, before anything is appended.

    Args:
        kv_cache: the cache.
        k: (B, new, Hkv, D), as the module projects it.
        key_ranges: the ranges of the new queries.
        mask, bias: as :func:`check_added` takes them.
        shared_values: how many columns of k are v; default: v is like k, in separate memory.
    """
    batch, new, num_heads_kv, head_dim = k.shape
    heads = 1 if kv_cache.block_table is None else 2
    pairs = {
        "batch size": (kv_cache.lengths.shape[0], batch),
        "number of KV heads": (kv_cache.k.shape[heads], num_heads_kv),
        "head_dim": (kv_cache.k.shape[-1], head_dim),
        "head_dim_v": (kv_cache.v.shape[-1], head_dim if shared_values is None else shared_values),
        "shared_values": (kv_cache.shared_values, shared_values is not None),
        "dtype": (kv_cache.dtype, k.dtype),
        "device": (kv_cache.k.device, k.device),
    }
    for name, (of_cache, of_keys) in pairs.items():
        if of_cache != of_keys:
            kind = TypeError if name == "dtype" else ValueError
            raise kind(f"pyattn: the cache's {name} must be that of the module's keys, got {of_cache} and {of_keys}")
    check_ring(kv_cache.window, kv_cache.max_seqlen, new, {"key_ranges": key_ranges, "mask": mask, "bias": bias})
    for name, given in (("mask", mask), ("bias", bias)):
        if given is not None and given.device != k.device:
            raise ValueError(f"pyattn: {name} must be on the device of x, got {given.device} and {k.device}")
    if bias is not None and cast(bias).dtype not in (dtypes := (cast(k).dtype, torch.float32)):
        raise TypeError(f"pyattn: bias must have dtype {dtypes[0]} or {dtypes[1]}, got {bias.dtype}")
    if key_ranges is not None:
        check_tensor("key_ranges", key_ranges)
        if not are_ranges(key_ranges, batch, new):
            raise ValueError(
                f"pyattn: key_ranges must have shape ({batch} or 1, {new} or 1, 2) or ({batch} or 1, {new} or 1, 1 to "
                f"{MOST_RANGES}, 2), got {list(key_ranges.shape)}"
            )
        if key_ranges.dtype not in (torch.int32, torch.int64):
            dtype = str(key_ranges.dtype).removeprefix("torch.")
            raise TypeError(f"pyattn: key_ranges must have dtype int32 or int64, got {dtype}")
        if not key_ranges.is_cuda:
            check_ranges(key_ranges, kv_cache.max_seqlen)


def check_mask(mask: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """The bool ``mask`` with four dimensions, each 1 or that of ``shape`` (batch, num_heads, seqlen, seqlen)."""
    check_tensor("mask", mask)
    if mask.dtype != torch.bool:
        raise TypeError(
            f"pyattn: mask must be bool, True = masked out (numbers to add to the scores are bias), got {mask.dtype}"
        )
    wide = mask[:, None] if mask.dim() == 3 else mask[(None,) * (4 - mask.dim())]
    if mask.dim() not in (2, 3, 4) or any(m not in (1, n) for m, n in zip(wide.shape, shape, strict=True)):
        raise ValueError(
            "pyattn: mask must be (seqlen, seqlen), (batch, seqlen, seqlen) or (batch, num_heads, seqlen, seqlen), "
            f"sizes of 1 broadcast, got {tuple(mask.shape)} for {shape}"
        )
    return wide


def quotient(name: str, value: int, divisor_name: str, divisor: int) -> int:
    """``value // divisor``; TypeError or ValueError unless both are sizes and there is no remainder."""
    check_sizes(1, **{name: value, divisor_name: divisor})
    if value % divisor:
        raise ValueError(f"pyattn: {name} must be a multiple of {divisor_name}, got {value} and {divisor}")
    return value // divisor
