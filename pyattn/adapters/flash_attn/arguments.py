"""flash-attn's arguments: checks, and their names in pyattn."""

import functools
import operator
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from pyattn.options import UNBOUNDED
from pyattn.options.checks import check_size, check_tensor, check_type, shown

Window = tuple[int, int] | list[int] | Tensor
"""(left, right); flash-attn also takes a tensor, and reads any number below 0 as all keys."""


Function = TypeVar("Function", bound=Callable[..., object])

MULTIPLE = 128
"""flash-attn rounds the sequence lengths of S_dmask and of the backward's sums up to this."""


class WrongValueError(ValueError, RuntimeError):
    """A ValueError, as everywhere in pyattn, and a RuntimeError, which callers of flash-attn catch."""


def without_gradient(function: Function) -> Function:
    """Decorator like ``torch.no_grad()``, which costs 2 us where no gradient is recorded anyway."""

    @functools.wraps(function)
    def run(*positional: Any, **named: Any) -> object:
        if not torch.is_grad_enabled():
            return function(*positional, **named)
        with torch.no_grad():
            return function(*positional, **named)

    return run  # type: ignore[return-value]


def named(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool = True,
) -> dict[str, Any]:
    """The options as :func:`pyattn.attention` takes them. Backward is always deterministic."""
    check_type("deterministic", deterministic, bool)
    if alibi_slopes is not None:
        check_tensor("alibi_slopes", alibi_slopes)
        if alibi_slopes.dtype != torch.float32:
            raise TypeError(f"pyattn: alibi_slopes must be float32, got {alibi_slopes.dtype}")
    return {
        "causal": causal,
        "window": window_of(window_size),
        "softmax_scale": softmax_scale,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "dropout_p": dropout_p,
    }


def window_of(window_size: Window) -> tuple[int, int]:
    """``window_size`` as a pair of ints, each at least -1."""
    if window_size is UNBOUNDED:
        return UNBOUNDED
    try:
        left, right = (max(-1, operator.index(bound)) for bound in window_size)
    except (TypeError, ValueError):
        raise TypeError(f"pyattn: window_size must be a pair of ints (left, right), got {shown(window_size)}") from None
    return UNBOUNDED if left < 0 and right < 0 else (left, right)


def check_int32(name: str, tensor: object, shape: tuple[int, ...] | None = None) -> None:
    """TypeError unless ``tensor`` is an int32 tensor, ValueError unless it has ``shape``."""
    check_tensor(name, tensor)
    assert isinstance(tensor, Tensor)
    if tensor.dtype != torch.int32:
        raise TypeError(f"pyattn: {name} must be int32, got {tensor.dtype}")
    if shape is not None and tensor.shape != shape:
        raise WrongValueError(f"pyattn: {name} must have shape {shape}, got {tuple(tensor.shape)}")


def check_dimensions(name: str, tensor: object, layout: str) -> None:
    """ValueError unless ``tensor`` has the dimensions of ``layout``, where digits are sizes."""
    check_tensor(name, tensor)
    assert isinstance(tensor, Tensor)
    sizes = layout.split(", ")
    fixed = any(map(str.isdigit, sizes))
    if tensor.dim() != len(sizes) or (fixed and not _have(tensor.shape, sizes)):
        raise WrongValueError(f"pyattn: {name} must have shape ({layout}), got {tuple(tensor.shape)}")


def _have(shape: tuple[int, ...], sizes: list[str]) -> bool:
    return all(not size.isdigit() or n == int(size) for size, n in zip(sizes, shape, strict=True))


def check_together(**given: object) -> None:
    """ValueError if any of these is None."""
    missing = ", ".join(name for name, value in given.items() if value is None)
    if missing:
        *first, last = given
        raise WrongValueError(f"pyattn: {', '.join(first)} and {last} must be given together, got no {missing}")


def check_batch(q: Tensor, k: Tensor, v: Tensor) -> None:
    """ValueError if the shapes of q, k and v don't fit together."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_dimensions(name, tensor, "batch, seqlen, num_heads, head_dim")
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise WrongValueError(
            "pyattn: q, k and v must have shapes (B, Sq, Hq, D), (B, Sk, Hkv, D) and (B, Sk, Hkv, Dv), "
            f"got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )


def with_inf(lse: Tensor) -> Tensor:
    """``lse`` by flash-attn's convention: +inf, not -inf, for a query that sees no key."""
    return torch.where(lse == -torch.inf, torch.inf, lse)


def longest(name: str, max_seqlen: int | Tensor | None) -> int:
    """``max_seqlen`` as an int; flash-attn also takes a tensor with one element."""
    if isinstance(max_seqlen, Tensor):
        if max_seqlen.numel() != 1 or max_seqlen.dtype not in (torch.int32, torch.int64):
            raise WrongValueError(
                f"pyattn: {name} must be an int, or an int32 or int64 tensor of one, got {max_seqlen.dtype} of shape "
                f"{tuple(max_seqlen.shape)}"
            )
        max_seqlen = int(max_seqlen)
    check_size(name, max_seqlen)
    assert isinstance(max_seqlen, int)
    return max_seqlen


def equal_lengths(batch: int, seqlen: int, device: torch.device) -> Tensor:
    """cu_seqlens (B + 1,) int64 of sequences of one length."""
    return torch.arange(batch + 1, device=device) * seqlen
