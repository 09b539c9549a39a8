"""Rotary embeddings by the formula in flash-attn's documentation."""

import torch


def turned(x, positions, angle, interleaved=False):
    """x (..., H, D) rotated: its first columns, read as complex numbers, times e^(i angle of their position)."""
    half = angle.shape[1]
    pairs = x[..., : 2 * half].unflatten(-1, (half, 2) if interleaved else (2, half))
    numbers = torch.view_as_complex((pairs if interleaved else pairs.mT).contiguous())
    pairs = torch.view_as_real(numbers * torch.polar(torch.ones_like(angle), angle)[positions][..., None, :])
    return torch.cat([(pairs if interleaved else pairs.mT).flatten(-2), x[..., 2 * half :]], -1)
