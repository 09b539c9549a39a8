"""The arguments of torch's ``scaled_dot_product_attention``, checked and laid out for :func:`pyattn.attention`."""

import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from pyattn import attention
from pyattn.masks import KeyRanges
from pyattn.options.checks import check_tensor, check_type, shown

if TYPE_CHECKING:
    from torch.nn.attention.bias import CausalBias

Shape = tuple[int, ...]


class SdpaError(ValueError, RuntimeError):
    """A value that breaks a rule: pyattn raises ValueError for it and torch RuntimeError, so it is both."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | Tensor | None,
    enable_gqa: bool,
    compute: Callable[..., Any] = attention,
) -> Tensor:
    """The result of ``scaled_dot_product_attention`` for these arguments, or an error before anything is computed.

    ``compute``: :func:`pyattn.attention`, or a function that also keeps something of the call.
    """
    check_tensor("query", query)
    check_tensor("key", key)
    check_tensor("value", value)
    plain = (
        attn_mask is None and scale is None and type(dropout_p) is float and type(is_causal) is type(enable_gqa) is bool
    )
    if plain and 0.0 <= dropout_p < 1.0 and query.dim() == 4 and query.shape == key.shape == value.shape:
        options = {"dropout_p": dropout_p} if dropout_p else {}
        plain_out: Tensor = compute(query, key, value, causal=is_causal, **options)
        return plain_out
    _check_numbers(dropout_p, is_causal, scale, enable_gqa)
    _check_sizes(query, key, value)
    if isinstance(scale, Tensor):
        query, scale = _times(query, scale), 1.0
    q_offset = 0 if is_causal and query.shape[-2] != key.shape[-2] else None
    if _is_causal_bias(attn_mask):
        q_offset = _offset_of(attn_mask, query.shape[-2], key.shape[-2], is_causal)
        attn_mask, is_causal = None, True
    ranges = None
    if isinstance(attn_mask, KeyRanges):
        ranges, attn_mask = attn_mask, None
    lead = _leading_sizes(query.shape[:-2], key.shape[:-2], value.shape[:-2], enable_gqa)
    mask = bias = None
    if attn_mask is not None:
        check_tensor("attn_mask", attn_mask)
        _check_mask(attn_mask, (*lead, query.shape[-2], key.shape[-2]), query.dtype)
        attn_mask = attn_mask if attn_mask.dim() else attn_mask[None]
        mask, bias = (attn_mask, None) if attn_mask.dtype == torch.bool else (None, attn_mask)
    q, k, v = _expanded(query, lead), _expanded(key, lead), _expanded(value, lead)
    heads = lead[-1] if lead else 1
    q = _with_heads(q, heads)
    if k.shape[-3] != v.shape[-3]:  # one of the two has a single head
        k, v = _with_heads(k, heads), _with_heads(v, heads)
    out: Tensor = compute(
        q,
        k,
        v,
        causal=is_causal,
        q_offset=q_offset,
        key_ranges=ranges if ranges is None or len(lead) <= 2 else _unfolded(ranges, lead[:-1]),
        softmax_scale=scale,
        mask=mask,
        bias=bias,
        dropout_p=0.0 if dropout_p == 1 else float(dropout_p),
    )
    if dropout_p == 1:  # every weight is dropped; attention itself takes less than 1
        out = out * 0.0
    return out if len(lead) >= 2 else out.reshape(*lead, *out.shape[-2:])


def _check_numbers(dropout_p: object, is_causal: object, scale: object, enable_gqa: object) -> None:
    check_type("is_causal", is_causal, bool)
    check_type("enable_gqa", enable_gqa, bool)
    check_type("dropout_p", 0 if dropout_p is False else dropout_p, int, float)
    if isinstance(dropout_p, int | float) and not 0 <= dropout_p <= 1:
        raise SdpaError(f"pyattn: dropout_p must be between 0 and 1, got {shown(dropout_p)}")
    if isinstance(scale, Tensor):
        _check_scale(scale)
    elif scale is not None:
        check_type("scale", scale, int, float, torch.SymInt, torch.SymFloat)
        if isinstance(scale, int | float) and not abs(scale) <= sys.float_info.max:
            raise SdpaError(f"pyattn: scale must be finite, got {shown(scale)}")


def _check_scale(scale: Tensor) -> None:
    if not scale.dtype.is_floating_point:
        raise TypeError(f"pyattn: scale must have a floating-point dtype, got {scale.dtype}")
    if scale.dim():
        raise SdpaError(f"pyattn: scale must be a number or a tensor of 0 dimensions, got shape {tuple(scale.shape)}")


def _times(query: Tensor, scale: Tensor) -> Tensor:
    """The product in query's dtype, computed and differentiated in at least float32."""
    return (query.to(torch.promote_types(query.dtype, torch.float32)) * scale).to(query.dtype)


def _check_sizes(query: Tensor, key: Tensor, value: Tensor) -> None:
    if min(query.dim(), key.dim(), value.dim()) < 2:
        raise SdpaError(
            "pyattn: query, key and value must have at least 2 dimensions, got shapes "
            f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
        )
    if query.shape[-1] != key.shape[-1]:
        raise SdpaError(
            "pyattn: query and key must have the same last dimension, "
            f"got shapes {tuple(query.shape)} and {tuple(key.shape)}"
        )
    if key.shape[-2] != value.shape[-2]:
        raise SdpaError(
            f"pyattn: key and value must have the same length, got shapes {tuple(key.shape)} and {tuple(value.shape)}"
        )


def _leading_sizes(query: Shape, key: Shape, value: Shape, enable_gqa: bool) -> Shape:
    """The result's dimensions before its last two: query's, key's and value's broadcast, except for grouped heads."""
    if not enable_gqa:
        return _broadcast(query, key, value)
    if not (query and key and value):
        raise SdpaError(
            "pyattn: with enable_gqa, query, key and value must have heads, at least 3 dimensions, "
            f"got {len(query) + 2}, {len(key) + 2} and {len(value) + 2}"
        )
    heads_q, heads_k, heads_v = query[-1], key[-1], value[-1]
    if heads_k != heads_v:
        raise SdpaError(
            f"pyattn: with enable_gqa, key and value must have the same number of heads, got {heads_k} and {heads_v}"
        )
    if heads_k == 0 or heads_q % heads_k:
        raise SdpaError(
            "pyattn: with enable_gqa, the heads of query must be a multiple of those of key and value, "
            f"got {heads_q} and {heads_k}"
        )
    return (*_broadcast(query[:-1], key[:-1], value[:-1]), heads_q)


def _broadcast(query: Shape, key: Shape, value: Shape) -> Shape:
    if query == key == value:
        return query
    try:
        return tuple(torch.broadcast_shapes(query, key, value))
    except RuntimeError:
        raise SdpaError(
            "pyattn: the dimensions of query, key and value before the last two must broadcast (for grouped heads, "
            f"set enable_gqa), got {tuple(query)}, {tuple(key)} and {tuple(value)}"
        ) from None


def _check_mask(attn_mask: Tensor, scores: Shape, dtype: torch.dtype) -> None:
    if attn_mask.dtype not in (torch.bool, torch.float32, dtype) and not torch._C._is_any_autocast_enabled():
        raise TypeError(
            f"pyattn: attn_mask must be bool, query's dtype or float32, got {attn_mask.dtype} with query of {dtype}"
        )
    rest = scores[len(scores) - attn_mask.dim() :]
    if attn_mask.dim() > len(scores) or any(
        own not in (1, full) for own, full in zip(attn_mask.shape, rest, strict=True)
    ):
        raise SdpaError(
            f"pyattn: attn_mask must broadcast to the scores' shape {scores}, got shape {tuple(attn_mask.shape)}"
        )


def _is_causal_bias(attn_mask: object) -> "TypeGuard[CausalBias]":
    """Looks at the class's module, because importing it would import all of torch.compile: two seconds."""
    return type(attn_mask).__module__ == "torch.nn.attention.bias"


def _offset_of(bias: "CausalBias", seqlen_q: int, seqlen_k: int, is_causal: bool) -> int | None:
    """The ``q_offset`` of torch's causal_upper_left or causal_lower_right, a tensor that holds no mask."""
    if is_causal:
        raise SdpaError("pyattn: attn_mask must not be set together with is_causal, got a CausalBias and True")
    if (bias.seq_len_q, bias.seq_len_kv) != (seqlen_q, seqlen_k):
        raise SdpaError(
            f"pyattn: a CausalBias must have the lengths of query and key, got ({bias.seq_len_q}, {bias.seq_len_kv}) "
            f"for ({seqlen_q}, {seqlen_k})"
        )
    return 0 if bias.variant.name == "UPPER_LEFT" else None


def _expanded(tensor: Tensor, lead: Shape) -> Tensor:
    """``tensor`` as (batch, heads, length, columns), or with all leading dimensions, which attention broadcasts."""
    dims = max(4, len(lead) + 2)
    if tensor.dim() < dims:
        tensor = tensor[(None,) * (dims - tensor.dim())]
    return tensor if len(lead) != 2 or tensor.shape[0] == lead[0] else tensor.expand(lead[0], -1, -1, -1)


def _with_heads(tensor: Tensor, heads: int) -> Tensor:
    """``tensor``, one head of which is expanded to that many."""
    return tensor if tensor.shape[-3] == heads else tensor.expand(*tensor.shape[:-3], heads, *tensor.shape[-2:])


def _unfolded(ranges: KeyRanges, batches: Shape) -> Tensor:
    """``ranges`` (batches or 1, ...), with all leading dimensions in place of one."""
    if ranges.shape[0] not in (1, math.prod(batches)):
        raise SdpaError(
            f"pyattn: KeyRanges must have {math.prod(batches)} batches or 1, those of query, key and value, got shape "
            f"{tuple(ranges.shape)}"
        )
    return torch.unflatten(ranges, 0, batches if ranges.shape[0] != 1 else (1,) * len(batches))
