"""Caches of 8 bits: rows of keys and values as int8 or float8_e4m3fn, each with a scale in float32.

::

    values    round(x / scale)            (B, Hkv, slots, D)     scale = max |x| / 127 of a row, / 448 for float8
    scales    k_scale, v_scale            (B, Hkv, slots, 1)

A row is quantised by itself, so it moves with its scale and keeps its bits. int8 has equal steps, so the keys of int8
are rotated first, and queries alike: scores stay, and a channel that is far larger than the others does not take their
steps. float8 has steps relative to each number and needs no rotation. Kernels read values and scales in place.
"""

import math

import torch
from torch import Tensor

from pyattn import ops
from pyattn.options.checks import shown

KV_DTYPES = (torch.int8, torch.float8_e4m3fn)


def check_kv_dtype(
    kv_dtype: torch.dtype | None, dtype: torch.dtype, device: torch.device | None, dropped: str = "dtype"
) -> None:
    """TypeError or NotImplementedError unless a cache of ``dtype`` on ``device`` can hold ``kv_dtype``."""
    if kv_dtype is None:
        return
    if kv_dtype not in KV_DTYPES:
        raise TypeError(f"pyattn: kv_dtype must be torch.int8, torch.float8_e4m3fn or None, got {shown(kv_dtype)}")
    if dtype == torch.float64:
        raise NotImplementedError(
            f"pyattn: a cache with kv_dtype={kv_dtype} is computed in float32: {dropped} must be float32, bfloat16 or "
            f"float16, got {dtype}"
        )
    if device is not None and device.type not in ("cpu", "meta"):
        raise NotImplementedError(f"pyattn: a cache with kv_dtype={kv_dtype} must be on the CPU, got {device}")


def rotation_for(kv_dtype: torch.dtype, head_dim: int, head_dim_v: int, shared_values: bool) -> int:
    """The columns of a block that is rotated, a power of two; 1: none.

    Blocks of shared values hold no other columns, so their rotation can be undone in out.
    """
    if kv_dtype != torch.int8:
        return 1
    columns = math.gcd(head_dim, head_dim_v) if shared_values else head_dim
    return columns & -columns if columns else 1


def bytes_of(t: Tensor) -> Tensor:
    """Values as int8: few of torch's operators copy rows of float8."""
    return t.view(torch.int8)


def quantized(x: Tensor, kv_dtype: torch.dtype, rotation: int) -> tuple[Tensor, Tensor]:
    """x (.., columns) -> its values, as int8's bytes, and scales (.., 1)."""
    values, scales = ops.cache_quantize(x, rotation, kv_dtype != torch.int8)
    return bytes_of(values), scales.unsqueeze(-1)


def dequantized(values: Tensor, scales: Tensor, rotation: int, dtype: torch.dtype) -> Tensor:
    """The numbers that values (.., columns) with scales (.., 1) stand for."""
    x = values.to(torch.float32) * scales
    if rotation > 1:
        x = ops.cache_rotate(x, rotation, True)
    return x.to(dtype)
