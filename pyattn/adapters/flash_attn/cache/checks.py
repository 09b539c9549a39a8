"""Checks of flash_attn_with_kvcache: they raise before anything is written to the cache."""

from typing import Any

import torch
from torch import Tensor

from pyattn import attention
from pyattn.adapters.flash_attn.arguments import WrongValueError, check_dimensions, check_int32, check_together
from pyattn.adapters.flash_attn.cache.eight_bits import DTYPES
from pyattn.options.checks import check_size, check_tensor, has_values, integers_of


def check_shapes(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Raises what attention would raise."""
    if type(q) is type(k_cache) is type(v_cache) is Tensor and q.dim() == k_cache.dim() == v_cache.dim() == 4:
        (*_, heads_q, head_dim), rows, rows_v = q.shape, k_cache.shape, v_cache.shape
        fit = rows[:3] == rows_v[:3] and rows[3] == head_dim and not heads_q % max(1, rows[2])
        if fit and q.dtype == k_cache.dtype == v_cache.dtype and not q.is_nested:
            return
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_dimensions(name, tensor, "batch, seqlen, num_heads, head_dim")
        if tensor.dtype != q.dtype and not (name != "q" and k_cache.dtype == v_cache.dtype in DTYPES):
            raise TypeError(f"pyattn: {name} must have q's dtype, {q.dtype}, got {tensor.dtype}")
    heads = k_cache.shape[2]
    if k_cache.shape[:3] != v_cache.shape[:3] or q.shape[3] != k_cache.shape[3] or q.shape[2] % max(1, heads):
        raise WrongValueError(
            "pyattn: q, k_cache and v_cache must have shapes (B, Sq, Hq, D), (sequences, slots, Hkv, D) and "
            "(sequences, slots, Hkv, Dv), Hq a multiple of Hkv, "
            f"got {tuple(q.shape)}, {tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )


def check_new(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None, cache_seqlens: object
) -> None:
    """Raises unless k and v are given together, for q's sequences and with the heads of the cache."""
    if type(k) is type(v) is Tensor and cache_seqlens is not None and k.dim() == v.dim() == 4:
        (batch, new, *head), (batch_v, new_v, *head_v) = k.shape, v.shape
        fit = batch == batch_v == q.shape[0] and new == new_v and k.dtype == k_cache.dtype and v.dtype == v_cache.dtype
        if fit and [*k_cache.shape[2:], *v_cache.shape[2:]] == head + head_v and not (k.is_nested or v.is_nested):
            return
    check_together(k=k, v=v, cache_seqlens=cache_seqlens)
    assert k is not None and v is not None  # noqa: PT018
    for name, tensor, cache in (("k", k, k_cache), ("v", v, v_cache)):
        check_tensor(name, tensor)
        if tensor.dtype != cache.dtype:
            raise TypeError(f"pyattn: {name} must have the cache's dtype, {cache.dtype}, got {tensor.dtype}")
        if tensor.dim() != 4 or tensor.shape[:2] != (q.shape[0], k.shape[1]) or tensor.shape[2:] != cache.shape[2:]:
            raise WrongValueError(
                f"pyattn: {name} must have shape (batch, new, num_heads_kv, head_dim), for q {tuple(q.shape)} and a "
                f"cache {tuple(cache.shape)}, got {tuple(tensor.shape)}"
            )


def equal_length(cache_seqlens: int | Tensor | None, batch: int, capacity: int, new: int) -> int | None:
    """The length of all sequences before the call; None if they differ, can't be read, or must be refused."""
    if torch.compiler.is_compiling():
        return None
    lengths: list[int] | None = [capacity]
    if isinstance(cache_seqlens, Tensor):
        check_int32("cache_seqlens", cache_seqlens, (batch,))
        lengths = integers_of(cache_seqlens)
    elif cache_seqlens is not None:
        lengths = [cache_seqlens] if type(cache_seqlens) is int else None
    if not lengths or lengths.count(lengths[0]) != len(lengths) or not 0 <= lengths[0] <= capacity - new:
        return None
    return lengths[0]


def lengths_before(cache_seqlens: int | Tensor | None, batch: int, capacity: int, device: torch.device) -> Tensor:
    """Lengths before the call, (B,) int64."""
    if isinstance(cache_seqlens, Tensor):
        check_int32("cache_seqlens", cache_seqlens, (batch,))
        return cache_seqlens.long()
    length = capacity if cache_seqlens is None else cache_seqlens
    check_size("cache_seqlens", length)
    return torch.full((batch,), length, device=device)


def check_options(q: Tensor, options: dict[str, Any]) -> None:
    """Raises what attention would raise for options of (B, S, Hq, D) queries, before the caller's cache is written."""
    if len(options) > 1 or type(options["causal"]) is not bool:
        none = q[:, :0].transpose(1, 2)
        attention(none, none, none, **options)  # checks everything, and computes nothing


def check_lengths(before: Tensor, new: int, capacity: int, block_table: Tensor | None) -> None:
    """ValueError unless each sequence has room for ``new`` positions."""
    if has_values(before) and not all([0 <= length <= capacity - new for length in before.tolist()]):  # noqa: C419
        whose = "of the cache" if block_table is None else "that block_table lists"
        raise WrongValueError(
            f"pyattn: each of cache_seqlens must be at least 0, and with {new} new positions at most the {capacity} "
            f"{whose}, got {before.tolist()}"
        )


def check_rotary(
    cos: Tensor | None, sin: Tensor | None, q: Tensor, k: Tensor | None, capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    """cos, sin and k, all given; cos and sin have the cache's positions and at most half of q's columns."""
    check_together(rotary_cos=cos, rotary_sin=sin, k=k)
    assert cos is not None and sin is not None and k is not None  # noqa: PT018
    for name, tensor in (("rotary_cos", cos), ("rotary_sin", sin)):
        check_dimensions(name, tensor, "positions, rotary_dim / 2")
        if tensor.dtype != q.dtype:
            raise TypeError(f"pyattn: {name} must have q's dtype, {q.dtype}, got {tensor.dtype}")
    if cos.shape != sin.shape or 2 * cos.shape[1] > q.shape[3] or cos.shape[0] < capacity:
        raise WrongValueError(
            f"pyattn: rotary_cos and rotary_sin must have at least the cache's {capacity} positions and at most "
            f"head_dim / 2 = {q.shape[3] // 2} columns, got {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    return cos, sin, k
