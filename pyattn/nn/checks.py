"""Checks of what the modules are given."""

import torch
from torch import Tensor, nn

from pyattn.arguments import check_size, check_tensor, check_type
from pyattn.cache import KVCache


def check_input(
    x: Tensor,
    d_in: int | None = None,
    projection: Tensor | nn.Module | None = None,
    *,
    unbatched: bool = False,
    context_length: int | None = None,
) -> None:
    """TypeError or ValueError unless ``x`` fits: d_in columns, the dtype of the weights, a length in the context.

    ``projection`` is the parameter or module that meets ``x``; one without a ``weight``, as LoRA puts there, is not
    asked for its dtype. ``unbatched``: (seqlen, d_in) is taken too.
    """
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
    if context_length is not None and x.shape[1] > context_length:
        raise ValueError(f"pyattn: seqlen must not exceed context_length, got {x.shape[1]} and {context_length}")


def check_cache(kv_cache: KVCache | None, need_weights: bool, context_length: int | None = None) -> None:
    """TypeError, ValueError or NotImplementedError unless a module can go on from ``kv_cache``; None is fine."""
    if kv_cache is None:
        return
    check_type("kv_cache", kv_cache, KVCache)
    if need_weights:
        raise NotImplementedError("pyattn: weights over a kv_cache are not there, got need_weights=True with one")
    if context_length is not None and kv_cache.max_seqlen > context_length:
        raise ValueError(
            f"pyattn: kv_cache.max_seqlen must not exceed context_length, got {kv_cache.max_seqlen} and "
            f"{context_length}"
        )


def check_mask(mask: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """The bool ``mask`` with four dimensions, each 1 or that of ``shape`` (batch, num_heads, seqlen, seqlen)."""
    check_tensor("mask", mask)
    if mask.dtype != torch.bool:
        raise TypeError(f"pyattn: mask must be bool, True = masked out, got {mask.dtype}")
    wide = mask[:, None] if mask.dim() == 3 else mask[(None,) * (4 - mask.dim())]
    if mask.dim() not in (2, 3, 4) or any(m not in (1, n) for m, n in zip(wide.shape, shape, strict=True)):
        raise ValueError(
            "pyattn: mask must be (seqlen, seqlen), (batch, seqlen, seqlen) or (batch, num_heads, seqlen, seqlen), "
            f"sizes of 1 broadcast, got {tuple(mask.shape)} for {shape}"
        )
    return wide


def check_sizes(**sizes: int) -> None:
    """TypeError or ValueError unless each is an int of at least 1."""
    for name, size in sizes.items():
        check_size(name, size, least=1)


def quotient(name: str, value: int, divisor_name: str, divisor: int) -> int:
    """``value // divisor``, or TypeError or ValueError unless both are sizes and it leaves no rest."""
    check_sizes(**{name: value, divisor_name: divisor})
    if value % divisor:
        raise ValueError(f"pyattn: {name} must be a multiple of {divisor_name}, got {value} and {divisor}")
    return value // divisor
