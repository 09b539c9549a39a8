"""The memory of a cache: its dtypes, allocation and copies."""

from typing import TypeVar

import torch
from torch import Tensor

from pyattn import ops
from pyattn.arguments import shown

Cache = TypeVar("Cache")

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_dtype(dtype: torch.dtype) -> None:
    """TypeError unless ``dtype`` is one of :data:`DTYPES`."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"pyattn: dtype must be a torch.dtype, such as torch.float32, got {shown(dtype)}")
    if dtype not in DTYPES:
        raise TypeError(f"pyattn: dtype must be float64, float32, bfloat16 or float16, got {dtype}")


def allocated(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device | None, page_size: int | None
) -> Tensor:
    """Zeros (B, Hkv, slots, D), or, for shape (Hkv, pages, page_size, D), zeros (pages, page_size, Hkv, D)."""
    made = torch.empty(shape, dtype=dtype, device=device)
    ops.cache_clear(made)
    # A head's rows of adjacent pages are contiguous, which is read fastest.
    return made if page_size is None else made.permute(1, 2, 0, 3)


def copied(cache: Cache, device: torch.device, dtype: torch.dtype) -> Cache:
    """A cache with copies of all tensors, k and v in ``dtype``; other attributes are shared."""
    made = object.__new__(type(cache))
    with torch.inference_mode(False):
        for name, value in vars(cache).items():
            if name in ("k", "v"):
                storage = torch.empty_like(value, dtype=dtype, device=device)
                ops.cache_clear(storage)
                setattr(made, name, storage.copy_(value))
            else:
                setattr(made, name, value.to(device, copy=True) if isinstance(value, Tensor) else value)
    return made
