"""Rows of keys and values in 8 bits: the rotation, quantising, and the numbers that values and scales stand for."""

import torch
from torch import Tensor


def rotation(columns: int, block: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The orthogonal (columns, columns) matrix by which rows of keys and queries are multiplied.

    ``diag(signs) H / sqrt(block)`` in blocks along the diagonal, H a Hadamard matrix: ``H_ij = (-1)^popcount(i & j)``.
    """
    signs = []
    for column in range(columns):
        x = column * 0x9E3779B1 & 0xFFFFFFFF
        x = (x ^ x >> 15) * 0x85EBCA77 & 0xFFFFFFFF
        signs.append(-1.0 if (x ^ x >> 13) >> 31 else 1.0)
    hadamard = [[(-1.0) ** (i & j).bit_count() for j in range(block)] for i in range(block)]
    whole: Tensor = torch.block_diag(*[torch.tensor(hadamard, dtype=dtype)] * (columns // max(1, block)))
    rotated: Tensor = torch.tensor(signs, dtype=dtype)[:, None] * whole / block**0.5
    return rotated


def quantized(x: Tensor, kv_dtype: torch.dtype, block: int = 1) -> tuple[Tensor, Tensor]:
    """x (.., columns) -> values in kv_dtype and scales (.., 1); a row that is not finite has scale NaN."""
    if block > 1:
        x = x @ rotation(x.shape[-1], block, x.dtype).to(x.device)
    scale = x.abs().amax(-1, keepdim=True) / (127 if kv_dtype == torch.int8 else 448)
    scale = scale.masked_fill(~x.isfinite().all(-1, keepdim=True), torch.nan)
    steps = torch.where(scale > 0, x / scale, 0.0)
    if kv_dtype == torch.int8:
        return steps.round().clamp(-127, 127).to(kv_dtype), scale
    return steps.clamp(-448, 448).to(kv_dtype), scale


def dequantized(values: Tensor, scales: Tensor, block: int = 1) -> Tensor:
    """The numbers that values (.., columns) stand for, in the dtype of the scales (.., 1)."""
    x = values.to(scales.dtype) * scales
    return x @ rotation(x.shape[-1], block, x.dtype).mT.to(x.device) if block > 1 else x
